"""Mixers: their scans against the recurrences that define them, their gradients, and decoding with a state."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainledger.engine.nn.cache import Cache
from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.scans import RUNS, scan
from trainledger.engine.nn.transformer import Transformer
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields

MIXERS = {
    "mamba-2": {"n_heads": 4, "head_dim": 8, "state": 6, "n_groups": 2, "chunk": 8},
    "gated-delta": {"n_heads": 4, "n_key_heads": 2, "key_dim": 6, "value_dim": 8},
    "kimi-delta": {"n_heads": 4, "head_dim": 8},
    "short-conv": {},
}


def spec_of(kind: str, **changes: object) -> ModelSpec:
    sizes = {"vocab_size": 40, "d_model": 16, "n_layers": 3, "max_seq_len": 64, "layers": "RAB", "mixer": kind}
    heads = {"attention.n_heads": 2, "feed_forward.d_ff": 24}
    own = {f"mixer.{name}": value for name, value in MIXERS[kind].items()}
    return from_fields(ModelSpec, sizes | heads | own | changes)


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def test_the_scan_of_mamba_2_is_its_recurrence() -> None:
    inputs = drawn((2, 13, 4, 3), (2, 13, 4), (4,), (4,), (2, 13, 2, 5), (2, 13, 2, 5), (4,))
    x, step, log, bias, b, c, d = inputs
    b, c = b.repeat_interleave(2, dim=2), c.repeat_interleave(2, dim=2)
    step = F.softplus(step + bias)
    state, wanted = torch.zeros(2, 4, 3, 5), []
    for t in range(13):
        kept = (-step[:, t] * log.exp()).exp()[..., None, None] * state
        state = kept + (step[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        wanted.append((state * c[:, t, :, None]).sum(-1) + d[:, None] * x[:, t])
    torch.testing.assert_close(scan("state_space", (4.0,), *inputs), torch.stack(wanted, dim=1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("by_channel", [False, True])
def test_the_gated_delta_rule_is_its_recurrence(by_channel: bool) -> None:
    own = (6,) if by_channel else ()
    inputs = drawn((2, 13, 4, 5), (2, 13, 4, 6), (2, 13, 4, 6), (2, 13, 4), (2, 13, 4, *own), (4,), (4, *own))
    v, q, k, rate, decay, log, bias = inputs
    q, k, rate = F.normalize(q, dim=-1) * 6**-0.5, F.normalize(k, dim=-1), rate.sigmoid()
    kept = -F.softplus(decay + bias) * (log.exp()[:, None] if by_channel else log.exp())
    kept = kept if by_channel else kept[..., None]
    state, wanted = torch.zeros(2, 4, 6, 5), []
    for t in range(13):
        state = state * kept[:, t, ..., None].exp()
        new = v[:, t] - (state * k[:, t, ..., None]).sum(-2)
        state = state + k[:, t, ..., None] * (rate[:, t, :, None] * new)[..., None, :]
        wanted.append((state * q[:, t, ..., None]).sum(-2))
    torch.testing.assert_close(scan("delta_rule", (4.0,), *inputs), torch.stack(wanted, dim=1), rtol=1e-4, atol=1e-4)


def test_the_gated_delta_rule_is_that_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    inputs = drawn((2, 70, 4, 5), (2, 70, 2, 6), (2, 70, 2, 6), (2, 70, 4), (2, 70, 4), (4,), (4,))
    v, q, k, rate, decay, log, bias = inputs
    kept = -log.exp() * F.softplus(decay + bias)
    wanted, _ = modeling.torch_chunk_gated_delta_rule(q, k, v, kept, rate.sigmoid(), use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(scan("delta_rule", (64.0,), *inputs), wanted, rtol=1e-4, atol=1e-4)


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["convolution", "state_space", "gated_norm"])
def test_gradients_are_those_of_the_written_out_function_inside_of_a_mode_too(name: str) -> None:
    shapes = {
        "convolution": [(2, 9, 6), (6, 4), (6,)],
        "state_space": [(2, 9, 4, 3), (2, 9, 4), (4,), (4,), (2, 9, 2, 5), (2, 9, 2, 5), (4,)],
        "gated_norm": [(2, 9, 6), (2, 9, 6), (6,)],
    }
    numbers = (1e-5, 0.0) if name == "gated_norm" else (4.0,)
    inputs = [tensor.requires_grad_() for tensor in drawn(*shapes[name])]
    value, _ = RUNS[name](inputs, numbers, None)
    wanted = torch.autograd.grad(value.square().sum(), inputs)
    with Names() as names:
        got = torch.autograd.grad(scan(name, numbers, *inputs).square().sum(), inputs)
    torch.testing.assert_close(got, wanted)
    assert {f"trainledger::{name}", f"trainledger::{name}_backward"} <= set(names.seen)
    assert not any("einsum" in seen or "cumsum" in seen or "silu" in seen for seen in names.seen)


@pytest.mark.parametrize("kind", MIXERS)
def test_decoding_gives_the_logits_of_the_whole_sequence(kind: str) -> None:
    spec = spec_of(kind, **{"attention.gated": True})
    model = Transformer(spec).eval()
    initialize(model, seed=3)
    ids = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        whole = model(ids)
        cache = Cache(spec, torch.empty(0), 2, 9)
        logits = [model(ids[:, :4], cache=cache), *(model(ids[:, at : at + 1], cache=cache) for at in range(4, 9))]
    torch.testing.assert_close(torch.stack(logits, dim=1), whole[:, 3:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", MIXERS)
def test_a_model_learns(kind: str) -> None:
    model = Transformer(spec_of(kind))
    initialize(model, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.randint(0, 40, (4, 32), generator=torch.Generator().manual_seed(5))
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.5
    assert all(parameter.isfinite().all() for parameter in model.parameters())
