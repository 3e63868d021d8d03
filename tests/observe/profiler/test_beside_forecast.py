"""Steps of our own model under torch.profiler beside the plan of their run: operation by operation, bar by bar."""

import json

import pytest
from profiler_runs import SPEC, recorded, run_of

from trainledger import catalog
from trainledger.forecast.plan.advise import advise
from trainledger.forecast.plan.plan import make_plan
from trainledger.forecast.predict.forecast import IDEAL
from trainledger.ledger.ranks import account_run
from trainledger.observe.profiler.beside_forecast import beside, stage_of_rank
from trainledger.observe.profiler.profile import profile_of
from trainledger.spec.calibration import Calibration, KernelTime
from trainledger.spec.parts import with_fields
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run

MACHINE = Calibration(
    title="a machine", backend="cpu", date="2026-01-02", torch_version="2.13.0", threads=1, operation_seconds=1e-5,
    kernels=(
        KernelTime(kind="matmul", dtype="fp32", shape=(64, 64, 64), flops=2 * 64**3, nbytes=49152, seconds=1e-5),
        KernelTime(kind="attention", dtype="fp32", shape=(1, 8, 8), flops=10**6, nbytes=10**4, seconds=1e-5),
        KernelTime(
            kind="attention", dtype="fp32", shape=(1, 8, 8), flops=10**6, nbytes=10**4, seconds=2e-5, phase="backward"
        ),
        KernelTime(kind="copy", dtype="fp32", shape=(1000,), flops=0, nbytes=8000, seconds=1e-6),
    ),
)  # fmt: skip


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.long
def test_every_matmul_and_attention_is_one_of_the_account(tmp_path, checkpointing):
    run = run_of(activation_checkpointing=checkpointing)
    found = beside(profile_of(recorded(tmp_path, run)), make_plan(account_run(run, backend="cpu"), MACHINE))
    assert [each for each in found.operations if not each.equal] == []
    assert len(found.operations) >= 10
    measured = found.profile.step.nanoseconds
    assert sum(each.measured_ns for each in found.bars) == sum(each.nanoseconds for each in found.waterfall) == measured
    predicted = found.plan.forecast.step_seconds
    assert sum(each.predicted_ns for each in found.bars) == pytest.approx(predicted * 1e9, abs=1)
    assert (checkpointing == "none") == ("recomputation" not in {each.cause for each in found.bars})
    # The first bar is the same on both sides, but for rounding: the account's model FLOPs at the machine's peak.
    (ideal,) = (each for each in found.bars if each.cause == IDEAL)
    assert abs(ideal.measured_ns - ideal.predicted_ns) <= len(found.profile.matmuls)
    assert found.mfu == pytest.approx(ideal.measured_ns / measured, rel=1e-3)


def test_a_run_that_the_traced_step_cannot_have_computed_is_refused(tmp_path):
    run = run_of()
    larger = Run(model=with_fields(SPEC, {"feed_forward.d_ff": 1 << 22}), recipe=run.recipe)
    with pytest.raises(InvalidInput, match="it is probably of another model, batch or sequence length"):
        beside(profile_of(recorded(tmp_path, run)), make_plan(account_run(larger, backend="cpu"), MACHINE))


def test_what_does_not_match_is_listed(tmp_path):
    run = run_of()
    wider = Run(model=with_fields(SPEC, {"feed_forward.d_ff": 88}), recipe=run.recipe)
    found = beside(profile_of(recorded(tmp_path, run)), make_plan(account_run(wider, backend="cpu"), None))
    rows = {each.shape: each.difference for each in found.operations if not each.equal}
    assert {name for name, said in rows.items() if "80" in name and said == "not in the account"} == {
        name for name in rows if "80" in name
    }
    assert {name for name, said in rows.items() if "88" in name and said == "not in the trace"} == {
        name for name in rows if "88" in name
    }
    assert len(rows) == 6
    assert all("80" in name or "88" in name for name in rows)
    assert found.mfu is None
    assert any(each.startswith("No predicted step time") for each in found.notes)
    assert all(each.predicted_ns is None for each in found.bars)


def test_a_trace_of_a_cpu_is_not_compared_with_the_times_of_an_accelerator(tmp_path):
    run = run_of()
    other = Run(model=with_fields(SPEC, {"d_model": 96, "feed_forward.d_ff": 88}), recipe=run.recipe)
    found = beside(
        profile_of(recorded(tmp_path, run)),
        make_plan(account_run(other, backend="cuda"), catalog.device("a100-sxm-40gb")),
    )
    assert found.mfu is None
    assert "No matmul of the trace is one of the account" in "".join(found.notes)
    assert any(each.startswith("The trace has no work of an accelerator") for each in found.notes)
    assert "by the account's model FLOPs" not in str(found)


def test_a_cause_has_a_change_with_the_gain_that_is_predicted_for_it(tmp_path):
    run = run_of(activation_checkpointing="full")
    plan = make_plan(account_run(run, backend="cpu"), MACHINE)
    found = beside(profile_of(recorded(tmp_path, run)), plan, advise(run, MACHINE, backend="cpu", together=0))
    (remedy,) = (each for each in found.remedies if each.cause == "recomputation")
    assert remedy.change.sets == ("recipe.activation_checkpointing=none",)
    kept = make_plan(account_run(remedy.change.run, backend="cpu"), MACHINE).forecast.step_seconds
    assert remedy.gain == pytest.approx(1 - kept / plan.forecast.step_seconds)
    assert "--set recipe.activation_checkpointing=none" in str(found)
    data = json.loads(json.dumps(found.document().data()))
    assert sum(each["nanoseconds"] for each in data["waterfall"]) == found.profile.step.nanoseconds
    assert len(data["operations"]) == len(found.operations)


def test_stages_are_outermost():
    run = run_of()
    spread = Run(model=run.model, recipe=run.recipe, layout=with_fields(run.layout, {"pipeline": 3, "replicate": 2}))
    assert [stage_of_rank(spread, rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
