"""The positions of an axis' ticks and their labels: as many as can be read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, floor, log10
from typing import Any, NamedTuple

from trainledger.report.svg.axes import Axis
from trainledger.report.svg.elements import LINE, folded_to, lines_of, width_of
from trainledger.report.svg.numerals import tick_texts

_APART = 10  # pixels between the words of two ticks
_EACH, _MOST = 45, 8  # at most a tick in so many pixels, and so many in all, of a linear axis
_DECADES = 8  # of an axis that has minor ticks


class Tick(NamedTuple):
    """A place on an axis in pixels, and its lines of text."""

    at: float
    lines: tuple[str, ...]


def ticks_of(axis: Axis, layout: dict[str, Any], *, is_x: bool) -> list[Tick]:
    """The ticks of an axis: those that its layout names, all names, or as many numbers as there is room for."""
    low, high = sorted((axis.low, axis.high))
    form = str(layout.get("tickformat", ""))
    if layout.get("tickvals") is not None:
        values = list(layout["tickvals"])
        return _readable(_ticks(axis, values, layout.get("ticktext") or tick_texts(values, form)), is_x)
    if axis.kind == "category":
        names = [each for at, each in enumerate(axis.categories) if low <= at <= high]
        return _named(_ticks(axis, names, names), abs(axis.end - axis.start) / (high - low), is_x)
    if axis.kind == "log":
        step = layout.get("dtick")
        values = log_ticks(low, high, step if isinstance(step, int | float) else 0.0)
        return _readable(_ticks(axis, values, tick_texts(values, form, is_log=True)), is_x)
    most = min(_MOST, round(abs(axis.end - axis.start) / _EACH))
    tried = (linear_ticks(low, high, few) for few in range(max(2, most), 1, -1))
    ticks: list[Tick] = []
    for values in tried:
        ticks = _ticks(axis, values, tick_texts(values, form))
        if len(ticks) > 1 and _is_readable(ticks, is_x):
            return ticks
    return _readable(ticks, is_x)


def _ticks(axis: Axis, values: Sequence[Any], texts: Sequence[object]) -> list[Tick]:
    places = zip(axis.pixels(values), texts, strict=True)
    return [Tick(at, tuple(lines_of(str(words)))) for at, words in places if at is not None]


def _named(ticks: list[Tick], room: float, is_x: bool) -> list[Tick]:
    """Names of a flat axis over as many lines as the ``room`` of each needs, where that is enough for words."""
    if not is_x or _is_readable(ticks, is_x):
        return ticks
    return _readable([Tick(each.at, tuple(folded_to(each.lines, room - _APART))) for each in ticks], is_x)


def _is_readable(ticks: Sequence[Tick], is_x: bool) -> bool:
    """Whether no two overlap."""
    rooms = [max(map(width_of, each.lines)) + _APART if is_x else LINE * len(each.lines) + 3 for each in ticks]
    pairs = pairwise(zip(ticks, rooms, strict=True))
    return all(abs(a.at - b.at) >= (room_a + room_b) / 2 for (a, room_a), (b, room_b) in pairs)


def _readable(ticks: list[Tick], is_x: bool) -> list[Tick]:
    """Each tick, or each second, third ... so that no two overlap."""
    thinner = (ticks[::every] for every in range(1, len(ticks) + 1))
    return next((each for each in thinner if _is_readable(each, is_x)), [])


def minor_ticks(axis: Axis, layout: dict[str, Any]) -> list[float]:
    """The pixels of 2, 3 ... 9 times each power of ten on a logarithmic axis of few powers of ten; of others none."""
    low, high = sorted((axis.low, axis.high))
    of_tens = layout.get("tickvals") is None and layout.get("dtick", 1) == 1
    if axis.kind != "log" or not of_tens or high - low > _DECADES:
        return []
    places = (power + log10(times) for power in range(floor(low), ceil(high)) for times in range(2, 10))
    return [axis.pixel(each) for each in places if low <= each <= high]


def linear_ticks(low: float, high: float, most: int) -> list[float]:
    """At most about ``most`` round numbers between two, 1, 2 or 5 times a power of ten apart.

    >>> linear_ticks(0, 105, 6)
    [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
    """
    rough = (high - low) / max(1, most)
    power = 10.0 ** floor(log10(rough))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= 0.999 * rough)
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return [float(f"{each * step:.12g}") for each in range(first, last + 1)]


def log_ticks(low: float, high: float, step: float = 0.0) -> list[float]:
    """Round numbers between two powers of ten: ``step`` decades apart, or as many as suit the length.

    >>> log_ticks(-0.1, 2.2), log_ticks(0, 1), log_ticks(0, 1, 0.30103)
    ([1.0, 10.0, 100.0], [1.0, 2.0, 5.0, 10.0], [1.0, 2.0, 4.0, 8.0])
    """
    decades = high - low
    if step and step >= 1 and decades < 2:
        step = 0.0  # too few to read an axis by
    if not step and decades < 2:
        every = [m * 10.0**power for power in range(floor(low), ceil(high) + 1) for m in (1, 2, 5)]
        found = [each for each in every if low - 1e-9 <= log10(each) <= high + 1e-9]
        if len(found) >= 2:
            return found
        return [each for each in linear_ticks(10**low, 10**high, 5) if each > 0]
    step = step or max(1, round(decades / 6))
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return [float(f"{10 ** (each * step):.5g}") for each in range(first, last + 1)]
