"""Experts of every kind, and multi-token prediction: the closed form tells of each what the trace sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_runs import pick
from test_closed_form_equals_trace import same_operations, same_peak, same_totals

from trainledger.ledger.step import account
from trainledger.measure.step import rehearse
from trainledger.spec.model import ROUTERS, ModelSpec
from trainledger.spec.recipe import Recipe
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run

torch.set_num_threads(1)


@st.composite
def routers(draw: st.DrawFn) -> dict[str, Any]:
    """How many experts there are, and how they are chosen."""
    groups, size = draw(pick((1, 4), (1, 5), (2, 1), (2, 3), (4, 2)))
    top_groups = draw(st.integers(1, groups))
    return {
        "n_experts": groups * size, "router_groups": groups, "router_top_groups": top_groups,
        "experts_per_token": draw(st.integers(1, min(3, size * top_groups))), "router": draw(st.sampled_from(ROUTERS)),
        "router_bias": draw(st.booleans()), "router_normalize": draw(st.booleans()),
        "router_scale": draw(pick(1.0, 2.5)), "router_correction": draw(st.booleans()),
    }  # fmt: skip


@st.composite
def models(draw: st.DrawFn, seq_len: int) -> ModelSpec:
    gated, shared, n_layers = draw(st.booleans()), draw(pick(0, 0, 1, 2)), draw(pick(1, 1, 2, 3))
    return ModelSpec(
        vocab_size=draw(pick(5, 17)), d_model=draw(pick(6, 8, 16)), n_heads=2, head_dim=4, d_ff=draw(pick(7, 16)),
        n_layers=n_layers, max_seq_len=seq_len, gated=gated, mlp_bias=draw(st.booleans()),
        activation=draw(pick("silu", "clamped_swish") if gated else pick("gelu", "relu2")),
        expert_d_ff=draw(pick(None, 3, 8)), n_shared_experts=shared,
        shared_expert_gate=shared > 0 and draw(st.booleans()), n_dense_layers=draw(pick(0, 0, 1, n_layers)),
        expert_every=draw(pick(1, 1, 2)), tie_embeddings=draw(st.booleans()), **draw(routers()),
    )  # fmt: skip


@st.composite
def runs(draw: st.DrawFn) -> Run:
    micro_batch, grad_accum, seq_len = draw(pick(1, 2, 3)), draw(pick(1, 1, 1, 2)), draw(pick(1, 2, 5, 8))
    ahead = draw(pick(0, 0, 0, 1, 2)) if seq_len > 3 else 0
    capacity = draw(pick(None, None, 0.4, 1.0, 1.25, 3.0))
    recipe = Recipe(
        seq_len=seq_len, global_batch=micro_batch * grad_accum, micro_batch=micro_batch, steps=3,
        precision=draw(pick("fp32", "bf16-mixed")), activation_checkpointing=draw(pick("none", "full")),
        expert_dispatch="dropless" if capacity is None else "capacity", capacity_factor=capacity,
        load_balance_loss=draw(pick(0.0, 0.01)), optimizer=draw(pick("sgd", "adamw")),
        optimizer_loop=draw(pick("fused", "loop")), grad_clip=draw(pick(None, 1.0)),
    )  # fmt: skip
    return Run(model=replace(draw(models(seq_len)), n_predict_ahead=ahead), recipe=recipe)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@given(runs())
def test_experts_are_traced_as_they_are_accounted_for(run: Run) -> None:
    assert not list(run_problems(run))
    predicted, traced = account(run), rehearse(run)
    same_totals(predicted, traced)
    same_peak(predicted, traced)
    same_operations(predicted, traced, run)


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp8-rowwise"])
@pytest.mark.parametrize(
    "keep",
    [("mm", "grouped_mm"), ("_scaled_mm",), ("_scaled_mm", "mm", "grouped_mm", "attention"), ("matmuls", "_scaled_mm")],
)
def test_products_of_experts_and_in_8_bits_may_be_kept(precision: str, keep: tuple[str, ...]) -> None:
    model = ModelSpec(
        vocab_size=32, d_model=32, n_heads=2, head_dim=16, d_ff=32, n_layers=2, max_seq_len=16, gated=True,
        norm="rmsnorm", positions="rope", activation="silu", n_experts=4, experts_per_token=2, expert_d_ff=16,
        n_dense_layers=1,
    )  # fmt: skip
    recipe = Recipe(
        seq_len=16, global_batch=2, micro_batch=2, steps=3, precision=precision, recompute_keep=keep,
        activation_checkpointing="selective",
    )  # fmt: skip
    run = Run(model=model, recipe=recipe)
    predicted, traced = account(run), rehearse(run)
    same_totals(predicted, traced)
    same_peak(predicted, traced)
    same_operations(predicted, traced, run)
    kept = {each.name for each in predicted if each.kind == "matmul" and each.phase == "recompute"}
    assert not kept & set(keep)


@pytest.mark.parametrize("layers", [2, 4])
def test_two_rounds_of_recomputed_blocks_before_modules_ahead(layers: int) -> None:
    """The first round's input is read again by the module, the last one's result is kept: no round is left between."""
    spec = ModelSpec(
        vocab_size=64, d_model=32, n_layers=layers, n_heads=2, d_ff=64, max_seq_len=32, norm="rmsnorm",
        norm_bias=False, activation="silu", gated=True, positions="rope", attention_bias=False, mlp_bias=False,
        n_predict_ahead=1, tie_embeddings=True,
    )  # fmt: skip
    recipe = Recipe(
        seq_len=16, global_batch=2, steps=3, precision="bf16", master_weights=True, activation_checkpointing="full",
        recompute_every=layers // 2,
    )  # fmt: skip
    run = Run(model=spec, recipe=recipe)
    assert not list(run_problems(run))
    predicted, traced = account(run), rehearse(run)
    same_totals(predicted, traced)
    same_peak(predicted, traced)
