"""An axis: the place of a value between two pixels, on a linear or logarithmic scale or among names; and its ticks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil, floor, isfinite, log10
from typing import Any

from trainledger.frozen import frozen
from trainledger.report.svg.elements import SMALL, lines_of, width_of
from trainledger.report.svg.numerals import tick_texts

_ROOM = 0.05  # of an axis beyond its values
_APART = 10  # pixels between the words of two ticks
_LETTER_ROWS = 1.5  # of a line of words, from one tick to the next upwards


@frozen
class Extent:
    """The least and the largest place of what is drawn along an axis, and whether room is needed below and above."""

    low: float
    high: float
    below: bool = True
    above: bool = True


@frozen
class Tick:
    """A place on an axis in pixels, and the lines that stand there."""

    at: float
    lines: tuple[str, ...]


@frozen
class Axis:
    """Values between ``low`` and ``high`` (of a logarithmic axis their powers of ten), drawn from ``start`` to ``end``.

    ``kind`` is linear, log or category, ``categories`` are the names of the last.
    """

    kind: str
    low: float
    high: float
    categories: tuple[str, ...] = ()
    start: float = 0.0
    end: float = 1.0

    def between(self, start: float, end: float) -> Axis:
        """The same axis between other pixels."""
        return Axis(self.kind, self.low, self.high, self.categories, start, end)

    def place(self, value: Any) -> float | None:
        """The place of a value before it is scaled to pixels; None where it has none."""
        return place(value, self.kind, self.categories)

    def pixel(self, place: float) -> float:
        """The pixel of a place."""
        return self.start + (place - self.low) * (self.end - self.start) / (self.high - self.low)

    def at(self, value: Any) -> float | None:
        """The pixel of a value; None where the axis has no place for it.

        >>> Axis("log", 0, 2, start=100, end=300).at(10), Axis("category", -0.5, 1.5, ("a", "b"), 0, 80).at("b")
        (200.0, 60.0)
        """
        found = self.place(value)
        return None if found is None else self.pixel(found)

    def pixels(self, values: Sequence[Any]) -> list[float | None]:
        """The pixels of many values."""
        if self.kind == "linear":
            slope = (self.end - self.start) / (self.high - self.low)
            first = self.start - self.low * slope
            try:
                return [first + each * slope for each in values]
            except TypeError:  # a value that is missing
                pass
        return [self.at(each) for each in values]

    def clamped(self, pixel: float) -> float:
        """The nearest pixel that is on the axis."""
        low, high = (self.start, self.end) if self.start < self.end else (self.end, self.start)
        return low if pixel < low else high if pixel > high else pixel


def place(value: Any, kind: str, categories: Sequence[str]) -> float | None:
    """Where a value stands on an axis of a kind: itself, its power of ten, or the number of its name."""
    if kind == "category" and isinstance(value, str):
        return float(categories.index(value)) if value in categories else None
    if isinstance(value, str) or value is None or not isfinite(value):
        return None
    if kind == "log":
        return log10(value) if value > 0 else None
    return float(value)


def kind_of(layout: dict[str, Any], values: Iterable[object]) -> str:
    """linear, log or category: what the layout says, else names where a value is text."""
    named = layout.get("type")
    if named in ("linear", "log", "category"):
        return str(named)
    return "category" if "categoryarray" in layout or any(isinstance(each, str) for each in values) else "linear"


def axis_of(layout: dict[str, Any], kind: str, categories: Sequence[str], extents: Sequence[Extent]) -> Axis:
    """The axis of the range of its layout, or that shows all extents; ``autorange`` and ``rangemode`` as in Plotly."""
    low, high = layout["range"] if has_range(layout) else _range(layout, kind, extents)
    if layout.get("autorange") == "reversed":
        low, high = high, low
    return Axis(kind, float(low), float(high), tuple(categories))


def has_range(layout: dict[str, Any]) -> bool:
    """Whether a layout says where an axis begins and ends."""
    ends = layout.get("range")
    return ends is not None and None not in ends


def _range(layout: dict[str, Any], kind: str, extents: Sequence[Extent]) -> tuple[float, float]:
    low = min((each.low for each in extents), default=0.0)
    high = max((each.high for each in extents), default=1.0)
    if low == high:
        room = 0.5 if kind != "linear" or not low else abs(low) / 2
        return low - room, high + room
    room = (high - low) * _ROOM
    first = low - room * any(each.below and each.low < low + room for each in extents)
    last = high + room * any(each.above and each.high > high - room for each in extents)
    if layout.get("rangemode") == "tozero" and kind == "linear":
        first = 0.0 if low >= 0 else first
        last = 0.0 if high <= 0 else last
    return first, last


def ticks_of(axis: Axis, layout: dict[str, Any], *, is_x: bool) -> list[Tick]:
    """The ticks of an axis, as many as there is room for; all of an upright axis of names."""
    low, high = sorted((axis.low, axis.high))
    length = abs(axis.end - axis.start)
    form = str(layout.get("tickformat", ""))
    if layout.get("tickvals") is not None:
        values = list(layout["tickvals"])
        texts = [str(each) for each in layout.get("ticktext") or tick_texts(values, form)]
    elif axis.kind == "category":
        values = [each for at, each in enumerate(axis.categories) if low <= at <= high]
        texts = [str(each) for each in values]
    elif axis.kind == "log":
        step = layout.get("dtick")
        values = log_ticks(low, high, step if isinstance(step, int | float) else 0.0)
        texts = tick_texts(values, form, is_log=True)
    else:
        values = linear_ticks(low, high, max(2, round(length / (95 if is_x else 45))))
        texts = tick_texts(values, form)
    places = zip(axis.pixels(values), texts, strict=True)
    found = [Tick(at, tuple(lines_of(words))) for at, words in places if at is not None]
    if axis.kind == "category" and not is_x:
        return found
    return _readable([each for each in found if axis.clamped(each.at) == each.at or axis.kind != "linear"], is_x)


def _readable(ticks: list[Tick], is_x: bool) -> list[Tick]:
    """Each tick, or each second, third ... so that no two stand in each other's way."""
    rooms = [max((width_of(line) for line in each.lines), default=0) + _APART if is_x
             else SMALL * _LETTER_ROWS * len(each.lines) for each in ticks]  # fmt: skip
    for every in range(1, len(ticks) + 1):
        kept = range(0, len(ticks), every)
        if all(abs(ticks[a].at - ticks[b].at) >= (rooms[a] + rooms[b]) / 2 for a, b in pairwise(kept)):
            return [ticks[at] for at in kept]
    return ticks[:1]


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
