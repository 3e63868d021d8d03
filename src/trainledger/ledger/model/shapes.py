"""The parameters of a model by name and shape, in the order and under the names that the modules of `nn` have.

Sizes: D d_model, H query heads, G key-value heads, K head width, W value width, F d_ff, E experts, V rows of
the embedding; of latent attention P query rank, R key-value rank, Q rotary width, N width without positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainledger.spec.layers import LayerKind, last_kind
from trainledger.spec.model import ModelSpec
from trainledger.spec.positions import Learned

Shape = tuple[Any, ...]
Named = Iterator[tuple[str, Shape]]


def before_blocks(spec: ModelSpec) -> Named:
    """What stands before the first block."""
    D = spec.d_model
    yield "embed_tokens.weight", (spec.padded_vocab, D)
    if isinstance(spec.positions, Learned):
        yield "embed_positions.weight", (spec.max_seq_len + spec.positions.extra_rows, D)
    if spec.embedding_norm:
        yield from _norm(spec, "embed_norm", D)


def after_blocks(spec: ModelSpec) -> Named:
    """What stands after the last block, a tied head left out."""
    if spec.norm_place != "after-add":
        yield from _norm(spec, "norm", spec.d_model)
    if not spec.tie_embeddings:
        yield "lm_head.weight", (spec.padded_vocab, spec.d_model)
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
    """The multi-token prediction modules, which stand behind the head; their blocks are of the last layer's kind."""
    for index in range(spec.n_mtp_layers):
        yield from _inside(f"predict_ahead.{index}", mtp_module(spec, last_kind(spec)))


def block(spec: ModelSpec, kind: LayerKind) -> Named:
    """The parameters of one block."""
    D = spec.d_model
    attend = latent_attention(spec) if spec.latent else attention(spec)
    feed = experts(spec) if kind.experts else mlp(spec, spec.feed_forward.d_ff)
    if spec.norm_place in ("pre", "sandwich"):
        yield from _norm(spec, "input_layernorm", D)
    yield from _inside("self_attn", attend)
    if spec.block != "parallel":
        yield from _norm(spec, "post_attention_layernorm", D)
    if spec.norm_place == "sandwich":
        yield from _norm(spec, "pre_feedforward_layernorm", D)
    yield from _inside("mlp", feed)
    if spec.norm_place != "pre":
        yield from _norm(spec, "post_feedforward_layernorm", D)


def attention(spec: ModelSpec) -> Named:
    """Multi-head, grouped-query and multi-query attention."""
    D, H, G, K, W = spec.d_model, spec.attention.n_heads, spec.kv_heads, spec.head_size, spec.value_size
    if spec.attention.sinks:
        yield "sinks", (H,)
    yield from _linear("q_proj", H * K, D, spec.attention.bias)
    yield from _linear("k_proj", G * K, D, spec.attention.bias)
    yield from _linear("v_proj", G * W, D, spec.attention.bias)
    yield from _linear("o_proj", D, H * W, spec.output_bias)
    if spec.attention.qk_norm is not None:
        wide = spec.attention.qk_norm == "width"
        yield from _norm(spec, "q_norm", H * K if wide else K)
        yield from _norm(spec, "k_norm", G * K if wide else K)


def latent_attention(spec: ModelSpec) -> Named:
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
    yield from _linear("kv_a_proj_with_mqa", R + Q, D, spec.attention.bias)
    yield "kv_a_layernorm.weight", (R,)
    yield from _linear("kv_b_proj", H * (N + W), R, False)
    yield from _linear("o_proj", D, H * W, spec.output_bias)


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
    D, E, F = spec.d_model, mixture.n_experts, mixture.width
    inward = "gate_up_proj" if spec.feed_forward.gated else "up_proj"
    wide = 2 * F if spec.feed_forward.gated else F
    yield from _linear("router", E, D, mixture.router.bias)
    yield f"experts.{inward}", (E, wide, D)
    if spec.feed_forward.bias:
        yield f"experts.{inward}_bias", (E, wide)
    yield "experts.down_proj", (E, D, F)
    if spec.feed_forward.bias:
        yield "experts.down_proj_bias", (E, D)
    if mixture.n_shared:
        yield from _inside("shared_experts", mlp(spec, mixture.n_shared * F))
    if mixture.shared_gate:
        yield "shared_expert_gate.weight", (1, D)


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
