"""Arrays of a size and a format but without values, the parameters that they come from, and where gradients go."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import mul

from trainledger.dtypes import FORMATS
from trainledger.ledger.entry import Int
from trainledger.ledger.record import Storage


def nbytes_of(dtype: str) -> int:
    """Bytes of one element; integers and masks have their own names."""
    return _NBYTES[dtype]


_NBYTES = {"int64": 8, "bool": 1, **{name: each.nbytes for name, each in FORMATS.items()}}


class Memory:
    """What arrays and their views refer to; when the last reference is gone, its storage is free."""

    __slots__ = ("record", "released")

    def __init__(self, record: Storage, released: Callable[[Storage], None]) -> None:
        self.record = record
        self.released = released

    def __del__(self) -> None:
        self.released(self.record)


class Array:
    """So many elements of a format; ``node`` says where its gradient goes (None: nowhere)."""

    __slots__ = ("dtype", "elements", "memory", "node")

    def __init__(self, elements: Int, dtype: str, memory: Memory | None, node: Target = None) -> None:
        self.elements = elements
        self.dtype = dtype
        self.memory = memory
        self.node = node

    @property
    def nbytes(self) -> Int:
        return self.elements * nbytes_of(self.dtype)

    def view(self, elements: Int | None = None, node: Target = None) -> Array:
        """The same memory under another node, or a part of it."""
        return Array(self.elements if elements is None else elements, self.dtype, self.memory, node)


class Leaf:
    """A parameter: its gradient stays. ``uses`` counts how often a forward reads it (2 for a tied embedding).

    Matrices decay, vectors do not: of stacked experts the matrices have three dims, the biases two.
    """

    def __init__(self, path: str, shape: tuple[Int, ...], *, uses: int = 1) -> None:
        self.path = path
        self.shape = shape
        self.elements = reduce(mul, shape, 1)
        self.decayed = len(shape) >= 2 and not path.endswith("bias")
        self.uses = uses
        self.arrived = 0
        self.pending: Array | None = None
        self.gradient: Array | None = None

    def array(self) -> Array:
        return Array(self.elements, "fp32", None, self)


class Port:
    """Where the gradient of one output of a node arrives."""

    __slots__ = ("gradient",)

    def __init__(self) -> None:
        self.gradient: Array | None = None

    def take(self) -> Array | None:
        gradient, self.gradient = self.gradient, None
        return gradient


Target = Port | Leaf | None
