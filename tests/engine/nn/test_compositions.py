"""Every way to compose a model, in numbers: against the same sums written out plainly from the parameters by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from models import sizes
from trainledger.engine.nn.feed_forward import gated
from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.transformer import Transformer
from trainledger.spec.block import ACTIVATIONS
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.rules.model import model_problems

torch.set_num_threads(1)
SIZES = sizes(V=11, D=12, L=2, H=3, F=20, T=7)
Named = dict[str, Tensor]


def normed(spec: ModelSpec, named: Named, name: str, x: Tensor) -> Tensor:
    """A norm by its definition."""
    if spec.norm.kind == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + spec.norm.eps)
    w = named.get(f"{name}.weight", torch.ones(()))
    return y * (1 + w if spec.norm.plus_one else w) + named.get(f"{name}.bias", torch.zeros(()))


def linear(named: Named, name: str, x: Tensor) -> Tensor:
    return x @ named[f"{name}.weight"].T + named.get(f"{name}.bias", torch.zeros(()))


def attention(spec: ModelSpec, named: Named, name: str, x: Tensor) -> Tensor:
    """Multi-head attention without rotary positions, query by query."""
    q, k, v = (linear(named, f"{name}.{each}_proj", x).view(*x.shape[:2], spec.attention.n_heads, -1) for each in "qkv")
    out = torch.zeros_like(v)
    for t in range(x.shape[1]):
        scores = torch.einsum("bhk,bshk->bhs", q[:, t], k[:, : t + 1]) / math.sqrt(q.shape[-1])
        out[:, t] = torch.einsum("bhs,bshk->bhk", scores.softmax(-1), v[:, : t + 1])
    return linear(named, f"{name}.o_proj", out.flatten(2))


def activated(name: str, x: Tensor) -> Tensor:
    match name:
        case "silu":
            return x / (1 + torch.exp(-x))
        case "gelu":
            return x * (1 + torch.erf(x / math.sqrt(2))) / 2
        case "gelu_tanh":
            return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        case "relu":
            return torch.where(x > 0, x, 0)
        case "relu2":
            return torch.where(x > 0, x * x, 0)
    raise AssertionError(name)


def mlp(spec: ModelSpec, named: Named, name: str, x: Tensor) -> Tensor:
    up = linear(named, f"{name}.up_proj", x)
    if not spec.feed_forward.gated:
        return linear(named, f"{name}.down_proj", activated(spec.feed_forward.activation, up))
    gate = linear(named, f"{name}.gate_proj", x)
    if spec.feed_forward.activation == "clamped_swish":
        gate, up = torch.minimum(gate, torch.tensor(7.0)), torch.clip(up, -7, 7)
        return linear(named, f"{name}.down_proj", (up + 1) * gate / (1 + torch.exp(-1.702 * gate)))
    return linear(named, f"{name}.down_proj", activated(spec.feed_forward.activation, gate) * up)


def block(spec: ModelSpec, named: Named, at: str, x: Tensor) -> Tensor:
    def norm(name: str, x: Tensor) -> Tensor:
        return normed(spec, named, f"{at}.{name}", x)

    def attend(x: Tensor) -> Tensor:
        return attention(spec, named, f"{at}.self_attn", x)

    def feed(x: Tensor) -> Tensor:
        return mlp(spec, named, f"{at}.mlp", x)

    match spec.block, spec.norm_place:
        case "parallel", _:
            n = norm("input_layernorm", x)
            return x + attend(n) + feed(n)
        case "parallel-two-norms", _:
            return x + attend(norm("input_layernorm", x)) + feed(norm("post_attention_layernorm", x))
        case _, "pre":
            x = x + attend(norm("input_layernorm", x))
            return x + feed(norm("post_attention_layernorm", x))
        case _, "post":
            x = x + norm("post_attention_layernorm", attend(x))
            return x + norm("post_feedforward_layernorm", feed(x))
        case _, "sandwich":
            x = x + norm("post_attention_layernorm", attend(norm("input_layernorm", x)))
            return x + norm("post_feedforward_layernorm", feed(norm("pre_feedforward_layernorm", x)))
        case _, "after-add":
            x = norm("post_attention_layernorm", x + attend(x))
            return norm("post_feedforward_layernorm", x + feed(x))
    raise AssertionError(spec)


def logits(spec: ModelSpec, named: Named, ids: Tensor) -> Tensor:
    """The whole model, in fp64."""
    x = named["embed_tokens.weight"][ids] * spec.embedding_scale
    if spec.positions.kind == "learned":
        x = x + torch.stack(
            [named["embed_positions.weight"][t + spec.positions.extra_rows] for t in range(ids.shape[1])]
        )
    if spec.embedding_norm:
        x = normed(spec, named, "embed_norm", x)
    for layer in range(spec.n_layers):
        x = block(spec, named, f"layers.{layer}", x)
    if spec.norm_place != "after-add":
        x = normed(spec, named, "norm", x)
    head = named["embed_tokens.weight" if spec.tie_embeddings else "lm_head.weight"]
    y = (x @ head.T + named.get("lm_head.bias", torch.zeros(()))) * spec.logit_scale
    return y if spec.logit_softcap is None else spec.logit_softcap * torch.tanh(y / spec.logit_softcap)


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Any norm, placement, block, MLP and ends."""
    norm, has_gate, flag = draw(st.sampled_from(["rmsnorm", "layernorm"])), draw(st.booleans()), st.booleans()
    block = draw(st.sampled_from(["serial", "serial", "parallel", "parallel-two-norms"]))
    weight = norm == "rmsnorm" or draw(flag)
    positions = draw(st.sampled_from(["learned", "none"]))
    fields: dict[str, Any] = {
        "norm": norm,
        "norm.weight": weight,
        "norm.bias": norm == "layernorm" and weight and draw(flag),
        "norm.plus_one": norm == "rmsnorm" and draw(flag),
        "block": block,
        "norm_place": draw(st.sampled_from(["pre", "post", "sandwich", "after-add"])) if block == "serial" else "pre",
        "feed_forward.gated": has_gate,
        "feed_forward.activation": draw(st.sampled_from(ACTIVATIONS if has_gate else ACTIVATIONS[:-1])),
        "attention.bias": draw(flag),
        "feed_forward.bias": draw(flag),
        "head_bias": draw(flag),
        "tie_embeddings": draw(flag),
        "embedding_norm": draw(flag),
        "embedding_scale": draw(st.sampled_from([1.0, 3.5])),
        "positions": positions,
        "positions.extra_rows": draw(st.sampled_from([0, 2])) if positions == "learned" else None,
        "vocab_multiple": draw(st.sampled_from([1, 8])),
        "logit_scale": draw(st.sampled_from([1.0, 0.25])),
        "logit_softcap": draw(st.sampled_from([None, 2.0])),
    }
    return from_fields(ModelSpec, {**SIZES, **fields})


def filled(spec: ModelSpec, seed: int) -> Transformer:
    """A model whose every parameter differs from what initialization would give vectors."""
    model = Transformer(spec).eval()
    initialize(model, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.3 * torch.randn(each.shape, generator=generator))
    return model


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(models(), st.integers(0, 999))
def test_logits_are_those_of_the_sums_written_out(spec: ModelSpec, seed: int) -> None:
    assert not list(model_problems(spec))
    model = filled(spec, seed)
    ids = torch.randint(spec.vocab_size, (2, 5), generator=torch.Generator().manual_seed(seed))
    named = {name: each.detach().double() for name, each in model.named_parameters()}
    with torch.no_grad():
        mine = model(ids)
    assert mine.shape == (2, 5, spec.padded_vocab)
    torch.testing.assert_close(mine.double(), logits(spec, named, ids), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("gate", [-1e4, -3.0, 0.0, 2.0, 6.9, 7.1, 1e4])
@pytest.mark.parametrize("up", [-8.0, 0.5, 9.0])
def test_clamped_swish_by_hand(gate: float, up: float) -> None:
    cut = min(gate, 7.0)
    by_hand = (max(-7.0, min(up, 7.0)) + 1) * cut / (1 + math.exp(min(700, -1.702 * cut)))
    mine = float(gated(torch.tensor(gate), torch.tensor(up), "clamped_swish"))
    assert mine == pytest.approx(by_hand, rel=1e-5, abs=1e-6)


def test_opt_reads_its_positions_two_rows_later() -> None:
    spec = from_fields(ModelSpec, {**SIZES, "positions": "learned", "positions.extra_rows": 2})
    model = filled(spec, 0)
    assert model.embed_positions is not None
    assert model.embed_positions.weight.shape == (9, 12)
    ids = torch.zeros((1, 7), dtype=torch.int64)
    model(ids).sum().backward()
    gradient = model.embed_positions.weight.grad
    assert gradient is not None
    assert [bool(row.any()) for row in gradient] == [False, False] + [True] * 7


def test_a_tied_padded_head_has_logits_of_the_padding_too() -> None:
    model = filled(from_fields(ModelSpec, {**SIZES, "vocab_multiple": 16, "tie_embeddings": True}), 0)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert model(torch.zeros((1, 2), dtype=torch.int64)).shape == (1, 2, 16)
