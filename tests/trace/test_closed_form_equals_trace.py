"""The first invariant: the closed form and the trace, written apart, tell the same of every run the engine trains."""

from __future__ import annotations

import pytest
import torch
from agreement import assert_agree, examples
from hypothesis import given
from random_runs import run_of, runs

from trainledger.ledger.step import account
from trainledger.observe.measure.step import rehearse
from trainledger.spec.run import Run

pytestmark = pytest.mark.agreement

torch.set_num_threads(1)


@examples(220)
@given(runs())
def test_closed_form_equals_trace(run: Run) -> None:
    assert_agree(run)


def test_the_same_of_the_two_families() -> None:
    for run in (run_of(), run_of(gpt2=True), run_of(precision="bf16-mixed", activation_checkpointing="full")):
        assert_agree(run)


def test_a_different_model_is_told_apart() -> None:
    predicted, traced = account(run_of(model={"feed_forward.d_ff": 161})), rehearse(run_of())
    assert predicted.parameters != traced.parameters
    assert predicted.matmul_flops != traced.matmul_flops
    assert predicted.kept_nbytes != traced.kept_nbytes
    assert set(predicted.diff(traced, "path")) == {
        f"layers.*.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")
    } | {"layers.*.mlp", ""}
