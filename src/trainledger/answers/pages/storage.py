"""A tensor over its storage, drawn cell by cell, and the same as tables: where each element lies, and at which byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

from trainledger.report.chart import COLOURS, GREY, Axis, Bars, Chart, Mark, Words
from trainledger.report.document import Table
from trainledger.spec.frozen import frozen
from trainledger.spec.units import ceil_div
from trainledger.tensors.strided import list_text, row_of

if TYPE_CHECKING:
    from trainledger.tensors.strided import Strided

MOST, MOST_ROWS = 256, 48  # cells and rows of them that are drawn
_HUES = COLOURS[:7]
_NOBODY = "#cccccc"  # a place of the storage that is no element of the tensor
_NAMED = 4  # indices of one place that are listed
Index = tuple[int, ...]
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
    count = max(cell.row for cell in cells) + 1
    marks: list[Mark] = []
    for group, colour in dict.fromkeys((cell.group, cell.colour) for cell in cells):
        own = [cell for cell in cells if (cell.group, cell.colour) == (group, colour)]
        starts = [cell.column for cell in own]
        marks.append(
            Bars([cell.row for cell in own], starts, [start + 1 for start in starts], group, colour,
                 [cell.said for cell in own], thick=0.94, opacity=_PALE, edge=GREY)
        )  # fmt: skip
    places = [cell.column + 0.5 for cell in cells]
    marks.append(Words(places, [cell.row for cell in cells], [cell.text for cell in cells]))
    names = tuple(rows.get(row, "") for row in range(count))
    return Chart(title, tuple(marks), Axis(below, ends=(0, columns), ticks={}), Axis(names=names), height=_ROW * count)


def why_not_drawn(one: Strided) -> str:
    """Why a tensor cannot be drawn; empty where it can."""
    size = one.storage_nbytes // one.itemsize
    if not one.elements or not size:
        return "the tensor has no elements"
    if size > MOST:
        return f"the storage holds {size:,} elements, and {MOST} are drawn at most"
    if one.elements > MOST:
        return f"the tensor has {one.elements:,} elements, and {MOST} are drawn at most"
    rows = one.elements // (one.shape[-1] if one.shape else 1)
    return f"the tensor has {rows} rows, and {MOST_ROWS} are drawn at most" if rows > MOST_ROWS else ""


def storage_table(one: Strided) -> Table:
    """Each place of the storage with its byte and the elements of the tensor that lie there."""
    inside = _by_place(one)
    rows = tuple((place, place * one.itemsize, _named(inside.get(place, []))) for place in range(_size(one)))
    return Table("storage", ("place", "byte", "element"), rows, units=("integer", "integer"), align="rrl")


def elements_table(one: Strided) -> Table:
    """Each element of the tensor by its index, with its place in the storage and its byte."""
    rows = tuple((list_text(index), one.place(index), one.byte(index)) for index in _indices(one))
    return Table("elements", ("element", "place", "byte"), rows, units=("", "integer", "integer"), align="lrr")


def storage_chart(one: Strided, title: str) -> Chart:
    """The storage as cells in memory order, in the colours of the tensor's rows.

    A cell says its place, its byte and which elements of the tensor it is; it shows the number of the element,
    counted row by row.
    """
    inside, size = _by_place(one), _size(one)
    wide = row_of(one, size)
    numbers = {index: str(number) for number, index in enumerate(_indices(one))}
    cells = [
        Cell(
            place % wide,
            place // wide,
            _colour(one, found),
            _numbers([numbers[e] for e in found]),
            f"place {place}, byte {place * one.itemsize}: {_named(found)}",
        )
        for place in range(size)
        for found in [inside.get(place, [])]
    ]
    ticks = {row: str(row * wide) for row in range(ceil_div(size, wide))}
    return cell_chart(title, "in memory order; next to each row its first place", cells, wide, ticks)


def elements_chart(one: Strided, title: str) -> Chart:
    """The tensor as cells by index, rows and columns being its last two dims; in each its place in the storage.

    Dims before the last two are blocks below each other. Colours are those of `storage_chart`.
    """
    columns = one.shape[-1] if one.shape else 1
    cells: list[Cell] = []
    ticks: dict[int, str] = {}
    for number, index in enumerate(_indices(one)):
        row = number // columns
        ticks.setdefault(row, f"[{', '.join(map(str, index[:-1]))}, :]" if len(index) > 1 else "")
        place = one.place(index)
        said = f"element {list_text(index)}: place {place}, byte {one.byte(index)}"
        cells.append(Cell(number % columns, row, _colour(one, [index]), str(place), said))
    return cell_chart(title, "in each cell its place in the storage", cells, columns, ticks)


def _size(one: Strided) -> int:
    return one.storage_nbytes // one.itemsize


def _indices(one: Strided) -> list[Index]:
    return [*product(*map(range, one.shape))]


def _by_place(one: Strided) -> dict[int, list[Index]]:
    found: dict[int, list[Index]] = {}
    for index in _indices(one):
        found.setdefault(one.place(index), []).append(index)
    return found


def _colour(one: Strided, indices: list[Index]) -> str:
    """The colour of the row of the first of these elements; of a tensor with one dim that of the element."""
    if not indices:
        return _NOBODY
    return _HUES[_row(one, indices[0]) % len(_HUES)]


def _row(one: Strided, index: Index) -> int:
    """The number of a row, which is all but the last dim; of a tensor with one dim the index."""
    number = 0
    for at, size in zip(index[: max(1, len(index) - 1)], one.shape, strict=False):
        number = number * size + at
    return number


def _named(indices: list[Index]) -> str:
    if not indices:
        return "no element of the tensor"
    more = len(indices) - _NAMED
    few = ", ".join(list_text(index) for index in indices[:_NAMED])
    return f"{few} and {more} more" if more > 0 else few


def _numbers(numbers: list[str]) -> str:
    return ",".join(numbers) if len(numbers) <= 2 else f"{numbers[0]}.."
