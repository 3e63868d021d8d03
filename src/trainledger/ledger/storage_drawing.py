"""A storage drawn as boxes in plain text, with the elements of a tensor over it."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainledger.ledger.strided import Strided

WIDTH = 80
_MOST_IN_A_ROW = 16


def drawing(tensor: Strided, most: int) -> str:
    """The storage of a tensor as boxes, and the place of each element; a sentence where it holds more than ``most``."""
    size = tensor.storage_nbytes // tensor.itemsize
    if size > most or tensor.elements > 4 * most:
        return f"no drawing: the storage holds {size:,} elements, and {most} are drawn at most"
    if not tensor.elements or not size:
        return "no drawing: the tensor has no elements"
    places = [tensor.place(index) for index in product(*map(range, tensor.shape))]
    return "\n".join([*_boxes(tensor, size, places), *_grid(tensor, places)])


def _boxes(tensor: Strided, size: int, places: list[int]) -> list[str]:
    """Each element of the storage as a box that says which element of the tensor it is."""
    inside: dict[int, list[int]] = {}
    for number, place in enumerate(places):
        inside.setdefault(place, []).append(number)
    text = {place: _numbers(numbers) for place, numbers in inside.items()}
    wide = max(2, len(str(size - 1)), *map(len, text.values())) + 2
    row = min(_row_of(tensor, size), (WIDTH - 1) // (wide + 1))
    lines = [f"the storage, {size} elements of {tensor.itemsize} bytes in the order of memory: above a box its",
             "place, in it the number of the tensor's element, counted row by row"]  # fmt: skip
    for start in range(0, size, row):
        here = range(start, min(start + row, size))
        rule = "+" + "+".join("-" * wide for _ in here) + "+"
        lines.append(" " + " ".join(str(place).rjust(wide - 1) + " " for place in here).rstrip())
        lines += [rule, "|" + "|".join(text.get(place, "").rjust(wide - 1) + " " for place in here) + "|", rule]
    return lines


def _numbers(numbers: list[int]) -> str:
    """Which elements one box is: all of them where they are few.

    >>> _numbers([3]), _numbers([0, 4]), _numbers([0, 1, 2, 3])
    ('3', '0,4', '0..3')
    """
    if len(numbers) <= 2:
        return ",".join(map(str, numbers))
    return f"{numbers[0]}..{numbers[-1]}"


def _row_of(tensor: Strided, size: int) -> int:
    """Boxes in a row: as many as a step of the tensor's larger strides, where that parts a longer storage evenly."""
    if size <= _MOST_IN_A_ROW:
        return _MOST_IN_A_ROW
    steps = {step for step in tensor.stride if 1 < step <= _MOST_IN_A_ROW and size % step == 0}
    return max(steps, default=_MOST_IN_A_ROW)


def _grid(tensor: Strided, places: list[int]) -> list[str]:
    """The place of each element, rows below each other; dims before the last two are told by their index."""
    if len(tensor.shape) < 2:
        return ["the tensor, each element by its place in the storage", *_folded(places)]
    rows, columns = tensor.shape[-2:]
    wide = max(len(str(each)) for each in places)
    lines = ["the tensor, each element by its place in the storage"]
    if columns * (wide + 2) > WIDTH:
        return [*lines, *_folded(places)]
    block = rows * columns
    for number, index in enumerate(product(*map(range, tensor.shape[:-2]))):
        if index:
            lines.append(f"[{', '.join(map(str, index))}, :, :]")
        for start in range(number * block, (number + 1) * block, columns):
            lines.append("".join("  " + str(each).rjust(wide) for each in places[start : start + columns]))
    return lines


def _folded(places: list[int]) -> list[str]:
    wide = max(len(str(each)) for each in places) + 2
    room = WIDTH // wide
    return ["".join(str(each).rjust(wide) for each in places[at : at + room]) for at in range(0, len(places), room)]
