"""Experts of every kind, and multi-token prediction: the closed form tells of each what the trace sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_runs import pick
from test_closed_form_equals_trace import same_operations, same_peak, same_totals

from trainledger.ledger.step import account
from trainledger.measure.step import rehearse
from trainledger.spec.feed_forward import ROUTER_SCORES as ROUTERS
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields, with_fields
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
        "feed_forward": "experts",
        "feed_forward.n_experts": groups * size,
        "feed_forward.router.groups": groups,
        "feed_forward.router.top_groups": top_groups,
        "feed_forward.per_token": draw(st.integers(1, min(3, size * top_groups))),
        "feed_forward.router.scores": draw(st.sampled_from(ROUTERS)),
        "feed_forward.router.bias": draw(st.booleans()),
        "feed_forward.router.normalize": draw(st.booleans()),
        "feed_forward.router.scale": draw(pick(1.0, 2.5)),
        "feed_forward.router.correction": draw(st.booleans()),
    }


@st.composite
def models(draw: st.DrawFn, seq_len: int) -> ModelSpec:
    gated, shared, n_layers = draw(st.booleans()), draw(pick(0, 0, 1, 2)), draw(pick(1, 1, 2, 3))
    return from_fields(
        ModelSpec,
        {
            "vocab_size": draw(pick(5, 17)),
            "d_model": draw(pick(6, 8, 16)),
            "attention.n_heads": 2,
            "attention.head_dim": 4,
            "feed_forward.d_ff": draw(pick(7, 16)),
            "n_layers": n_layers,
            "max_seq_len": seq_len,
            "feed_forward.gated": gated,
            "feed_forward.bias": draw(st.booleans()),
            "feed_forward.activation": draw(pick("silu", "clamped_swish") if gated else pick("gelu", "relu2")),
            "feed_forward.expert_d_ff": draw(pick(None, 3, 8)),
            "feed_forward.n_shared": shared,
            "feed_forward.shared_gate": shared > 0 and draw(st.booleans()),
            "feed_forward.n_dense_layers": draw(pick(0, 0, 1, n_layers)),
            "feed_forward.every": draw(pick(1, 1, 2)),
            "tie_embeddings": draw(st.booleans()),
            **draw(routers()),
        },
    )


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
    return Run(model=with_fields(draw(models(seq_len)), {"n_mtp_layers": ahead}), recipe=recipe)


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
    model = from_fields(
        ModelSpec,
        {
            "vocab_size": 32,
            "d_model": 32,
            "attention.n_heads": 2,
            "attention.head_dim": 16,
            "feed_forward.d_ff": 32,
            "n_layers": 2,
            "max_seq_len": 16,
            "feed_forward.gated": True,
            "norm": "rmsnorm",
            "positions": "rope",
            "feed_forward.activation": "silu",
            "feed_forward": "experts",
            "feed_forward.n_experts": 4,
            "feed_forward.per_token": 2,
            "feed_forward.expert_d_ff": 16,
            "feed_forward.n_dense_layers": 1,
        },
    )
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
    spec = from_fields(
        ModelSpec,
        {
            "vocab_size": 64,
            "d_model": 32,
            "n_layers": layers,
            "attention.n_heads": 2,
            "feed_forward.d_ff": 64,
            "max_seq_len": 32,
            "norm": "rmsnorm",
            "norm.bias": False,
            "feed_forward.activation": "silu",
            "feed_forward.gated": True,
            "positions": "rope",
            "attention.bias": False,
            "feed_forward.bias": False,
            "n_mtp_layers": 1,
            "tie_embeddings": True,
        },
    )
    recipe = Recipe(
        seq_len=16, global_batch=2, steps=3, precision="bf16", master_weights=True, activation_checkpointing="full",
        recompute_every=layers // 2,
    )  # fmt: skip
    run = Run(model=spec, recipe=recipe)
    assert not list(run_problems(run))
    predicted, traced = account(run), rehearse(run)
    same_totals(predicted, traced)
    same_peak(predicted, traced)
