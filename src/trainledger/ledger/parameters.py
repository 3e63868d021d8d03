"""The parameters of a model as leaves of the tape, and what they add up to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from operator import mul

from trainledger.frozen import frozen
from trainledger.ledger import shapes
from trainledger.ledger.array import Leaf
from trainledger.ledger.entry import Int
from trainledger.ledger.shapes import Shape
from trainledger.spec.layers import LayerKind, kind_of, segments
from trainledger.spec.model import ModelSpec

COMPONENTS = ("embedding", "positions", "attention", "mlp", "norms", "head")  # of every model; others where they are


@frozen
class ParameterCount:
    """Trained elements of a model. ``active`` are those that one token passes through: all of a dense model's."""

    total: Int
    active: Int
    by_component: dict[str, Int]


def parameters(spec: ModelSpec) -> ParameterCount:
    """The parameters of a model by component, a tied embedding counted once (as ``embedding``).

    A token passes through ``experts_per_token`` of the experts of a layer and through all else; multi-token
    prediction modules are counted in ``total`` only, as nothing passes through them once the model is trained.

    >>> from trainledger.api import model
    >>> parameters(model("gpt2")).total
    124439808
    >>> parameters(model("llama-3-8b")).total
    8030261248
    """
    by_component: dict[str, Int] = dict.fromkeys(COMPONENTS, 0)

    def count(named: Iterable[tuple[str, Shape]], times: Int, component: str | None = None) -> None:
        for name, shape in named:
            part = component or component_of(name)
            by_component[part] = by_component.get(part, 0) + times * elements_of(shape)

    count(shapes.before_blocks(spec), 1)
    for segment in segments(spec):
        for kind in segment.kinds:
            count(shapes.block(spec, kind), segment.count)
    count(shapes.after_blocks(spec), 1)
    if spec.n_predict_ahead:
        last = kind_of(spec, spec.n_layers - 1)
        count(shapes.predict_ahead(spec, last), spec.n_predict_ahead, "prediction ahead")
    total = sum(by_component.values())
    active = total - by_component.get("prediction ahead", 0)
    if spec.n_experts is not None:
        idle = spec.n_experts - spec.experts_per_token
        active -= by_component.get("experts", 0) // spec.n_experts * idle
    return ParameterCount(total, active, by_component)


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


def elements_of(shape: Shape) -> Int:
    """Elements of a tensor of this shape."""
    return reduce(mul, shape, 1)


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
    """A run of layers: a pattern of blocks that comes ``count`` times."""

    blocks: tuple[BlockLeaves, ...]
    count: Int

    def all(self) -> Iterator[Leaf]:
        """The parameters of the pattern, each block's in torch's order."""
        return (leaf for block in self.blocks for leaf in block.all())


@frozen
class ModelLeaves:
    """The parameters of a model; one `BlockLeaves` stands for each run of equal blocks."""

    before: dict[str, Leaf]
    segments: tuple[SegmentLeaves, ...]
    after: dict[str, Leaf]
    head: Leaf

    def elements(self) -> Int:
        return self._total(lambda leaf: leaf.elements)

    def tensors(self) -> Int:
        return self._total(lambda leaf: 1)

    def _total(self, amount: Callable[[Leaf], Int]) -> Int:
        outside = sum(amount(each) for each in (*self.before.values(), *self.after.values()))
        return outside + sum(each.count * sum(amount(leaf) for leaf in each.all()) for each in self.segments)


def leaves_of(spec: ModelSpec) -> ModelLeaves:
    """The parameters that a spec has, prediction modules left out."""
    before = _leaves(shapes.before_blocks(spec))
    after = _leaves(shapes.after_blocks(spec))
    if spec.tie_embeddings:
        before["embed_tokens.weight"].uses = 2
    return ModelLeaves(
        before=before,
        segments=tuple(
            SegmentLeaves(
                tuple(BlockLeaves(kind, _leaves(shapes.block(spec, kind))) for kind in segment.kinds), segment.count
            )
            for segment in segments(spec)
        ),
        after=after,
        head=before["embed_tokens.weight"] if spec.tie_embeddings else after["lm_head.weight"],
    )


def _leaves(named: Iterable[tuple[str, Shape]]) -> dict[str, Leaf]:
    return {name: Leaf(name, shape) for name, shape in named}
