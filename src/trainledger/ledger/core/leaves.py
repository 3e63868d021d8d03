"""The parameters of a model as leaves of the graph: of a block, of a run of layers, of all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from trainledger.ledger.core.graph import Leaf
from trainledger.ledger.entry import Int
from trainledger.spec.frozen import frozen
from trainledger.spec.layers import Group, LayerKind

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
        ("embed_tokens", "embedding"), ("embed_positions", "positions"), ("lm_head", "head"), ("router", "router"),
        ("experts", "experts"), ("shared_experts", "shared experts"), ("shared_expert_gate", "shared experts"),
        ("self_attn", "attention"),
    )  # fmt: skip
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
        for each in self.segments:
            yield tuple(each.all()), each.count
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
