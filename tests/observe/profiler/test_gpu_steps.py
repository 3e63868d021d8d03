"""Steps of our own engine on an H200 beside their plans: each matmul is of the account, recomputation is predicted."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from trainledger.answers.advise import advise
from trainledger.answers.plan import plan
from trainledger.forecast.predict.forecast import IDEAL, UNEXPLAINED
from trainledger.observe.profiler.beside_forecast import ProfileBeside, beside
from trainledger.observe.profiler.kinds import RECOMPUTATION
from trainledger.observe.profiler.profile import profile_of
from trainledger.observe.profiler.step_time import AFTER_SYNC, HOST

STEPS = Path(__file__).parent / "gpu_steps"
RUNS = {
    "gpt2_compiled": ("gpt2", {"recipe.global_batch": 16, "recipe.compile": True}),
    "gpt2_medium_checkpointed": (
        "gpt2-medium", {"recipe.global_batch": 8, "recipe.activation_checkpointing": "full"},
    ),
}  # fmt: skip


def of(name: str, *, advised: bool = False, more: Mapping[str, object] | None = None) -> ProfileBeside:
    model, fields = RUNS[name]
    own = {"recipe.seq_len": 1024, "recipe.steps": 1, "recipe.precision": "bf16-mixed", "cluster.device": "h200"}
    made = plan(model, own | fields | dict(more or {}))
    advice = advise(made.run, together=0) if advised else None
    return beside(profile_of(STEPS / f"{name}.json.gz"), made, advice)


@pytest.mark.parametrize("name", RUNS)
def test_every_matmul_and_attention_is_one_of_the_account(name):
    found = of(name)
    assert len(found.operations) == 10
    assert all(each.equal for each in found.operations)
    assert found.profile.flops == found.plan.ledger.matmul_flops
    assert found.profile.model_flops == found.plan.ledger.model_flops
    bars = {each.cause: each for each in found.bars}
    assert sum(each.measured_ns for each in found.bars) == found.profile.step.nanoseconds
    assert abs(bars[IDEAL].measured_ns - bars[IDEAL].predicted_ns) < 10
    assert found.mfu == pytest.approx(bars[IDEAL].measured_ns / found.profile.step.nanoseconds, rel=1e-6)
    unexplained = sum(each.measured_ns for each in found.bars if each.cause == UNEXPLAINED)
    assert unexplained < 0.005 * found.profile.step.nanoseconds


def test_recomputation_takes_what_is_predicted():
    """11.3 ms in 2,568 launches beside 10.8 ms; where nothing runs again there is none."""
    bars = {each.cause: each for each in of("gpt2_medium_checkpointed").bars}
    assert bars[RECOMPUTATION].measured_ns == pytest.approx(bars[RECOMPUTATION].predicted_ns, rel=0.1)
    assert RECOMPUTATION not in {each.cause for each in of("gpt2_compiled").bars}


def test_the_shapes_that_lose_most_are_those_of_the_vocabulary():
    """50,257 columns are no multiple of 8, and fall back to kernels that reach a tenth of the peak."""
    found = of("gpt2_compiled")
    worst = [each.detail for each in found.waterfall if each.cause == "kernel efficiency"][:3]
    assert all("50257" in each for each in worst)
    cause = found.profile.causes[0]
    assert "50,257 is no multiple of 8" in cause.sentence
    assert cause.code.startswith("size = 64 * -(-50257 // 64)  # 50304")


def test_filling_the_vocabulary_up_is_advised_with_its_gain():
    found = of("gpt2_compiled", advised=True)
    remedy = found.remedies[0]
    assert (remedy.cause, remedy.change.sets) == ("matmuls below the peak", ("model.vocab_multiple=64",))
    filled = of("gpt2_compiled", more={"model.vocab_multiple": 64}).plan.forecast.step_seconds
    assert remedy.gain == pytest.approx(1 - filled / found.plan.forecast.step_seconds)
    assert "CHANGES what is trained" in str(found)


def test_a_wait_in_each_step_costs_what_the_same_steps_without_it_gain():
    """Not only the gap behind it: until the host is ahead again, the device waits for each launch."""
    waits, ahead = (profile_of(STEPS / f"{name}.json.gz") for name in ("gpt2_waits", "gpt2_runs_ahead"))
    lost = sum(each.parts_ns[AFTER_SYNC] for each in waits.steps)
    longer = sum(each.nanoseconds for each in waits.steps) - sum(each.nanoseconds for each in ahead.steps)
    assert lost == pytest.approx(longer, rel=0.1)
    assert all(each.parts_ns[AFTER_SYNC] == 0 for each in ahead.steps)
    late = [sum(each.parts_ns[HOST] for each in profile.steps) for profile in (waits, ahead)]
    assert late[0] == pytest.approx(late[1], rel=0.2)
    (said,) = (each for each in waits.causes if each.name == AFTER_SYNC)
    assert "waited for the device 2 times, most of them in aten::_local_scalar_dense" in said.sentence


def test_a_compiled_step_is_not_advised_to_be_compiled():
    found = profile_of(STEPS / "gpt2_waits.json.gz")
    assert not any(
        "torch.compile makes fewer" in each.sentence or "model.compile()" in each.code for each in found.causes
    )
    (late,) = (each for each in found.causes if each.name == HOST)
    assert late.code == 'torch.compile(model, mode="reduce-overhead")'
    eager = profile_of(STEPS / "gpt2_medium_checkpointed.json.gz")
    assert any("model.compile()" in each.code for each in eager.causes)
