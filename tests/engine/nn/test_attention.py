"""Every kind of attention against a second one, written here with loops in fp64 from the papers' formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainledger.engine.nn.attention import Attention, LatentAttention
from trainledger.engine.nn.positions import Masks, Rotary, frequencies, slopes
from trainledger.engine.nn.transformer import Transformer
from trainledger.spec.layers import LayerKind, angles_of, kind_of, rotary_modules
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields, with_fields
from trainledger.spec.problem import InvalidInput

SIZES: dict[str, Any] = {"vocab_size": 11, "d_model": 12, "n_layers": 4, "feed_forward.d_ff": 8, "max_seq_len": 16}
PLAIN = from_fields(
    ModelSpec,
    {"attention.n_heads": 4, "attention.n_kv_heads": 2, "attention.head_dim": 6, "positions": "none", **SIZES},
)
LATENT = from_fields(
    ModelSpec,
    {
        "attention.n_heads": 3,
        "attention": "latent",
        "attention.kv_rank": 5,
        "attention.nope_head_dim": 4,
        "attention.rope_head_dim": 6,
        "attention.v_head_dim": 7,
        **SIZES,
    },
)
KINDS: dict[str, ModelSpec] = {
    "grouped": PLAIN,
    "multi-query": with_fields(PLAIN, {"attention.n_kv_heads": 1, "attention.bias": True}),
    "output bias alone": with_fields(PLAIN, {"attention.output_bias": True}),
    "scale": with_fields(PLAIN, {"attention.scale": 0.9}),
    "rope": with_fields(PLAIN, {"positions": "rope"}),
    "partial rope": with_fields(PLAIN, {"positions": "rope", "positions.dim": 4}),
    "neighbours": with_fields(PLAIN, {"positions": "rope", "positions.interleaved": True}),
    "partial neighbours": with_fields(PLAIN, {"positions": "rope", "positions.interleaved": True, "positions.dim": 2}),
    "stretched rope": with_fields(
        PLAIN, {"positions.scaling": "linear", "positions": "rope", "positions.scaling.factor": 3.0}
    ),
    "attention.window": with_fields(PLAIN, {"positions": "rope", "attention.window": 3}),
    "window of one": with_fields(PLAIN, {"attention.window": 1}),
    "local theta": with_fields(
        PLAIN, {"positions": "rope", "attention.window": 4, "attention.global_every": 2, "positions.local_theta": 50.0}
    ),
    "layers without rope": with_fields(PLAIN, {"positions": "rope", "positions.skip_every": 2}),
    "head norm": with_fields(PLAIN, {"attention.qk_norm": "head", "positions": "rope"}),
    "head layernorm": with_fields(PLAIN, {"attention.qk_norm": "head", "norm": "layernorm", "norm.bias": True}),
    "width norm": with_fields(PLAIN, {"attention.qk_norm": "width", "positions": "rope"}),
    "head norm plus one": with_fields(PLAIN, {"attention.qk_norm": "head", "norm.plus_one": True}),
    "alibi": with_fields(PLAIN, {"positions": "alibi"}),
    "alibi of six heads": with_fields(
        PLAIN, {"positions": "alibi", "attention.n_heads": 6, "attention.n_kv_heads": 3, "attention.window": 5}
    ),
    "latent": LATENT,
    "latent of low-rank queries": with_fields(
        LATENT, {"attention.q_rank": 4, "positions.interleaved": True, "attention.bias": True}
    ),
    "latent with wide values": with_fields(LATENT, {"attention.v_head_dim": 13, "attention.scale": 0.4}),
    "latent with even values": with_fields(LATENT, {"attention.v_head_dim": 10}),
}
WRITTEN: dict[str, ModelSpec] = {
    "softcap": with_fields(PLAIN, {"attention.softcap": 1.5, "positions": "rope"}),
    "sinks": with_fields(PLAIN, {"attention.sinks": True}),
    "all together": with_fields(
        PLAIN,
        {
            "attention.sinks": True,
            "attention.softcap": 2.0,
            "attention.window": 4,
            "attention.global_every": 2,
            "positions": "rope",
            "attention.qk_norm": "head",
            "attention.bias": True,
            "positions.dim": 4,
        },
    ),
}
CASES = [(spec, how) for spec in KINDS.values() for how in ("sdpa", "math")] + [(s, "math") for s in WRITTEN.values()]
NAMES = [f"{name}, {how}" for name in KINDS for how in ("sdpa", "math")] + [f"{name}, math" for name in WRITTEN]
N_TOKENS = 9


def module_of(spec: ModelSpec, kind: LayerKind, how: str, *, seed: int = 0) -> Attention | LatentAttention:
    """The attention of a layer with random weights, in fp64."""
    module = (LatentAttention if spec.latent else Attention)(spec, kind, how)
    generator = torch.Generator().manual_seed(seed)
    for each in module.parameters():
        with torch.no_grad():
            each.normal_(0, 0.5, generator=generator)
    return module.double()


def run(module: torch.nn.Module, spec: ModelSpec, kind: LayerKind, how: str, x: torch.Tensor) -> torch.Tensor:
    """What the module gives with the angles and the mask that the model makes for it."""
    n_tokens = x.shape[1]
    name = angles_of(spec, kind)
    angles = None
    if name is not None:
        angles = Rotary(rotary_modules(spec)[name]).double()(n_tokens, torch.float64)
    mask = Masks(spec, how, 0.0)(n_tokens, torch.float64, x.device)[kind.window]
    y: torch.Tensor = module(x, (angles, mask))
    return y


@pytest.mark.parametrize(("spec", "how"), CASES, ids=NAMES)
def test_attention_is_what_its_formula_says(spec: ModelSpec, how: str) -> None:
    x = torch.randn(2, N_TOKENS, spec.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for layer in range(2):
        kind = kind_of(spec, layer)
        module = module_of(spec, kind, how, seed=layer)
        with torch.no_grad():
            found = run(module, spec, kind, how, x).numpy()
        weights = {name: each.detach().numpy() for name, each in module.named_parameters()}
        for b in range(2):
            wanted = by_loops(spec, kind, weights, x[b].numpy())
            np.testing.assert_allclose(found[b], wanted, atol=2e-6, rtol=2e-6)  # angles are made in fp32


@pytest.mark.parametrize("name", KINDS)
def test_fused_and_written_out_have_the_same_gradients(name: str) -> None:
    spec, kind = KINDS[name], kind_of(KINDS[name], 0)
    x = torch.randn(2, N_TOKENS, spec.d_model, generator=torch.Generator().manual_seed(1)).double()
    towards = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).double()
    both = []
    for how in ("sdpa", "math"):
        module, inward = module_of(spec, kind, how), x.clone().requires_grad_()
        (run(module, spec, kind, how, inward) * towards).sum().backward()
        both.append([inward.grad, *(each.grad for each in module.parameters())])
    for fused, written in zip(*both, strict=True):
        torch.testing.assert_close(fused, written, atol=1e-5, rtol=1e-5)


# A second way to compute it


def by_loops(spec: ModelSpec, kind: LayerKind, w: dict[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """Attention of one sequence [T, D], a head and a query at a time."""
    n_tokens, H = len(x), spec.attention.n_heads
    q, k, v = (latent_heads if spec.latent else plain_heads)(spec, kind, w, x)
    scale = spec.attention.scale or 1 / math.sqrt(q.shape[-1])
    out = np.zeros((n_tokens, H, v.shape[-1]))
    for h in range(H):
        shared = h * k.shape[1] // H
        for t in range(n_tokens):
            first = 0 if kind.window is None else max(0, t - kind.window + 1)
            scores = np.array([q[t, h] @ k[s, shared] * scale for s in range(first, t + 1)])
            if spec.attention.softcap:
                scores = spec.attention.softcap * np.tanh(scores / spec.attention.softcap)
            if spec.positions.kind == "alibi":
                scores = scores - penalty(H, h) * (t - np.arange(first, t + 1))
            top = np.exp(scores - scores.max())
            sink = np.exp(w["sinks"][h] - scores.max()) if spec.attention.sinks else 0.0
            out[t, h] = (top / (top.sum() + sink)) @ v[first : t + 1, shared]
    return affine(w, "o_proj", out.reshape(n_tokens, -1))


def affine(w: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def penalty(n_heads: int, head: int) -> float:
    """ALiBi's slope by the recursion of the authors' code."""

    def of(n: int) -> list[float]:
        if math.log2(n).is_integer():
            start = 2 ** (-(2 ** -(math.log2(n) - 3)))
            return [start * start**each for each in range(n)]
        closest = 2 ** math.floor(math.log2(n))
        return of(closest) + of(2 * closest)[0::2][: n - closest]

    return of(n_heads)[head]


def normed(spec: ModelSpec, w: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    weight = w[f"{name}.weight"] + (1 if spec.norm.plus_one else 0)
    if spec.norm.kind == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.norm.eps) * weight
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def plain_heads(
    spec: ModelSpec, kind: LayerKind, w: dict[str, np.ndarray], x: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    K = spec.head_size
    found = []
    for name in "qkv":
        y = affine(w, f"{name}_proj", x)
        if name != "v" and spec.attention.qk_norm == "width":
            y = normed(spec, w, f"{name}_norm", y)
        y = y.reshape(len(x), -1, K)
        if name != "v" and spec.attention.qk_norm == "head":
            y = normed(spec, w, f"{name}_norm", y)
        found.append(turned(spec, kind, y, 0) if name != "v" and kind.rotary else y)
    return found[0], found[1], found[2]


def latent_heads(
    spec: ModelSpec, kind: LayerKind, w: dict[str, np.ndarray], x: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """DeepSeek-V2, equations 9 to 19, with the norms of the latents that the published code has."""
    H, N, R, W = spec.attention.n_heads, spec.latent.nope_head_dim, spec.latent.kv_rank, spec.value_size
    assert N is not None

    def small_norm(name: str, y: np.ndarray) -> np.ndarray:
        return y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * w[f"{name}.weight"]

    if spec.latent.q_rank is None:
        q = affine(w, "q_proj", x)
    else:
        q = affine(w, "q_b_proj", small_norm("q_a_layernorm", affine(w, "q_a_proj", x)))
    q = turned(spec, kind, q.reshape(len(x), H, -1), N)
    joint = affine(w, "kv_a_proj_with_mqa", x)
    kv = affine(w, "kv_b_proj", small_norm("kv_a_layernorm", joint[:, :R])).reshape(len(x), H, N + W)
    rotary = turned(spec, kind, joint[:, None, R:], 0)
    k = np.concatenate([kv[..., :N], np.repeat(rotary, H, axis=1)], axis=-1)
    return q, k, kv[..., N:]


def turned(spec: ModelSpec, kind: LayerKind, x: np.ndarray, begin: int) -> np.ndarray:
    """Each pair as a complex number times exp(i position frequency)."""
    local = kind.window is not None and spec.rope.local_theta is not None
    theta = spec.rope.local_theta if local else spec.rope.theta
    R = spec.rotary_size
    y = x.copy()
    for j in range(R // 2):
        a, b = (2 * j, 2 * j + 1) if spec.rope.interleaved else (j, j + R // 2)
        slower = 1 if local or spec.rope.scaling is None else spec.rope.scaling.factor
        angle = np.arange(len(x)) * theta ** (-2 * j / R) / slower
        pair = (x[..., begin + a] + 1j * x[..., begin + b]) * np.exp(1j * angle)[:, None]
        y[..., begin + a], y[..., begin + b] = pair.real, pair.imag
    return y


# Parts


@given(n_heads=st.integers(1, 130))
@settings(max_examples=60, deadline=None)
def test_slopes_of_any_number_of_heads(n_heads: int) -> None:
    assert slopes(n_heads) == pytest.approx([penalty(n_heads, h) for h in range(n_heads)], rel=1e-12)


def test_yarn_is_that_of_transformers() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

    rope = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 4096, "attention_factor": 1.25,
    }  # fmt: skip
    config = DeepseekV3Config(qk_rope_head_dim=64, rope_parameters=rope, max_position_embeddings=163840)
    wanted, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    spec = with_fields(
        LATENT,
        {
            "positions.scaling": "yarn",
            "attention.rope_head_dim": 64,
            "positions.scaling.factor": 40.0,
            "positions.scaling.original_seq_len": 4096,
            "positions.scaling.beta_slow": 1.0,
            "positions.scaling.beta_fast": 32.0,
            "positions.scaling.attention_factor": 1.25,
        },
    )
    torch.testing.assert_close(frequencies(spec), wanted)
    assert factor == 1.25
    cosines, sines = Rotary(spec)(8, torch.float32)
    torch.testing.assert_close(cosines**2 + sines**2, torch.full_like(cosines, 1.25**2))


def test_longrope_is_not_built() -> None:
    with pytest.raises(InvalidInput, match="a factor for each pair of a head"):
        Rotary(
            with_fields(PLAIN, {"positions.scaling": "longrope", "positions": "rope", "positions.scaling.factor": 4.0})
        )


@pytest.mark.parametrize(
    ("fields", "how", "sentence"),
    [
        ({"attention.softcap": 2.0}, "sdpa", "capped scores .* math"),
        ({"attention.sinks": True}, "sdpa", "attention sinks.* math"),
        ({}, "flash", "accelerators, not of a CPU.* sdpa"),
        ({"attention.sinks": True}, "efficient", "accelerators, not of a CPU.* math"),
    ],
)
def test_what_a_kernel_cannot_do_is_refused(fields: dict[str, Any], how: str, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        Transformer(with_fields(PLAIN, fields), attention=how)


def test_without_a_recipe_the_model_gets_attention_that_can_do_it() -> None:
    ids = torch.arange(8)[None]
    for fields in ({}, {"attention.softcap": 0.5}, {"attention.sinks": True}):
        torch.manual_seed(0)
        model = Transformer(with_fields(PLAIN, fields))
        torch.manual_seed(0)
        written = Transformer(with_fields(PLAIN, fields), attention="math")
        torch.testing.assert_close(model(ids), written(ids))


def test_attention_dropout_acts_in_training_only_and_keeps_the_mean() -> None:
    spec = with_fields(PLAIN, {"attention.n_kv_heads": 4})
    x = torch.randn(1, N_TOKENS, spec.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    kind = kind_of(spec, 0)
    for how in ("sdpa", "math"):
        plain = module_of(spec, kind, how)
        dropped = Attention(spec, kind, how, 0.25).double()
        dropped.load_state_dict(plain.state_dict())
        mask = Masks(spec, how, 0.25)(N_TOKENS, torch.float64, x.device)[None]
        with torch.no_grad():
            wanted = run(plain, spec, kind, how, x)
            torch.testing.assert_close(dropped.eval()(x, (None, mask)), wanted)
            torch.manual_seed(0)
            many = dropped.train()(x.expand(4000, -1, -1), (None, mask))
            assert not torch.equal(many[0], many[1])
            assert (many.mean(0) - wanted[0]).abs().max() < 6 * many.std(0).max() / math.sqrt(4000)
