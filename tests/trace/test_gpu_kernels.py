"""Attention kernels of accelerators in their witness on a CPU: fake tensors know their shapes and what they keep."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agreement import facts, live_nbytes, unrolled
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_runs import pick, run_of
from torch import Tensor

from trainledger.engine.nn import attention
from trainledger.engine.nn.attention import Scores
from trainledger.ledger.step import account
from trainledger.observe.measure.step import rehearse
from trainledger.spec.run import Run

pytestmark = pytest.mark.agreement

torch.set_num_threads(1)


def as_on_cuda(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, scale: float | None = None, **rest: Any
) -> Tensor:
    """What `F.scaled_dot_product_attention` runs on CUDA in half precision."""
    if attn_mask is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(q, k, v, 0.0, True, False, scale=scale)[0]
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, attn_mask.expand(*q.shape[:2], -1, -1), True, 0.0, False, scale=scale)[0]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Models whose other operations are the same on CPUs and accelerators: layer norms, a loop as optimizer."""
    masked = draw(st.booleans())
    heads = draw(pick(1, 2, 4))
    fields: dict[str, Any] = {"attention.n_heads": heads, "positions": draw(pick("learned", "rope", "none"))}
    documents = "masked" if masked and draw(st.booleans()) else None
    if masked:
        fields["attention.window"] = draw(pick(None, 1, 4))
        if fields["attention.window"] is None and documents is None:
            fields["positions"] = "alibi"
    else:
        fields["attention.n_kv_heads"] = draw(pick(1, heads))
    seq_len = draw(pick(5, 32, 33))
    return run_of(
        gpt2=True, seq_len=seq_len, model={"max_seq_len": 40, **fields}, documents=documents, precision="bf16-mixed",
        optimizer="sgd", grad_clip=None, global_batch=draw(pick(1, 3)),
        activation_checkpointing=draw(pick("none", "full")), **{"optimizer.implementation": "loop"},
    )  # fmt: skip


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(runs())
def test_the_account_of_an_accelerator_is_the_trace_of_its_kernels(run: Run) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", as_on_cuda)
        traced = rehearse(run)
    predicted = account(run, backend="cuda")
    ours, theirs = unrolled(predicted), unrolled(traced)
    for mine, other in zip(ours, theirs, strict=False):
        assert facts(mine) == facts(other)
    assert len(ours) == len(theirs)
    assert predicted.kept_nbytes == traced.kept_nbytes
    spec, T = run.model, run.recipe.seq_len
    # Masks, of ALiBi for each head and of documents for each sequence, and angles, which loops cannot place.
    shared = 2 * max(spec.attention.n_heads, run.device_batch) * T * T + 2 * 2 * T * (spec.head_size // 2)
    for mine_now, other_now in zip(live_nbytes(predicted), live_nbytes(traced), strict=True):
        assert abs(mine_now - other_now) <= shared


def as_on_hopper(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, scale: float | None = None, **rest: Any
) -> Tensor:
    """What it runs where cuDNN's kernel is chosen."""
    assert attn_mask is None
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=scale)[0]


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_the_account_of_cudnn_is_the_trace_of_its_kernel(kv_heads: int) -> None:
    run = run_of(
        gpt2=True,
        seq_len=32,
        model={"max_seq_len": 40, "attention.n_heads": 4, "attention.n_kv_heads": kv_heads},
        optimizer="sgd",
        precision="bf16-mixed",
        grad_clip=None,
        global_batch=3,
        **{"optimizer.implementation": "loop"},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", as_on_hopper)
        traced = unrolled(rehearse(run))
    predicted = unrolled(account(replace(run, recipe=replace(run.recipe, attention="cudnn")), backend="cuda"))
    assert [facts(each) for each in predicted] == [facts(each) for each in traced]


def test_cudnn_takes_a_mask_where_a_window_needs_one() -> None:
    run = run_of(gpt2=True, model={"attention.window": 4}, precision="bf16-mixed")
    ledger = account(replace(run, recipe=replace(run.recipe, attention="cudnn")), backend="cuda")
    found = {(each.name, each.shape[-1]) for each in ledger if each.kind == "attention" and each.phase == "forward"}
    assert found == {("_scaled_dot_product_cudnn_attention", 0)}


def repeated(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGW: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """As `engine.nn.attention` calls on CUDA the kernel that has no heads shared by queries."""
    q, k, v = (each.transpose(1, 2) for each in (q_BTHK, k_BTGK, v_BTGW))
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    hidden = None if mask is None else mask.expand(*q.shape[:2], -1, -1)
    run = torch.ops.aten._scaled_dot_product_efficient_attention
    y_BHTW: Tensor = run(q, k, v, hidden, True, 0.0, mask is None, scale=scores.scale)[0]
    return y_BHTW.transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("positions", ["rope", "none"])
@pytest.mark.parametrize("qk_norm", [None, "head", "width"])
@pytest.mark.parametrize(("precision", "window"), [("fp32", None), ("fp32", 4), ("bf16-mixed", 4)])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_gradients_of_shared_heads_are_copied_back(
    positions: str, qk_norm: str | None, precision: str, window: int | None, kv_heads: int
) -> None:
    model = {
        "positions": positions, "attention.qk_norm": qk_norm, "attention.window": window,
        "attention.n_kv_heads": kv_heads, "norm": "layernorm", "norm.bias": True,
    }  # fmt: skip
    own = {"optimizer": "sgd", "optimizer.implementation": "loop", "grad_clip": None, "precision": precision}
    run = run_of(model=model, **own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "scaled_dot_product", repeated)
        traced = unrolled(rehearse(run))
    predicted = unrolled(account(run, backend="cuda"))
    assert Counter(map(facts, predicted)) == Counter(map(facts, traced))
