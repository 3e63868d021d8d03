"""The parameters of a model: names and shapes as the modules of `nn` have them, counts, FLOPs, and leaves of the tape.

Sizes: D d_model, H query heads, G key-value heads, K head width, W value width, F d_ff, E experts, V rows of
the embedding; of latent attention P query rank, R key-value rank, Q rotary width, N width without positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import chain
from operator import mul
from typing import Any

from trainledger.ledger import rules
from trainledger.ledger.core.graph import BlockLeaves, Leaf, ModelLeaves, SegmentLeaves, component_of
from trainledger.ledger.core.sizes import added, is_one
from trainledger.ledger.entry import Int
from trainledger.ledger.model.attention_core import parameters_of_scores
from trainledger.ledger.ops.adapters import adapt
from trainledger.spec.block import Indexer, Learned
from trainledger.spec.frozen import frozen
from trainledger.spec.layers import LayerKind, LayerRun, layer_runs, mtp_kind, segments
from trainledger.spec.mixers import DELTA_CHUNK, GatedDelta, KimiDelta, Mamba2
from trainledger.spec.model import ModelSpec
from trainledger.spec.recipe import Recipe

Shape = tuple[Any, ...]
Named = Iterator[tuple[str, Shape]]


def before_blocks(spec: ModelSpec) -> Named:
    """The parameters before the first block."""
    D = spec.d_model
    yield "embed_tokens.weight", (spec.padded_vocab, D)
    if isinstance(spec.positions, Learned):
        yield "embed_positions.weight", (spec.max_seq_len + spec.positions.extra_rows, D)
    if spec.embedding_norm:
        yield from _norm(spec, "embed_norm", D)


def after_blocks(spec: ModelSpec) -> Named:
    """The parameters after the last block, a tied head left out."""
    if spec.norm_place != "after-add":
        yield from _norm(spec, "norm", spec.d_model)
    if not spec.tie_embeddings:
        yield "lm_head.weight", (spec.head_rows, spec.d_model)
    if spec.head_bias:
        yield "lm_head.bias", (spec.padded_vocab,)


def mtp_module(spec: ModelSpec, kind: LayerKind) -> Named:
    """One multi-token prediction module (DeepSeek-AI 2024, DeepSeek-V3, section 2.2); embedding and head are shared."""
    D = spec.d_model
    yield from _norm(spec, "enorm", D)
    yield from _norm(spec, "hnorm", D)
    yield "eh_proj.weight", (D, 2 * D)
    for name, shape in block(spec, kind):
        yield f"block.{name}", shape
    yield from _norm(spec, "norm", D)


def mtp_modules(spec: ModelSpec) -> Named:
    """The multi-token prediction modules, which come after the head; their blocks are of the last layer's kind."""
    for index in range(spec.n_mtp_layers):
        yield from _inside(f"mtp.{index}", mtp_module(spec, mtp_kind(spec)))


# The norms before and after each of the two branches of a block.
NORMS: dict[str, tuple[tuple[str | None, str | None], tuple[str | None, str | None]]] = {
    "pre": (("input_layernorm", None), ("post_attention_layernorm", None)),
    "post": ((None, "post_attention_layernorm"), (None, "post_feedforward_layernorm")),
    "after-add": ((None, "post_attention_layernorm"), (None, "post_feedforward_layernorm")),
    "sandwich": (
        ("input_layernorm", "post_attention_layernorm"),
        ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
}


def block(spec: ModelSpec, kind: LayerKind) -> Named:
    """The parameters of one block."""
    first, second = NORMS[spec.norm_place]
    if kind.attends or kind.mixes:
        yield from _norms(spec, first[:1])
        if kind.attends:
            own = spec.of_layers(kind.window)
            yield from _inside("self_attn", latent_attention(spec, kind) if spec.latent else attention(own))
        if kind.mixes:
            yield from _inside("mixer", mixer(spec))
        yield from _norms(spec, first[1:])
    if kind.feeds:
        norms_itself = kind.experts and spec.experts is not None and spec.experts.own_norms
        yield from _norms(spec, second[:1] if spec.block != "parallel" and not norms_itself else ())
        yield from _inside("mlp", experts(spec) if kind.experts else mlp(spec, spec.feed_forward.d_ff))
        yield from _norms(spec, second[1:])


EXPERT_NORMS = ("experts_norm", "experts_out_norm", "shared_norm", "shared_out_norm")


def _norms(spec: ModelSpec, names: Iterable[str | None]) -> Named:
    for name in names:
        if name is not None:
            yield from _norm(spec, name, spec.d_model)


def mixer(spec: ModelSpec) -> Named:
    """What mixes tokens without attention."""
    part, D = spec.mixer, spec.d_model
    assert part is not None
    sizes = part.sizes(D)
    yield from ((name, (size,)) for name, size in sizes.vectors)
    yield from _linear("in_proj", sum(width for _, width in sizes.inward), D, part.bias)
    yield from _linear("conv", sizes.channels, part.conv_width, part.conv_bias)
    for name, d_in, d_out in sizes.raised:
        yield from _linear(name, d_out, d_in, False)
    if sizes.norm:
        yield "norm.weight", (sizes.norm,)
    yield from _linear("out_proj", D, sizes.outward, part.bias)


def attention(spec: ModelSpec) -> Named:
    """Multi-head, grouped-query and multi-query attention."""
    D, H, G, K, W = spec.d_model, spec.attention.n_heads, spec.kv_heads, spec.head_size, spec.value_size
    yield from parameters_of_scores(spec)
    yield from _linear("q_proj", 2 * H * K if spec.attention.gated else H * K, D, spec.attention.bias)
    yield from _linear("k_proj", G * K, D, spec.attention.bias)
    if not spec.attention.keys_as_values:
        yield from _linear("v_proj", G * W, D, spec.attention.bias)
    yield from _linear("o_proj", D, H * W, spec.output_bias)
    if spec.attention.qk_norm in ("head", "width"):
        wide = spec.attention.qk_norm == "width"
        yield from _norm(spec, "q_norm", H * K if wide else K)
        yield from _norm(spec, "k_norm", G * K if wide else K)


def latent_attention(spec: ModelSpec, kind: LayerKind) -> Named:
    """Multi-head latent attention (DeepSeek-V2, section 2.1); its inner norms are RMSNorms."""
    latent = spec.latent
    assert latent is not None
    D, H, W = spec.d_model, latent.n_heads, spec.value_size
    R, N, Q, P = latent.kv_rank, latent.nope_head_dim, spec.rotary_size, latent.q_rank
    if P is None:
        yield from _linear("q_proj", H * spec.head_size, D, False)
    else:
        yield from _linear("q_a_proj", P, D, spec.attention.bias)
        yield "q_a_layernorm.weight", (P,)
        yield from _linear("q_b_proj", H * spec.head_size, P, False)
    if latent.indexer is not None and kind.chooses:
        yield from _inside("indexer", indexer(spec, latent.indexer, P))
    yield from _linear("kv_a_proj_with_mqa", R + Q, D, spec.attention.bias)
    yield "kv_a_layernorm.weight", (R,)
    yield from _linear("kv_b_proj", H * (N + W), R, False)
    yield from _linear("o_proj", D, H * W, spec.output_bias)


def indexer(spec: ModelSpec, part: Indexer, rank: Any) -> Named:
    """What chooses the keys of latent attention, without gradients."""
    yield from _linear("wq_b", part.n_heads * part.head_dim, rank, False)
    yield from _linear("wk", part.head_dim, spec.d_model, False)
    yield from ((f"k_norm.{name}", (part.head_dim,)) for name in ("weight", "bias"))
    yield from _linear("weights_proj", part.n_heads, spec.d_model, False)


def mlp(spec: ModelSpec, width: Any) -> Named:
    """A dense MLP of the given inner width, plain or gated."""
    D = spec.d_model
    if spec.feed_forward.gated:
        yield from _linear("gate_proj", width, D, spec.feed_forward.bias)
    yield from _linear("up_proj", width, D, spec.feed_forward.bias)
    yield from _linear("down_proj", D, width, spec.feed_forward.bias)


def experts(spec: ModelSpec) -> Named:
    """Router, experts (stacked in one tensor per projection, gate and up joined) and the shared expert."""
    mixture = spec.experts
    assert mixture is not None
    D, E, F = spec.expert_d_model, mixture.n_experts, mixture.width
    inward = "gate_up_proj" if spec.feed_forward.gated else "up_proj"
    wide = 2 * F if spec.feed_forward.gated else F
    yield from _linear("router", E, spec.d_model, mixture.router.bias)
    if mixture.own_norms:
        yield "router.expert_scale", (E,)
        yield from _norm(spec, "router.norm", spec.d_model)
    yield f"experts.{inward}", (E, wide, D)
    if spec.feed_forward.bias:
        yield f"experts.{inward}_bias", (E, wide)
    yield "experts.down_proj", (E, D, F)
    if spec.feed_forward.bias:
        yield "experts.down_proj_bias", (E, D)
    if mixture.expert_d_model:
        yield from _linear("latent_in", D, spec.d_model, spec.feed_forward.bias)
        yield from _linear("latent_out", spec.d_model, D, spec.feed_forward.bias)
    if mixture.own_norms:
        for name in EXPERT_NORMS[: 4 if mixture.n_shared else 2]:
            yield from _norm(spec, name, spec.d_model)
    if mixture.n_shared:
        yield from _inside("shared_experts", mlp(spec, mixture.shared_width))
    if mixture.shared_gate:
        yield "shared_expert_gate.weight", (1, spec.d_model)


def _linear(name: str, d_out: Any, d_in: Any, bias: bool) -> Named:
    yield f"{name}.weight", (d_out, d_in)
    if bias:
        yield f"{name}.bias", (d_out,)


def _norm(spec: ModelSpec, name: str, width: Any) -> Named:
    if spec.norm.weight:
        yield f"{name}.weight", (width,)
    if spec.norm.bias:
        yield f"{name}.bias", (width,)


def _inside(module: str, named: Named) -> Named:
    return ((f"{module}.{name}", shape) for name, shape in named)


MTP = "multi-token prediction"  # the component of its modules and all in them
COMPONENTS = ("embedding", "positions", "attention", "mlp", "norms", "head")  # of every model; others where they are


@frozen
class ParameterCount:
    """Trained elements of a model. ``active`` are those that one token passes through: all of a dense model's."""

    total: Int
    active: Int
    by_component: dict[str, Int]

    @property
    def outside(self) -> Int:
        """Elements outside the blocks, norms left out."""
        return sum(self.by_component.get(each, 0) for each in ("embedding", "positions", "head", MTP))


def parameters(spec: ModelSpec) -> ParameterCount:
    """The parameters of a model by component, a tied embedding counted once (as ``embedding``).

    A token passes through ``experts_per_token`` of the experts of a layer and through all else; multi-token
    prediction modules are counted in ``total`` only, as nothing passes through them once the model is trained.

    >>> from trainledger.answers.load import model
    >>> parameters(model("gpt2")).total
    124439808
    >>> parameters(model("llama-3-8b")).total
    8030261248
    """
    by_component = dict.fromkeys(COMPONENTS, 0) | added(
        (MTP if name.startswith("mtp.") else component_of(name), times * elements_of(shape))
        for name, shape, times in named_shapes(spec)
    )
    total = sum(by_component.values())
    active = total - by_component.get(MTP, 0)
    if spec.experts is not None:
        idle = spec.experts.n_experts - spec.experts.per_token
        active -= by_component.get("experts", 0) // spec.experts.n_experts * idle
    return ParameterCount(total, active, by_component)


def named_shapes(spec: ModelSpec) -> Iterator[tuple[str, Shape, Int]]:
    """The name, the shape and the count of each parameter; equal layers are one, ``layers.*``."""
    yield from ((name, shape, 1) for name, shape in before_blocks(spec))
    for segment in segments(spec):
        for kind in segment.kinds:
            yield from ((f"layers.*.{name}", shape, segment.count) for name, shape in block(spec, kind))
    yield from ((name, shape, 1) for name, shape in chain(after_blocks(spec), mtp_modules(spec)))


def elements_of(shape: Shape) -> Int:
    """Elements of a tensor of this shape."""
    return reduce(mul, shape, 1)


@frozen
class Part:
    """Runs of layers in a row, and whether the parameters before the first and after the last layer belong to them."""

    runs: tuple[LayerRun, ...]
    begins: bool
    ends: bool


def leaves_of(spec: ModelSpec, recipe: Recipe | None = None, part: Part | None = None) -> ModelLeaves:
    """The parameters that a spec has, in runs of blocks that a recipe treats alike."""
    # Of a model in parts the last one has its own copy of a tied embedding, and only the last one has a head. It has
    # one of any embedding where modules of multi-token prediction read it there (as Megatron Core places them).
    part = Part(layer_runs(spec, recipe), begins=True, ends=True) if part is None else part
    whole = part.begins and part.ends
    before = _leaves(before_blocks(spec), recipe) if part.begins else {}
    after = _leaves(chain(after_blocks(spec), mtp_modules(spec)), recipe) if part.ends else {}
    if part.ends and not part.begins and spec.embeds_at_end:
        name = "lm_head.weight" if spec.tie_embeddings else "embed_tokens.weight"
        after[name] = Leaf(name, (spec.padded_vocab, spec.d_model))
    runs = part.runs
    return ModelLeaves(
        before=before,
        segments=tuple(
            _segment(spec, recipe, run, at_start=whole and run is runs[0], at_end=part.ends and run is runs[-1])
            for run in runs
        ),
        after=after,
        head=before["embed_tokens.weight"] if whole and spec.tie_embeddings else after.get("lm_head.weight"),
    )


def _segment(spec: ModelSpec, recipe: Recipe | None, run: LayerRun, *, at_start: bool, at_end: bool) -> SegmentLeaves:
    def blocks() -> tuple[BlockLeaves, ...]:
        return tuple(BlockLeaves(kind, _leaves(block(spec, kind), recipe)) for kind in run.kinds)

    # A block with a norm before its branches reads the stream as the final norm does; others do not. Nor do recomputed
    # blocks, which keep it, where the final norm does not, because it widens it first.
    widens = recipe is not None and spec.norm.kind == "rmsnorm" and recipe.precision.stream != "fp32"
    kept_unlike = spec.norm_place in ("post", "after-add") or (widens and any(group.again for group in run.groups))
    alone = at_end and kept_unlike and not is_one(run.count)
    last = blocks() if alone else ()
    # The inputs are the embedded tokens. Of two rounds whose last is separate the other is the unchanged first.
    two = isinstance(run.count, int) and run.count == 2
    read_again = at_start and spec.n_mtp_layers and not is_one(run.count) and not (alone and two)
    return SegmentLeaves(blocks(), run.groups, run.count, last, blocks() if read_again else ())


def _leaves(named: Iterable[tuple[str, Shape]], recipe: Recipe | None) -> dict[str, Leaf]:
    leaves = {name: Leaf(name, shape, trained=".indexer." not in name) for name, shape in named}
    return leaves if recipe is None or recipe.lora is None else adapt(leaves, recipe.lora)


SCORES = "attention scores"  # queries times keys, and probabilities times values
_LOOKED_UP = ("embedding", "positions", "norms")  # no matmuls


def forward_flops(spec: ModelSpec, tokens: Int, *, attention: str = "sdpa") -> dict[str, Int]:
    """FLOPs of the matmuls and of attention in the forward of one sequence, by component (`component_of`, `SCORES`).

    Attention is counted dense; ``flash`` kernels know windows and compute no more than those. A token passes through
    ``per_token`` experts. Modules of multi-token prediction are one component with their attention, without their head.

    >>> from trainledger.answers.load import model
    >>> found = forward_flops(model("gpt2"), 1024)
    >>> found["mlp"] == 2 * 1024 * 12 * 8 * 768**2
    True
    """
    split = added(_forward_flops(spec, tokens, attention))
    return {name: flops for name, flops in split.items() if not isinstance(flops, int) or flops}


def _forward_flops(spec: ModelSpec, tokens: Int, attention: str) -> Iterator[tuple[str, Int]]:
    for name, shape, times in named_shapes(spec):
        if not name.startswith("mtp."):
            yield component_of(name), times * _matmul(spec, name, shape, tokens)
    if spec.tie_embeddings:
        yield "head", rules.matmul_flops(tokens, spec.padded_vocab, spec.d_model)
    for segment in segments(spec):
        for kind in segment.kinds:
            yield SCORES, segment.count * _scores(spec, kind, tokens, attention)
            if kind.mixes:
                yield "mixers", segment.count * scan_flops(spec, 1, tokens)
    for index in range(spec.n_mtp_layers):
        left, module = tokens - 2 - index, f"mtp.{index}."
        named = [(name, shape) for name, shape in mtp_modules(spec) if name.startswith(module)]
        yield MTP, sum(_matmul(spec, name, shape, left) for name, shape in named)
        yield MTP, _scores(spec, mtp_kind(spec), left, attention)
        yield "head", rules.matmul_flops(left, spec.padded_vocab, spec.d_model)


def _matmul(spec: ModelSpec, name: str, shape: tuple[Int, ...], tokens: Int) -> Int:
    """FLOPs of the matmul with a parameter: none for vectors and embeddings."""
    if len(shape) < 2 or component_of(name) in _LOOKED_UP or name.endswith("bias"):
        return 0
    *stacked, d_out, d_in = shape
    if stacked:
        assert spec.experts is not None
        tokens = tokens * spec.experts.per_token
    return rules.matmul_flops(tokens, d_out, d_in)


def scan_flops(spec: ModelSpec, batch: Int, tokens: Int) -> Int:
    """FLOPs of the matmuls inside of a mixer's scan over so many tokens; 0 of a convolution alone."""
    part = spec.mixer
    if isinstance(part, Mamba2):
        sizes = (part.n_heads, part.n_groups, part.head_dim, part.state)
        return rules.state_space_flops(batch, tokens, *sizes, part.chunk)
    if isinstance(part, GatedDelta | KimiDelta):
        return rules.delta_rule_flops(batch, tokens, part.n_heads, part.key_dim, part.value_dim, DELTA_CHUNK)
    return 0


def _scores(spec: ModelSpec, kind: LayerKind, tokens: Int, attention: str) -> Int:
    if not kind.attends:
        return 0
    spec, part = spec.of_layers(kind.window), spec.indexer
    keys = rules.keys_seen(tokens, part.top_k if part else kind.window if attention == "flash" else None)
    flops = rules.attention_flops(1, spec.attention.n_heads, tokens, keys, spec.head_size, spec.value_size)
    if part is not None and kind.chooses:
        flops += rules.index_flops(1, part.n_heads, tokens, tokens, part.head_dim)
    return flops
