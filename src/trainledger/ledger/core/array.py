"""Arrays of a size and a format but without values, the parameters that they come from, and where gradients go."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import mul
from typing import TYPE_CHECKING

from trainledger.dtypes import nbytes_in
from trainledger.ledger.core.record import Storage
from trainledger.ledger.entry import Int

if TYPE_CHECKING:
    from trainledger.ledger.core.node import GatheredAgain


def nbytes_of(dtype: str) -> int:
    """Bytes of one element of a format of whole bytes."""
    nbytes: int = nbytes_in(1, dtype)
    return nbytes


class Memory:
    """What arrays and their views refer to; when the last reference is gone, its storage is free.

    ``again`` stands in its place where it is saved for backward, if it is made again there.
    """

    __slots__ = ("again", "record", "released")

    def __init__(self, record: Storage, released: Callable[[Storage], None]) -> None:
        self.record = record
        self.released = released
        self.again: GatheredAgain | None = None

    def __del__(self) -> None:
        try:
            released = self.released
        except AttributeError:  # Ctrl-C came while it was made
            return
        released(self.record)


class Array:
    """So many elements of a format; ``node`` says where its gradient goes (None: nowhere)."""

    __slots__ = ("_nbytes", "dtype", "elements", "memory", "node")

    def __init__(
        self, elements: Int, dtype: str, memory: Memory | None, node: Target = None, nbytes: Int | None = None
    ) -> None:
        self.elements = elements
        self.dtype = dtype
        self.memory = memory
        self.node = node
        self._nbytes = nbytes

    @property
    def nbytes(self) -> Int:
        if self._nbytes is None:  # worked out once: the elements may be those of many layouts
            self._nbytes = nbytes_in(self.elements, self.dtype)
        return self._nbytes

    def view(self, elements: Int | None = None, node: Target = None) -> Array:
        """The same memory under another node, or a part of it."""
        if elements is None:
            return Array(self.elements, self.dtype, self.memory, node, self._nbytes)
        return Array(elements, self.dtype, self.memory, node)


class Leaf:
    """A parameter: its gradient stays. ``uses`` counts the nodes of the graph that give it one.

    A parameter that is not ``trained`` is frozen: nothing updates it and the optimizer keeps nothing of it.

    Matrices decay, vectors do not: of stacked experts the matrices have three dims, the biases two. ``dtype`` is the
    format it is held in; while there is a ``copy`` in another (`operations.gathered`), that is what is read.
    ``buffer`` is a gradient that is there all the time and is added to. ``float8``: it is multiplied in 8 bits.
    ``linear`` stands for a linear layer's own way to multiply with it (`ledger.model.lora`).
    """

    def __init__(self, path: str, shape: tuple[Int, ...], *, trained: bool = True) -> None:
        self.path = path
        self.shape = shape
        self.elements = reduce(mul, shape, 1)
        self.decayed = len(shape) >= 2 and not path.endswith("bias")
        self.uses = 0
        self.trained = trained
        self.dtype = "fp32"
        self.copy: Array | None = None
        self.buffer: Array | None = None
        self.float8 = False
        self.linear: Callable[..., Array] | None = None
        self.arrived = 0
        self.pending: Array | None = None
        self.gradient: Array | None = None

    def array(self) -> Array:
        """What an operation reads: the parameter, or its copy while there is one."""
        return self.held() if self.copy is None else self.copy

    def held(self) -> Array:
        """The parameter itself."""
        return Array(self.elements, self.dtype, None, self if self.trained else None)


class Port:
    """Where the gradient of one output of a node arrives."""

    __slots__ = ("gradient",)

    def __init__(self) -> None:
        self.gradient: Array | None = None

    def take(self) -> Array | None:
        gradient, self.gradient = self.gradient, None
        return gradient


Target = Port | Leaf | None
