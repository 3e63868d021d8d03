"""Scales: the pixels of an axis' values, its ends, its ticks and their words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import ceil, floor, inf, isclose, isfinite, log10
from sys import float_info
from typing import NamedTuple

from trainledger.report.chart import Area, Axis, Band, Bars, Chart, Line, significant
from trainledger.report.draw.elements import LINE, folded_to, width_of
from trainledger.spec.frozen import frozen

_LEAST, _SPARE = 0.45, 0.35  # of an axis that is held: what its values take at least; room beyond those that outgrew it
_APART = 10  # pixels between the words of two ticks
_EACH, _MOST = 45, 8  # at most a tick in so many pixels, and so many in all, of a linear axis
_DECADE_MOST, _MOST_SHOWN = 300, 1e30  # of what is pinned
_DECADES = 8  # of an axis that has minor ticks
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_STEPS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))


@frozen
class Scale:
    """Values from ``low`` to ``high`` (of a logarithmic one their powers of ten) between the pixels of two ends."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float | None) -> float | None:
        """The pixel of a value; None where it is missing, or none of the scale's.

        >>> Scale(0, 2, 100, 300, log=True).at(10), Scale(0, 2, 100, 300, log=True).at(0)
        (200.0, None)
        """
        if value is None or not isfinite(value) or (self.log and value <= 0):
            return None
        place = log10(value) if self.log else value
        return self.start + (place - self.low) * (self.end - self.start) / (self.high - self.low)

    def inside(self, values: Sequence[float | None]) -> list[float | None]:
        """The pixels of values, None for those that are beyond the ends."""
        low, high = min(self.start, self.end) - 0.5, max(self.start, self.end) + 0.5
        pixels = (self.at(value) for value in values)
        return [None if pixel is None or not low <= pixel <= high else pixel for pixel in pixels]

    def clamped(self, value: float) -> float:
        """The pixel of a value, or of the end that is nearest to it."""
        low, high = sorted((self.start, self.end))
        pixel = self.at(value)
        return self.start if pixel is None else min(max(pixel, low), high)


Held = Mapping[str, tuple[float, float]]  # the ends of axes of the picture before, by letter


def scale_of(
    chart: Chart, letter: str, start: float, end: float, held: Held | None = None, pinned: Held | None = None
) -> Scale:
    """The scale of an axis of the chart between two pixels; rows go down, columns to the right.

    An axis that is ``held`` changes only where its values leave it, or take less than 45 % of it. What is ``pinned``
    it shows too.

    >>> def high(value, held): return scale_of(Chart("", (Bars([0], [0], [value]),)), "x", 0, 100, {"x": held}).high
    >>> high(50, (0, 100)), high(100, (0, 100)), high(120, (0, 100)), high(40, (0, 100))
    (100, 100, 162.0, 42.0)
    """
    axis = chart.x if letter == "x" else chart.y
    if axis.names:
        low, high = -0.5, len(axis.names) - 0.5
        return Scale(low, high, *((end, start) if letter == "y" else (start, end)))
    pins = (pinned or {}).get(letter, ())
    return Scale(*_ends(chart, axis, letter, (held or {}).get(letter), pins), start, end, axis.log)


def _ends(
    chart: Chart, axis: Axis, letter: str, held: tuple[float, float] | None, pinned: Sequence[float]
) -> tuple[float, float]:
    known = list(_extents(chart, letter)) if axis.ends is None else [(axis.ends[0], False), (axis.ends[1], False)]
    places = [(log10(value) if axis.log else value, room) for value, room in known]
    if not places:
        return 0.0, 1.0
    places += [(end, False) for end in pinned if abs(end) < (_DECADE_MOST if axis.log else _MOST_SHOWN)]
    low, high = min(place for place, _ in places), max(place for place, _ in places)
    if low == high:
        room = 0.5 if axis.log or not low else abs(low) / 2
        return low - room, high + room
    spare = (0.0, 0.0)
    if held is not None and axis.ends is None:
        first, last = held
        near = 1e-6 * (last - first)
        if first - near <= low and high <= last + near and high - (low if first else 0) >= _LEAST * (last - first):
            return held
        spare = (_SPARE * (high - low) * (low < first), _SPARE * (high - low) * (high > last))
    room = (high - low) * axis.room
    first = low - max(spare[0], room * any(has for place, has in places if place < low + room))
    last = high + max(spare[1], room * any(has for place, has in places if place > high - room))
    if axis.log:
        return first, last
    return (0.0 if low == 0 or (axis.zero and low > 0) else first), (0.0 if high == 0 else last)


def _extents(chart: Chart, letter: str) -> Iterator[tuple[float, bool]]:
    """The values that an axis must show, and whether it has room beyond each."""
    for mark in chart.marks:
        values: Sequence[float | None] = ()
        room = True
        match mark:
            case Line():
                values, room = (mark.ys, True) if letter == "y" else (mark.xs, not mark.width or bool(mark.symbol))
            case Bars() if (letter == "y") == mark.upright:
                values = [*mark.starts, *mark.ends]
            case Bars():
                values = [row + side * mark.thick / 2 for row in mark.rows for side in (-1, 1)]
                room = False
            case Area():
                values = mark.xs
                if letter == "y":
                    sums = list(mark.sums())
                    values = [*([mark.floor] if isinstance(mark.floor, int | float) else mark.floor), *sums[-1]]
                room = letter == "y"
            case Band() if mark.axis == letter:
                values, room = (mark.start, mark.end), mark.end is None
        least, most = inf, -inf
        for value in values:
            if value is not None and isfinite(value) and (value > 0 or not (chart.x if letter == "x" else chart.y).log):
                least, most = min(least, value), max(most, value)
        if least <= most:
            yield from ((least, room), (most, room))


class Tick(NamedTuple):
    """A place on an axis in pixels, and its lines of text."""

    at: float
    lines: tuple[str, ...]


def ticks_of(axis: Axis, scale: Scale, *, is_x: bool) -> list[Tick]:
    """The ticks of an axis: those that it names, or as many numbers as there is room for."""
    low, high = scale.low, scale.high
    if axis.names or axis.ticks is not None:
        words = dict(enumerate(axis.names)) if axis.names else dict(axis.ticks or {})
        ticks = _ticks(scale, list(words), list(words.values()))
        if axis.names and is_x and not _is_readable(ticks, is_x):  # over as many lines as the room of each needs
            room = abs(scale.end - scale.start) / len(axis.names) - _APART
            ticks = [Tick(tick.at, tuple(folded_to(" ".join(tick.lines), room))) for tick in ticks]
        return _readable(ticks, is_x)
    if axis.log:
        values = log_ticks(low, high)
        return _readable(_ticks(scale, values, [_short(value) for value in values]), is_x)
    most = min(_MOST, round(abs(scale.end - scale.start) / _EACH))
    ticks = []
    for few in range(max(2, most), 1, -1):
        values = linear_ticks(low, high, few)
        ticks = _ticks(scale, values, tick_texts(values))
        if len(ticks) > 1 and _is_readable(ticks, is_x):
            return ticks
    return _readable(ticks, is_x)


def _ticks(scale: Scale, values: Sequence[float], texts: Sequence[str]) -> list[Tick]:
    places = zip(scale.inside(values), texts, strict=True)
    return [Tick(at, tuple(words.split("\n"))) for at, words in places if at is not None and words]


def _is_readable(ticks: Sequence[Tick], is_x: bool) -> bool:
    """Whether no two overlap."""
    rooms = [max(map(width_of, tick.lines)) + _APART if is_x else LINE * len(tick.lines) + 3 for tick in ticks]
    pairs = pairwise(zip(ticks, rooms, strict=True))
    return all(abs(a.at - b.at) >= (room_a + room_b) / 2 for (a, room_a), (b, room_b) in pairs)


def _readable(ticks: list[Tick], is_x: bool) -> list[Tick]:
    """Each tick, or each second, third ... so that no two overlap."""
    thinner = (ticks[::every] for every in range(1, len(ticks) + 1))
    return next((few for few in thinner if _is_readable(few, is_x)), [])


def minor_ticks(axis: Axis, scale: Scale) -> list[float]:
    """The pixels of 2, 3 ... 9 times each power of ten on a logarithmic axis of few powers of ten; of others none."""
    if not axis.log or axis.ticks is not None or scale.high - scale.low > _DECADES:
        return []
    powers = range(floor(scale.low), ceil(scale.high))
    pixels = scale.inside([times * 10.0**power for power in powers for times in range(2, 10)])
    return [pixel for pixel in pixels if pixel is not None]


def linear_ticks(low: float, high: float, most: int) -> list[float]:
    """At most about ``most`` round numbers between two, 1, 2 or 5 times a power of ten apart.

    >>> linear_ticks(0, 105, 6)
    [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
    """
    rough = (high - low) / max(1, most)
    power = 10.0 ** floor(log10(rough))
    step = next(times * power for times in (1, 2, 5, 10) if times * power >= 0.999 * rough)
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return [float(f"{at * step:.12g}") for at in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between two powers of ten.

    >>> log_ticks(-0.1, 2.2), log_ticks(0, 1)
    ([1.0, 10.0, 100.0], [1.0, 2.0, 5.0, 10.0])
    """
    high = min(high, float_info.max_10_exp)
    decades = high - low
    if decades < 2:
        every = [m * 10.0**power for power in range(floor(low), ceil(high) + 1) for m in (1, 2, 5)]
        ticks = [value for value in every if low - 1e-9 <= log10(value) <= high + 1e-9]
        return ticks if len(ticks) >= 2 else [value for value in linear_ticks(10**low, 10**high, 5) if value > 0]
    step = max(1, round(decades / 6))
    return [10.0 ** (at * step) for at in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def tick_texts(values: Sequence[float]) -> list[str]:
    """The labels of a linear axis' ticks: all with the same decimals, large numbers with the letter of their scale.

    >>> tick_texts([0.0, 0.5, 1.0]), tick_texts([0, 2e6, 4e6]), tick_texts([1e21, 1e22])
    (['0', '0.5', '1.0'], ['0', '2M', '4M'], ['10²¹', '10²²'])
    """
    most = max(map(abs, values), default=0.0)
    if not 1e-4 < most < 1e15:
        return [_short(value) for value in values]
    scale, letter = next((step for step in _STEPS if most >= 2 * step[0]), (1.0, ""))
    scaled = [value / scale for value in values]
    decimals = next((n for n in range(9) if all(isclose(value, round(value, n), abs_tol=1e-9) for value in scaled)), 9)
    return [f"{value:,.{decimals}f}{letter}" if value else "0" for value in scaled]


def _short(value: float) -> str:
    """A round number in a few letters."""
    if not value:
        return "0"
    exponent = floor(log10(abs(value)) + 1e-9)
    if -4 < exponent < 15:
        scale, letter = next((step for step in _STEPS if abs(value) >= 0.999 * step[0]), (1.0, ""))
        return f"{significant(value / scale)}{letter}"
    mantissa = significant(value / 10.0**exponent, 3)
    power = f"10{str(exponent).translate(_RAISED)}"
    return power if mantissa == "1" else f"{mantissa}·{power}"
