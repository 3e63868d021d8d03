"""Rows of cells, each with a few letters in it and a sentence that it says: storages, and bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainledger.report.chart import GREY, Axis, Bars, Chart, Mark, Words
from trainledger.spec.frozen import frozen

_ROW = 30  # pixels of a row of cells
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


def cell_chart(title: str, below: str, cells: Sequence[Cell], columns: int, rows: Mapping[int, str]) -> Chart:
    """The cells on ``columns`` columns; ``rows`` are the names of the rows that have one, ``below`` the axis's."""
    count = max(each.row for each in cells) + 1
    marks: list[Mark] = []
    for group, colour in dict.fromkeys((each.group, each.colour) for each in cells):
        own = [each for each in cells if (each.group, each.colour) == (group, colour)]
        starts = [each.column for each in own]
        marks.append(
            Bars([each.row for each in own], starts, [each + 1 for each in starts], group, colour,
                 [each.said for each in own], thick=0.94, opacity=_PALE, edge=GREY)
        )  # fmt: skip
    places = [each.column + 0.5 for each in cells]
    marks.append(Words(places, [each.row for each in cells], [each.text for each in cells]))
    names = tuple(rows.get(row, "") for row in range(count))
    return Chart(title, tuple(marks), Axis(below, ends=(0, columns), ticks={}), Axis(names=names), height=_ROW * count)
