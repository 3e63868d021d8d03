"""The graph that a tape builds: arrays without values, nodes, where gradients go, and a model's parameters as leaves.

An array has a size and a format; the lifetime of its memory is the lifetime of the references to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import mul
from typing import Any, TypeVar

from trainledger.ledger.entry import BlockRun, Int, Loop, Storage
from trainledger.ledger.entry import Group as Ranks
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.frozen import frozen
from trainledger.spec.layers import Group, LayerKind


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
    multiply with it (`ops.linear`); ``float8`` says that the matmul is one in 8 or 4 bits, ``keeps_copy`` that its
    backward gets the input's low copy, ``fused`` that its gradient is added up by its matmul, ``alone`` that no other
    rank has it, so that FSDP neither gathers nor casts it. ``whole`` is the shape of which a rank's rows are a part,
    ``over`` the ranks that have parts of the rows whose norms a magnitude scales (DoRA).
    """

    def __init__(
        self, path: str, shape: tuple[Int, ...], *, trained: bool = True, whole: tuple[Int, ...] | None = None
    ) -> None:
        self.path = path
        self.shape = shape
        self.whole = whole
        self.elements: Int = reduce(mul, shape, 1)
        self.decayed = len(shape) >= 2 and not path.endswith("bias")
        self.uses = 0
        self.trained = trained
        self.dtype = "fp32"
        self.copy: Array | None = None
        self.buffer: Array | None = None
        self.float8 = self.keeps_copy = self.fused = self.alone = False
        self.linear: Callable[..., Array] | None = None
        self.over: Ranks | None = None
        self.arrived = 0
        self.pending: Array | None = None
        self.gradient: Array | None = None

    def resize(self, rows: Int) -> None:
        """A rank's rows of the parameter instead of all; whoever multiplies with it sees them too."""
        self.shape = (rows, *self.shape[1:])
        self.elements = reduce(mul, self.shape, 1)

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

    def with_part(self, part: Array) -> GatheredAgain:
        """The same gathering of the part in another format."""
        return GatheredAgain(part, self._gather)

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
    again = [None if array.memory is None else array.memory.again for array in saved]
    if not any(again):
        return saved
    return tuple(array if how is None else how.saved() for array, how in zip(saved, again, strict=True))


def pop_gradient(gradients: Gradients, index: int) -> Array:
    """A gradient out of a list, so that its receiver has the only reference."""
    gradient, gradients[index] = gradients[index], None
    assert gradient is not None
    return gradient


Self = TypeVar("Self", bound="Parameters")
Runs = tuple[tuple[tuple[Leaf, ...], Int], ...]


def component_of(name: str) -> str:
    """Which part of a model a parameter belongs to, by its name.

    >>> component_of("layers.0.self_attn.q_norm.weight"), component_of("mlp.experts.down_proj")
    ('norms', 'experts')
    """
    module = name.split(".")
    if any("norm" in part for part in module):
        return "norms"
    named = (
        ("embed_tokens", "embedding"),
        ("embed_positions", "positions"),
        ("lm_head", "head"),
        ("router", "router"),
        ("experts", "experts"),
        ("shared_experts", "shared experts"),
        ("shared_expert_gate", "shared experts"),
        ("self_attn", "attention"),
        ("mixer", "mixers"),
    )
    return next((component for part, component in named if part in module), "mlp")


@frozen
class Parameters:
    """Some parameters in torch's order: runs of a pattern of them, and how often each comes."""

    runs: Runs

    @property
    def elements(self) -> Int:
        return self.total(lambda leaf: leaf.elements)

    @property
    def tensors(self) -> Int:
        return self.total(lambda leaf: 1)

    @property
    def empty(self) -> bool:
        return not any(pattern for pattern, _ in self.runs)

    def total(self, amount: Callable[[Leaf], Int]) -> Int:
        """An amount of each parameter, added up."""
        return sum(count * sum(amount(leaf) for leaf in pattern) for pattern, count in self.runs)

    def among(self: Self, chosen: Callable[[Leaf], bool]) -> Self:
        """The parameters that ``chosen`` accepts."""
        runs = tuple((tuple(leaf for leaf in pattern if chosen(leaf)), count) for pattern, count in self.runs)
        return replace(self, runs=runs)

    def first(self) -> Leaf:
        """The first parameter of some that are not none."""
        return next(leaf for pattern, _ in self.runs for leaf in pattern)


@frozen
class BlockLeaves:
    """The parameters of one block by name, in torch's order."""

    kind: LayerKind
    named: dict[str, Leaf]

    def __getitem__(self, name: str) -> Leaf:
        return self.named[name]

    def get(self, name: str) -> Leaf | None:
        """The parameter, or None where the block has none of this name."""
        return self.named.get(name)

    def all(self) -> Iterator[Leaf]:
        return iter(self.named.values())


@frozen
class SegmentLeaves:
    """A run of layers: a pattern of blocks that comes ``count`` times; ``groups`` of them may be recomputed together.

    ``last`` is the last round where it must be separate: its output does not live as long as the others' do. So is
    ``first``, where others than the layers read its input.
    """

    blocks: tuple[BlockLeaves, ...]
    groups: tuple[Group, ...]
    count: Int
    last: tuple[BlockLeaves, ...] = ()
    first: tuple[BlockLeaves, ...] = ()

    def all(self) -> Iterator[Leaf]:
        """The parameters of the pattern, each block's in torch's order."""
        return (leaf for block in self.blocks for leaf in block.all())

    def rounds(self, name: str) -> Iterator[tuple[str, Int, tuple[BlockLeaves, ...]]]:
        """The loops that run the layers: their names, how often they run, and what runs in them."""
        between = self.count - (bool(self.first) + bool(self.last))
        if self.first:
            yield f"{name} first", 1, self.first
        if not (isinstance(between, int) and between == 0):
            yield name, between, self.blocks
        if self.last:
            yield f"{name} last", 1, self.last


@frozen
class ModelLeaves:
    """The parameters of a model; one `BlockLeaves` for each run of equal blocks."""

    before: dict[str, Leaf]
    segments: tuple[SegmentLeaves, ...]
    after: dict[str, Leaf]
    head: Leaf | None

    @property
    def outside(self) -> tuple[Leaf, ...]:
        """The parameters outside the blocks."""
        return (*self.before.values(), *self.after.values())

    def in_order(self) -> Iterator[tuple[tuple[Leaf, ...], Int]]:
        """Every parameter in torch's order, as runs of a pattern of parameters and how often each comes."""
        yield tuple(self.before.values()), 1
        for segment in self.segments:
            yield tuple(segment.all()), segment.count
        yield tuple(self.after.values()), 1

    def trained(self) -> Parameters:
        """The parameters that are trained, in torch's order."""
        return Parameters(tuple(self.in_order())).among(lambda leaf: leaf.trained)

    def elements(self) -> Int:
        """Trained elements."""
        return self.trained().elements

    def tensors(self) -> Int:
        """Trained tensors."""
        return self.trained().tensors

    def every(self) -> Iterator[Leaf]:
        """Every leaf, those of separate rounds too."""
        yield from self.before.values()
        for segment in self.segments:
            for block in (*segment.first, *segment.blocks, *segment.last):
                yield from block.all()
        yield from self.after.values()

    def changed(self, change: Callable[[Leaf], Leaf]) -> ModelLeaves:
        """The same parameters, each as ``change`` makes it."""

        def all_of(named: dict[str, Leaf]) -> dict[str, Leaf]:
            return {name: change(leaf) for name, leaf in named.items()}

        def blocks(each: tuple[BlockLeaves, ...]) -> tuple[BlockLeaves, ...]:
            return tuple(BlockLeaves(block.kind, all_of(block.named)) for block in each)

        before, after = all_of(self.before), all_of(self.after)
        named = {**self.before, **self.after}
        head = next(({**before, **after}[name] for name, leaf in named.items() if leaf is self.head), None)
        segments = tuple(
            SegmentLeaves(blocks(s.blocks), s.groups, s.count, blocks(s.last), blocks(s.first)) for s in self.segments
        )
        return ModelLeaves(before=before, segments=segments, after=after, head=head)
