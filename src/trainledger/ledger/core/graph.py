"""The graph that a tape builds: arrays without values, parameters, nodes, and where gradients go.

An array has a size and a format; the lifetime of its memory is the lifetime of the references to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import mul
from typing import Any

from trainledger.ledger.core.record import BlockRun, Loop, Storage
from trainledger.ledger.entry import Int
from trainledger.spec.dtypes import nbytes_in


class Memory:
    """What arrays and their views refer to; when the last reference is gone, its storage is free.

    ``again`` replaces it where it is saved for backward, if it is recomputed there. ``casts`` are copies in 8 bits that
    several matmuls share.
    """

    __slots__ = ("again", "casts", "record", "released")

    def __init__(self, record: Storage, released: Callable[[Storage], None]) -> None:
        self.record = record
        self.released = released
        self.again: GatheredAgain | None = None
        self.casts: Any = None

    def __del__(self) -> None:
        try:
            released = self.released
        except AttributeError:  # Ctrl-C came while it was made
            return
        released(self.record)


class Array:
    """So many elements of a dtype; ``node`` says where its gradient goes (None: nowhere)."""

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

    def of(self, category: str) -> Array:
        """This array, its memory of a category."""
        assert self.memory is not None
        self.memory.record.category = category
        return self

    def of_each_round(self) -> Array:
        """This array, made in a loop: each round keeps its own copy."""
        assert self.memory is not None
        self.memory.record.cached = True
        return self


class Leaf:
    """A parameter: its gradient stays. ``uses`` counts the nodes of the graph that give it one.

    A parameter that is not ``trained`` is frozen: nothing updates it and the optimizer keeps nothing of it.

    Matrices decay, vectors do not: of stacked experts the matrices have three dims, the biases two. ``dtype`` is the
    format it is held in; while there is a ``copy`` in another (`operations.gathered`), that is what is read.
    ``buffer`` is a gradient that is there all the time and is added to. ``linear`` is a linear layer's own way to
    multiply with it (`model.lora`, `ops.float8`); ``float8`` says that the matmul is one in 8 bits. ``whole`` is the
    shape of which a rank's rows are a part.
    """

    def __init__(
        self, path: str, shape: tuple[Int, ...], *, trained: bool = True, whole: tuple[Int, ...] | None = None
    ) -> None:
        self.path = path
        self.shape = shape
        self.whole = whole
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

    def pop(self) -> Array | None:
        gradient, self.gradient = self.gradient, None
        return gradient


Target = Port | Leaf | None


Saved = tuple["Array | GatheredAgain", ...]
Gradients = list[Array | None]
Backward = Callable[..., Gradients]
Sums = Sequence[tuple[int, Int]]


class Node:
    """One step of the graph: where it was made, what it saved, how its backward runs, and where gradients go on.

    ``sums`` says which of its gradients belong to a broadcast input, and that input's elements: they are
    summed after its backward, by the engine and not by the step itself. So are gradients cast to ``formats``, those
    of the inputs, where these are given. ``saved`` is what the node keeps: arrays, or what the hook that packed them
    gave in their place.
    """

    __slots__ = ("backward", "block", "formats", "loop", "packed_by", "path", "ports", "saved", "sums", "targets")

    def __init__(
        self,
        targets: Sequence[Target],
        backward: Backward,
        outputs: int,
        sums: Sums,
        formats: Sequence[str],
        place: tuple[str, Loop, BlockRun | None],
    ) -> None:
        self.targets = list(targets)
        self.formats = formats
        self.backward = backward
        self.sums = sums
        self.path, self.loop, self.block = place
        self.ports = [Port() for _ in range(outputs)]
        self.saved: Any = ()
        self.packed_by: Any = None

    def pop_saved(self) -> Any:
        saved, self.saved = self.saved, ()
        return saved


class GatheredAgain:
    """Saved instead of a gathered tensor: only the rank's part is kept.

    The first of the nodes to run gathers the whole again, which is live until the last of them has run. ``moved``
    is how it was moved last (`checkpointing.Offload`).
    """

    __slots__ = ("_gather", "_readers", "_whole", "moved", "part")

    def __init__(self, part: Array, gather: Callable[[Array], Array]) -> None:
        self.part = part
        self.moved = ""
        self._gather = gather
        self._readers = 0
        self._whole: Array | None = None

    def saved(self) -> GatheredAgain:
        """What another node saves."""
        self._readers += 1
        return self

    def read(self) -> Array:
        """The whole, for one of the nodes that have saved it."""
        whole = self._gather(self.part) if self._whole is None else self._whole
        self._readers -= 1
        self._whole = whole if self._readers else None
        return whole


def as_kept(saved: tuple[Array, ...]) -> Saved:
    """What nodes keep of what they save: the arrays, or what is gathered again instead."""
    again = [None if each.memory is None else each.memory.again for each in saved]
    if not any(again):
        return saved
    return tuple(each if how is None else how.saved() for each, how in zip(saved, again, strict=True))


def pop_gradient(gradients: Gradients, index: int) -> Array:
    """A gradient out of a list, so that its receiver has the only reference."""
    gradient, gradients[index] = gradients[index], None
    assert gradient is not None
    return gradient
