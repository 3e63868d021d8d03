"""The parameters of a model as leaves of the tape, and what they add up to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import chain
from operator import mul

from trainledger.frozen import frozen
from trainledger.ledger.core.arithmetic import is_one
from trainledger.ledger.core.graph import Leaf
from trainledger.ledger.core.leaves import BlockLeaves, ModelLeaves, SegmentLeaves, component_of
from trainledger.ledger.entry import Int
from trainledger.ledger.model import shapes
from trainledger.ledger.model.lora import adapt
from trainledger.ledger.model.shapes import Shape
from trainledger.spec.layers import segments
from trainledger.spec.model import ModelSpec
from trainledger.spec.precision import precision_of
from trainledger.spec.recipe import Recipe
from trainledger.spec.recompute import LayerRun, layer_runs

MTP = "prediction ahead"  # the component of multi-token prediction modules, whatever is in them
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

    >>> from trainledger.api.load import model
    >>> parameters(model("gpt2")).total
    124439808
    >>> parameters(model("llama-3-8b")).total
    8030261248
    """
    by_component: dict[str, Int] = dict.fromkeys(COMPONENTS, 0)
    for name, shape, times in named_shapes(spec):
        part = MTP if name.startswith("predict_ahead.") else component_of(name)
        by_component[part] = by_component.get(part, 0) + times * elements_of(shape)
    total = sum(by_component.values())
    active = total - by_component.get(MTP, 0)
    if spec.experts is not None:
        idle = spec.experts.n_experts - spec.experts.per_token
        active -= by_component.get("experts", 0) // spec.experts.n_experts * idle
    return ParameterCount(total, active, by_component)


def named_shapes(spec: ModelSpec) -> Iterator[tuple[str, Shape, Int]]:
    """The name, the shape and the count of each parameter; equal layers are one, ``layers.*``."""
    yield from ((name, shape, 1) for name, shape in shapes.before_blocks(spec))
    for segment in segments(spec):
        for kind in segment.kinds:
            yield from ((f"layers.*.{name}", shape, segment.count) for name, shape in shapes.block(spec, kind))
    yield from ((name, shape, 1) for name, shape in chain(shapes.after_blocks(spec), shapes.mtp_modules(spec)))


def trained_parameters(spec: ModelSpec, recipe: Recipe) -> Int:
    """Elements that a recipe trains: all of the model's, or those of its adapters.

    >>> from trainledger.api.load import load
    >>> recipe = {"seq_len": 8, "global_batch": 1, "steps": 1, "lora_rank": 16}
    >>> run = load({"model": {"preset": "llama-3-8b"}, "recipe": recipe})
    >>> trained_parameters(run.model, run.recipe)
    41943040
    """
    return leaves_of(spec, recipe).elements()


def elements_of(shape: Shape) -> Int:
    """Elements of a tensor of this shape."""
    return reduce(mul, shape, 1)


@frozen
class Part:
    """Runs of layers in a row, and whether what stands before the first and after the last layer belongs to them."""

    runs: tuple[LayerRun, ...]
    begins: bool
    ends: bool


def leaves_of(spec: ModelSpec, recipe: Recipe | None = None, part: Part | None = None) -> ModelLeaves:
    """The parameters that a spec has, in runs of blocks that a recipe treats alike.

    Of a model in parts the last one has its own copy of a tied embedding, and only the last one has a head. It has one
    of any embedding where modules there predict ahead, which embed tokens too (as Megatron Core places them).
    """
    if part is not None and not (part.begins and part.ends):
        return _leaves_of_part(spec, recipe, part)
    before = _leaves(shapes.before_blocks(spec), recipe)
    after = _leaves(chain(shapes.after_blocks(spec), shapes.mtp_modules(spec)), recipe)
    runs = layer_runs(spec, recipe) if part is None else part.runs
    return ModelLeaves(
        before=before,
        segments=tuple(
            _segment(
                spec, recipe, each, at_end=each is runs[-1], widens=_widens(spec, recipe), at_start=each is runs[0]
            )
            for each in runs
        ),
        after=after,
        head=before["embed_tokens.weight"] if spec.tie_embeddings else after["lm_head.weight"],
    )


def _leaves_of_part(spec: ModelSpec, recipe: Recipe | None, part: Part) -> ModelLeaves:
    before = _leaves(shapes.before_blocks(spec), recipe) if part.begins else {}
    after = _leaves(chain(shapes.after_blocks(spec), shapes.mtp_modules(spec)), recipe) if part.ends else {}
    table = spec.padded_vocab, spec.d_model
    if part.ends and spec.tie_embeddings:
        after["lm_head.weight"] = Leaf("lm_head.weight", table)
    elif part.ends and spec.n_mtp_layers and not part.begins:
        after["embed_tokens.weight"] = Leaf("embed_tokens.weight", table)
    runs = part.runs
    return ModelLeaves(
        before=before,
        segments=tuple(
            _segment(spec, recipe, each, at_end=part.ends and each is runs[-1], widens=_widens(spec, recipe))
            for each in runs
        ),
        after=after,
        head=after.get("lm_head.weight"),
    )


def _widens(spec: ModelSpec, recipe: Recipe | None) -> bool:
    """Whether norms read a wider copy of the residual stream."""
    return recipe is not None and spec.norm.kind == "rmsnorm" and precision_of(recipe).stream != "fp32"


def _segment(
    spec: ModelSpec, recipe: Recipe | None, run: LayerRun, *, at_end: bool, widens: bool = False, at_start: bool = False
) -> SegmentLeaves:
    def blocks() -> tuple[BlockLeaves, ...]:
        return tuple(BlockLeaves(kind, _leaves(shapes.block(spec, kind), recipe)) for kind in run.kinds)

    # A block with a norm before its branches reads the stream as the final norm does; others do not. Nor do recomputed
    # blocks, which keep it, where the final norm does not, because it widens it first.
    kept_unlike = spec.norm_place in ("post", "after-add") or (widens and any(each.again for each in run.groups))
    alone = at_end and kept_unlike and not is_one(run.count)
    last = blocks() if alone else ()
    # What goes in are the embedded tokens. Of two rounds whose last is apart the other is the first as it is.
    two = isinstance(run.count, int) and run.count == 2
    read_again = at_start and spec.n_mtp_layers and not is_one(run.count) and not (alone and two)
    return SegmentLeaves(blocks(), run.groups, run.count, last, blocks() if read_again else ())


def _leaves(named: Iterable[tuple[str, Shape]], recipe: Recipe | None) -> dict[str, Leaf]:
    leaves = {name: Leaf(name, shape) for name, shape in named}
    return adapt(leaves, recipe) if recipe is not None and recipe.lora_rank is not None else leaves
