"""An axis: the place of a value between two pixels, on a linear or logarithmic scale or among names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite, log10
from typing import Any

from trainledger.spec.frozen import frozen

_ROOM = 0.05  # of an axis beyond its values


@frozen
class Extent:
    """The least and the largest place of what is drawn along an axis, and whether room is needed below and above."""

    low: float
    high: float
    below: bool = True
    above: bool = True


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
    """The position of a value on an axis of a kind: itself, its power of ten, or the number of its name."""
    if kind == "category" and isinstance(value, str):
        return float(categories.index(value)) if value in categories else None
    if isinstance(value, str) or value is None or not isfinite(value):
        return None
    if kind == "log":
        return log10(value) if value > 0 else None
    return float(value)


def kind_of(layout: dict[str, Any], firsts: Iterable[object]) -> str:
    """linear, log or category: what the layout says, else names where the first value of a trace is text."""
    named = layout.get("type")
    if named in ("linear", "log", "category"):
        return str(named)
    return "category" if "categoryarray" in layout or any(isinstance(each, str) for each in firsts) else "linear"


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
