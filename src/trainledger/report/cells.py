"""Rows of cells, each with a few letters in it and a sentence that it says: storages, and bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainledger.report.document import Figure
from trainledger.report.style import GREY, arranged, bars, points
from trainledger.spec.frozen import frozen

_ROW, _AROUND = 30, 90  # pixels of a row of cells, and of the axes and titles
_PALE = 0.4  # so that dark letters are read on it, and light ones in the dark


@frozen
class Cell:
    """A cell at a column and a row: its colour, its text, and what it says; ``group`` is in the legend."""

    column: int
    row: int
    colour: str
    text: str
    said: str
    group: str = ""


def cell_figure(title: str, below: str, cells: Sequence[Cell], columns: int, rows: Mapping[int, str]) -> Figure:
    """The cells on ``columns`` columns; ``rows`` are the names of the rows that have one, ``below`` the axis's."""
    count = max(each.row for each in cells) + 1
    groups = {each.group: each.colour for each in cells}
    drawn = [_boxes(group, colour, [each for each in cells if each.group == group]) for group, colour in groups.items()]
    letters = points(
        "", [each.column + 0.5 for each in cells], [each.row for each in cells], "text",
        text=[each.text for each in cells], textposition="middle center", hoverinfo="skip", showlegend=False,
    )  # fmt: skip
    layout = arranged(title, below, height=_AROUND + _ROW * count, barmode="overlay", bargap=0.06)
    bare: dict[str, Any] = {"showgrid": False, "zeroline": False}
    layout["xaxis"] |= {**bare, "range": [0, columns], "showticklabels": False}
    layout["yaxis"] |= {**bare, "range": [count - 0.5, -0.5], "tickvals": [*rows], "ticktext": [*rows.values()]}
    return {"data": [*drawn, letters], "layout": layout}


def _boxes(group: str, colour: str, cells: Sequence[Cell]) -> dict[str, Any]:
    boxes = bars(
        group, [each.row for each in cells], [1] * len(cells), colour, "%{text}<extra></extra>",
        base=[each.column for each in cells], text=[each.said for each in cells], textposition="none",
        showlegend=bool(group),
    )  # fmt: skip
    colours = colour if group else [each.colour for each in cells]
    boxes["marker"] = {"color": colours, "opacity": _PALE, "line": {"color": GREY, "width": 0.5}}
    return boxes
