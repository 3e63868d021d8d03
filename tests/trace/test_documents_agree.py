"""Attention that stops at documents: the closed form, the trace and a metered step agree, in each kind of run."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from agreement import assert_agree, facts, same_totals, unrolled
from pairwise import Case, covering
from random_runs import run_of

from trainledger.ledger.step import account
from trainledger.observe.measure.step import rehearse_really
from trainledger.spec.run import Run

pytestmark = pytest.mark.agreement

torch.set_num_threads(1)

POSITIONS: tuple[dict[str, Any], ...] = (
    {"positions": "rope"}, {"positions": "learned"}, {"positions": "alibi"},
    {"positions": "rope", "attention.window": 3, "attention.global_every": 2},
)  # fmt: skip


def drawn(random: Random) -> Case:
    choice = random.choice
    micro_batch = choice((1, 2, 3))
    return {
        "model": choice(POSITIONS), "kv_heads": choice((1, 4)), "n_layers": choice((1, 3)), "micro_batch": micro_batch,
        "global_batch": micro_batch * choice((1, 3)), "seq_len": 9, "attention": choice(("sdpa", "math")),
        "precision": choice(("fp32", "bf16-mixed", "bf16")),
        "activation_checkpointing": choice(("none", "full", "selective", "attention", "offload")),
        "attention_dropout": choice((0.0, 0.1)), "loss": choice(("full", "chunked")),
    }  # fmt: skip


def run_from(case: Case) -> Run:
    fields = dict(case)
    heads = {"attention.n_heads": 4, "attention.n_kv_heads": fields.pop("kv_heads")}
    model = {"n_layers": fields.pop("n_layers"), "max_seq_len": 16, **heads, **fields.pop("model")}
    if fields["loss"] == "chunked":
        fields |= {"loss.chunks": fields["micro_batch"]}
    return run_of(model=model, documents="masked", **fields)


@pytest.mark.parametrize("case", covering(drawn, drawn=600), ids=str)
def test_closed_form_trace_and_a_real_step_agree(case: Case) -> None:
    run = run_from(case)
    predicted, traced = assert_agree(run, in_order=run.recipe.activation_checkpointing.kind != "offload")
    real = rehearse_really(run)
    same_totals(predicted, real)
    assert [facts(each) for each in unrolled(real)] == [facts(each) for each in unrolled(traced)]


def test_what_masked_documents_cost_is_the_mask() -> None:
    """[B, 1, T, T] in the format of the compute, for all layers together, and dense attention."""
    sizes: dict[str, Any] = {"seq_len": 64, "global_batch": 4, "micro_batch": 2, "model": {"max_seq_len": 64}}
    joined, masked = account(run_of(**sizes)), account(run_of(documents="masked", **sizes))
    assert masked.kept_nbytes - joined.kept_nbytes == 2 * 64 * 64 * 4
    assert masked.by("kind")["attention"] == joined.by("kind")["attention"]
    assert masked.matmul_flops == joined.matmul_flops
    on_gpu = account(run_of(documents="masked", precision="bf16-mixed", **sizes), backend="cuda")
    kernels = {each.name for each in on_gpu if each.kind == "attention"}
    assert kernels == {
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"
    }  # fmt: skip
