"""Where the elements of a tensor lie: shape, strides and offset over a storage, and what follows from them.

The same facts are shown of a tensor that is only described (`tensors.chain`) and of one of torch (`tensors.inspect`).
Strides and offsets are in elements, as torch counts them; addresses are in bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import product
from operator import mul

from trainledger.spec.frozen import frozen
from trainledger.spec.problem import Problem
from trainledger.spec.units import format_nbytes

MEMORY_FORMATS = {"channels_last": (1, 3, 2, 0), "channels_last_3d": (1, 4, 3, 2, 0)}  # dims, the quickest first
WIDTH = 80
_MOST_IN_A_ROW = 16


@frozen
class Strided:
    """A tensor over a storage; ``storage`` numbers the storages of a chain, the first is 0.

    ``address`` is the byte address of the storage's first element in memory, None where there is none to know. ``grad``
    is the format and shape of a torch tensor's .grad, ``grad_fn`` a name.

    >>> turned = Strided("fp32", 4, (8, 4), (1, 8), 0, 128)
    >>> turned.contiguous, turned.dense, turned.place((1, 2)), turned.byte((1, 2))
    (False, True, 17, 68)
    """

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage_nbytes: int
    storage: int = 0
    device: str = ""
    address: int | None = None
    requires_grad: bool | None = None
    is_leaf: bool | None = None
    grad: str | None = None
    grad_fn: str | None = None
    view_of: str = ""
    notes: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        return reduce(mul, self.shape, 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, one that lies under several indices counted for each."""
        return self.elements * self.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie one after the other in row-major order; dims of one element do not matter."""
        return self.elements == 0 or self._packed(reversed(range(len(self.shape))))

    @property
    def memory_format(self) -> str:
        """contiguous, channels_last, channels_last_3d, or nothing where it is none of them."""
        if self.contiguous:
            return "contiguous"
        return next((each for each in MEMORY_FORMATS if self.in_format(each)), "")

    def in_format(self, name: str) -> bool:
        """Whether the elements lie in a memory format of torch, by its name; a tensor may be in two."""
        if name == "contiguous":
            return self.contiguous
        order = MEMORY_FORMATS[name]
        return len(order) == len(self.shape) and self._packed(order)

    def _packed(self, dims: Iterable[int]) -> bool:
        """Whether the elements lie without gaps where the dims are walked in this order, the quickest first."""
        step = 1
        for dim in dims:
            if self.shape[dim] != 1:
                if self.stride[dim] != step:
                    return False
                step *= self.shape[dim]
        return True

    @property
    def dense(self) -> bool:
        """Whether the elements fill a piece of the storage without gap and overlap, in the order of some dims."""
        if self.elements == 0:
            return True
        dims = [index for index in range(len(self.shape)) if self.shape[index] != 1]
        return self._packed(sorted(dims, key=lambda dim: self.stride[dim]))

    @property
    def overlaps(self) -> bool:
        """Whether some dim has stride 0, so that several indices are one element."""
        return any(size > 1 and step == 0 for size, step in zip(self.shape, self.stride, strict=True))

    @property
    def span(self) -> tuple[int, int]:
        """The first place in the storage that is the tensor's, and the one after its last; equal where it is empty."""
        if self.elements == 0:
            return self.offset, self.offset
        return self.offset, self.offset + 1 + sum(
            (size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)
        )

    def place(self, index: Sequence[int]) -> int:
        """Which element of the storage an index is; IndexError where the tensor has no such index."""
        if len(index) != len(self.shape):
            raise IndexError(f"{self.title} has {len(self.shape)} dims, and the index has {len(index)}")
        place = self.offset
        for dim, (at, size, step) in enumerate(zip(index, self.shape, self.stride, strict=True)):
            if not -size <= at < size:
                raise IndexError(f"{self.title} has {size} in dim {dim}, and the index asks for {at}")
            place += (at % size) * step
        return place

    def byte(self, index: Sequence[int]) -> int:
        """The byte of an element counted from the storage's first; IndexError as `place`."""
        return self.place(index) * self.itemsize

    def address_of(self, index: Sequence[int]) -> int | None:
        """The address of an element in memory; None where the storage has none."""
        return None if self.address is None else self.address + self.byte(index)

    @property
    def title(self) -> str:
        """Format and shape.

        >>> Strided("fp32", 4, (8, 4), (1, 8), 0, 128).title
        'fp32[8, 4]'
        """
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    def facts(self) -> list[tuple[str, str]]:
        """What there is to say, each with its name."""
        steps = [step * self.itemsize for step in self.stride]
        held = min(self.nbytes, (self.span[1] - self.span[0]) * self.itemsize)
        storage = f"{self.storage_nbytes:,} bytes" + (
            f", of which this tensor reaches {held:,}" if held != self.storage_nbytes else ", all of it this tensor's"
        )
        readable = f" ({format_nbytes(self.nbytes)})" if self.nbytes >= 1000 else ""
        found = [
            ("shape", list_text(self.shape)),
            ("dtype", f"{self.dtype}, {self.itemsize} bytes an element"),
            ("elements", f"{self.elements:,}, {self.nbytes:,} bytes{readable}"),
            ("stride", f"{list_text(self.stride)} elements, {list_text(steps)} bytes"),
            ("offset", f"{self.offset:,} elements"),
            ("storage", storage),
            ("contiguous", self.contiguity),
        ]
        if self.address is not None:
            first = self.address + self.offset * self.itemsize
            found.append(("address", f"{first:#x}, of the storage {self.address:#x}"))
        if self.device:
            found.append(("device", self.device))
        if self.requires_grad is not None:
            found.append(("requires grad", "yes" if self.requires_grad else "no"))
        if self.is_leaf is not None:
            none = "none yet" if self.is_leaf else "none: kept of leaves alone, or after retain_grad()"
            none = none if self.requires_grad else "none: it wants none"
            leaf = "yes" if self.is_leaf else "no"
            found += [("leaf", leaf), ("grad", self.grad or none), ("grad_fn", self.grad_fn or "none")]
        if self.view_of:
            found.append(("view of", self.view_of))
        return found

    @property
    def contiguity(self) -> str:
        """Whether it is contiguous, and what it is where it is not.

        >>> Strided("fp32", 4, (8, 4), (1, 8), 0, 128).contiguity
        'no: without gaps, in the order of dims 1, 0'
        """
        if self.contiguous:
            return "yes"
        if self.memory_format:
            return f"no: {self.memory_format}"
        if self.overlaps:
            return "no: several indices are one element"
        if self.dense:
            order = sorted(range(len(self.shape)), key=lambda index: -self.stride[index])
            return f"no: without gaps, in the order of dims {', '.join(map(str, order))}"
        return "no: between its elements lie others, or some are in it twice"

    def __repr__(self) -> str:
        facts = self.facts()
        wide = max(len(name) for name, _ in facts)
        return "\n  ".join([self.title, *(f"{name:<{wide}}  {fact}" for name, fact in facts), *self.notes])

    def drawing(self, most: int = 64) -> str:
        """The storage as boxes, and which of them each element is; a sentence where it holds more than ``most``.

        >>> print(Strided("fp32", 4, (3, 2), (1, 3), 0, 24).drawing())
        the storage, 6 elements of 4 bytes in memory order: above each box its
        index, in it the number of the tensor's element, counted row by row
           0    1    2    3    4    5
        +----+----+----+----+----+----+
        |  0 |  2 |  4 |  1 |  3 |  5 |
        +----+----+----+----+----+----+
        the tensor, each element by its index in the storage
          0  3
          1  4
          2  5
        """
        size = self.storage_nbytes // self.itemsize
        if size > most or self.elements > 4 * most:
            return f"no drawing: the storage holds {size:,} elements, and {most} are drawn at most"
        if not self.elements or not size:
            return "no drawing: the tensor has no elements"
        places = [self.place(index) for index in product(*map(range, self.shape))]
        return "\n".join([*_boxes(self, size, places), *_grid(self, places)])


@frozen
class ChainStep:
    """What one operation made: a ``view`` over the same storage, the ``same`` tensor, itself written ``in place``, a
    ``copy``, or a ``result`` that was computed; ``written_nbytes`` go to memory, and ``why`` is a sentence.
    """

    word: str
    result: Strided
    kind: str
    written_nbytes: int
    why: str

    @property
    def shares(self) -> bool:
        """Whether the result lies over the storage of the tensor before."""
        return self.kind in ("view", "same", "in place")

    @property
    def cost(self) -> str:
        """What was done, and the bytes that it writes.

        >>> ChainStep("clone", Strided("fp32", 4, (2,), (1,), 0, 8, 1), "copy", 8, "asked for").cost
        'copy, 8 B'
        """
        if self.kind in ("view", "same"):
            return "view, free" if self.kind == "view" else "the same, free"
        return f"{self.kind}, {format_nbytes(self.written_nbytes)}"

    def __repr__(self) -> str:
        one = self.result
        layout = f"{one.title}, stride {list_text(one.stride)}, offset {one.offset}"
        return f"{self.word}: {layout}: {self.cost}: {self.why}"


@frozen
class Chain:
    """Operations on one tensor, one after the other. ``failure`` says why the next one has no result."""

    start: Strided
    steps: tuple[ChainStep, ...]
    failed: str = ""
    failure: Problem | None = None

    @property
    def result(self) -> Strided:
        return self.steps[-1].result if self.steps else self.start

    @property
    def written_nbytes(self) -> int:
        """Bytes that all steps write, copies and results."""
        return sum(step.written_nbytes for step in self.steps)

    @property
    def shares(self) -> bool:
        """Whether the last tensor lies over the storage of the first."""
        return self.result.storage == self.start.storage

    def __repr__(self) -> str:
        start = f"{self.start.title}, stride {list_text(self.start.stride)}, offset {self.start.offset}"
        lines = [start, *(f"  {step!r}" for step in self.steps)]
        if self.failure is not None:
            lines.append(f"  {self.failed} fails: {self.failure}")
        return "\n".join(lines)


def list_text(numbers: Sequence[int]) -> str:
    return f"[{', '.join(map(str, numbers))}]"


def _boxes(tensor: Strided, size: int, places: list[int]) -> list[str]:
    """Each element of the storage as a box that says which element of the tensor it is."""
    inside: dict[int, list[int]] = {}
    for number, place in enumerate(places):
        inside.setdefault(place, []).append(number)
    # Few elements of one box are all named: 3, or 0,4; of more the first and the last: 0..3.
    text = {
        place: ("," if len(of) <= 2 else "..").join(map(str, of[:: max(1, len(of) - 1)]))
        for place, of in inside.items()
    }
    wide = max(2, len(str(size - 1)), *map(len, text.values())) + 2
    row = min(row_of(tensor, size), (WIDTH - 1) // (wide + 1))
    head = f"the storage, {size} elements of {tensor.itemsize} bytes in memory order: above each box its"
    lines = [head, "index, in it the number of the tensor's element, counted row by row"]
    for start in range(0, size, row):
        here = range(start, min(start + row, size))
        rule = "+" + "+".join("-" * wide for _ in here) + "+"
        lines.append(" " + " ".join(str(place).rjust(wide - 1) + " " for place in here).rstrip())
        lines += [rule, "|" + "|".join(text.get(place, "").rjust(wide - 1) + " " for place in here) + "|", rule]
    return lines


def row_of(tensor: Strided, size: int) -> int:
    """Boxes in a row: as many as a step of the tensor's larger strides, where that parts a longer storage evenly."""
    if size <= _MOST_IN_A_ROW:
        return _MOST_IN_A_ROW
    steps = {step for step in tensor.stride if 1 < step <= _MOST_IN_A_ROW and size % step == 0}
    return max(steps, default=_MOST_IN_A_ROW)


def _grid(tensor: Strided, places: list[int]) -> list[str]:
    """The place of each element, rows below each other; dims before the last two as an index."""
    if len(tensor.shape) < 2:
        return ["the tensor, each element by its index in the storage", *_folded(places)]
    rows, columns = tensor.shape[-2:]
    wide = max(len(str(place)) for place in places)
    lines = ["the tensor, each element by its index in the storage"]
    if columns * (wide + 2) > WIDTH:
        return lines + _folded(places)
    block = rows * columns
    for number, index in enumerate(product(*map(range, tensor.shape[:-2]))):
        if index:
            lines.append(f"[{', '.join(map(str, index))}, :, :]")
        for start in range(number * block, (number + 1) * block, columns):
            lines.append("".join("  " + str(place).rjust(wide) for place in places[start : start + columns]))
    return lines


def _folded(places: list[int]) -> list[str]:
    wide = max(len(str(place)) for place in places) + 2
    room = WIDTH // wide
    return ["".join(str(place).rjust(wide) for place in places[at : at + room]) for at in range(0, len(places), room)]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a new tensor: dims of no element step as those of one.

    >>> row_major((4, 8)), row_major((2, 0, 3)), row_major(())
    ((8, 1), (3, 3, 1), ())
    """
    steps = [1]
    for size in reversed(shape[1:]):
        steps.insert(0, steps[0] * max(size, 1))
    return tuple(steps[: len(shape)])


def in_order(shape: Sequence[int], dims: Sequence[int], least: int = 1) -> tuple[int, ...]:
    """Strides without gaps where ``dims`` lists the dims, the quickest first; a dim of no element steps as ``least``.

    >>> in_order((2, 3, 4, 5), (1, 3, 2, 0))
    (60, 1, 15, 3)
    """
    stride, step = [0] * len(shape), 1
    for dim in dims:
        stride[dim] = step
        step *= max(shape[dim], least)
    return tuple(stride)


def preserved(tensor: Strided) -> tuple[int, ...]:
    """Strides of a new tensor that keeps the order of another's dims (torch.preserve_format).

    >>> preserved(Strided("fp32", 4, (4, 3), (1, 8), 0, 96)), preserved(Strided("fp32", 4, (8, 4), (1, 0), 0, 32))
    ((1, 4), (4, 1))
    """
    return tensor.stride if tensor.dense else in_order(tensor.shape, quickest_first(tensor))


def quickest_first(tensor: Strided) -> list[int]:
    """The dims of a tensor in the order in which torch's TensorIterator walks them."""
    # It sorts by insertion (ATen/TensorIterator.cpp, reorder_dimensions), and a dim of stride 0 compares with none and
    # is passed over, so that the result depends on the way of sorting.
    order = [*reversed(range(len(tensor.shape)))]
    for start in range(1, len(order)):
        here = start
        for before in reversed(range(start)):
            compared = _compared(tensor, order[before], order[here])
            if compared < 0:
                break
            if compared > 0:
                order[before], order[here] = order[here], order[before]
                here = before
    return order


def _compared(tensor: Strided, first: int, second: int) -> int:
    """Below 0 where the first dim is the quicker one, above where it is the slower, 0 where neither."""
    steps = tensor.stride[first], tensor.stride[second]
    if 0 in steps:
        return 0
    if steps[0] != steps[1]:
        return -1 if steps[0] < steps[1] else 1
    return 1 if tensor.shape[first] > tensor.shape[second] else 0
