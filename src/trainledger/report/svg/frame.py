"""The frame of a drawing: its axes put between pixels, with their ticks, and what is around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainledger.report.svg.axes import Axis
from trainledger.report.svg.elements import LINE, SMALL, folded_to, lines_of, width_of
from trainledger.report.svg.ticks import Tick, ticks_of
from trainledger.spec.frozen import frozen

EDGE = 6  # pixels around all
TICK = 6  # pixels from an axis to the words of its ticks
_TITLE = 20  # pixels of the title of an upright axis
_LEGEND = 20  # pixels that `style.arranged` leaves for a line of a legend
_APART = 4  # pixels between a legend and what is below it
_MARGINS = {"t": 36, "b": 55, "r": 40}
_HEIGHT = 360
_NARROW = 600  # pixels: a drawing for a telephone


@frozen
class Frame:
    """The axes of a drawing by name (x, x2, y ...), their layouts and ticks, and the box of all plots in pixels.

    ``spare`` is what each row of bars has more in height, since its name takes several lines.
    """

    axes: dict[str, Axis]
    layouts: dict[str, dict[str, Any]]
    ticks: dict[str, list[Tick]]
    left: float
    top: float
    width: float
    height: float
    spare: float = 0.0

    def pixel(self, reference: str, value: Any, letter: str, *, of_words: bool = False) -> float | None:
        """The pixel of a value on an axis, of a share of an axis (``y domain``), or of a share of all (``paper``).

        On a logarithmic axis Plotly gives the place of words (annotations) as a power of ten, of lines as a value.
        """
        name, _, domain = reference.partition(" ")
        axis = self.axes.get(name)
        if axis is not None and not domain:
            return axis.pixel(value) if of_words and axis.kind == "log" else axis.at(value)
        if letter == "x":
            low, high = (axis.start, axis.end) if axis else (self.left, self.left + self.width)
            return float(low + value * (high - low))
        low, high = sorted((axis.start, axis.end)) if axis else (self.top, self.top + self.height)
        return float(high - value * (high - low))

    def room(self, name: str) -> float:
        """The pixels that words take at the left of an upright axis."""
        return _room(self.layouts[name], self.ticks[name])


def frame_of(layout: dict[str, Any], axes: dict[str, Axis], width: int, legend: float) -> Frame:
    """The axes of a layout in a drawing of ``width`` pixels below a legend of a height."""
    layouts = {name: axis_layout(layout, name) for name in axes}
    margin = _MARGINS | layout.get("margin", {})
    rows = [each for each in layout.get("annotations", ()) if is_row(each)]
    spare = LINE * max((len(row_lines(each, width - 24)) - 1 for each in rows), default=0)
    top = legend + max(8, margin["t"] - _LEGEND) + _APART * (legend > 0) + spare / 2
    height = layout.get("height", _HEIGHT) - margin["t"] - margin["b"] + spare * len(rows)
    placed, ticks = {}, {}
    for name in (each for each in axes if each[0] == "y"):
        low, high = layouts[name].get("domain", (0, 1))
        placed[name] = axes[name].between(top + height * (1 - low), top + height * (1 - high))
        ticks[name] = ticks_of(placed[name], layouts[name], is_x=False)
    left = EDGE + max(_room(layouts[name], found) for name, found in ticks.items())
    right = width - (min(margin["r"], 40) if width > _NARROW else 16)
    for name in (each for each in axes if each[0] == "x"):
        low, high = layouts[name].get("domain", (0, 1))
        placed[name] = axes[name].between(left + low * (right - left), left + high * (right - left))
        ticks[name] = ticks_of(placed[name], layouts[name], is_x=True)
    return Frame(placed, layouts, ticks, left, top, right - left, height, spare)


def axis_layout(layout: dict[str, Any], name: str) -> dict[str, Any]:
    """What a layout says of the axis x2: its ``xaxis2``."""
    found: dict[str, Any] = layout.get(f"{name[0]}axis{name[1:]}", {})
    return found


def title_of(axis: dict[str, Any]) -> str:
    """The title of an axis, as Plotly has it."""
    return str(axis.get("title", {}).get("text", ""))


def is_row(annotation: dict[str, Any]) -> bool:
    """Whether words are the name of a row of bars, written above them over the whole width."""
    return annotation.get("xref") == "paper" and annotation.get("x") == 0 and "yshift" in annotation


def row_lines(annotation: dict[str, Any], width: float) -> list[str]:
    """The name of a row over as many lines as it needs."""
    return folded_to(lines_of(str(annotation["text"])), width, SMALL)


def _room(axis: dict[str, Any], ticks: Sequence[Tick]) -> float:
    words = 0.0
    if axis.get("showticklabels") is not False:
        words = max((width_of(line) for each in ticks for line in each.lines), default=0) + TICK
    return words + (_TITLE if title_of(axis) else 4)
