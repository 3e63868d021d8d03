import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe, learning_rate, sampled_steps
from trainledger.spec.schedule import SCHEDULES


def rates(**fields: object) -> list[float]:
    recipe = from_fields(Recipe, {"seq_len": 8, "global_batch": 1, "learning_rate": 1.0, **fields})  # type: ignore[arg-type]
    return [learning_rate(recipe, step) for step in range(recipe.total_steps)]


def test_warm_up_is_linear_and_reaches_the_peak_at_its_last_step() -> None:
    assert rates(steps=8, schedule="constant", **{"schedule.warmup_steps": 4}) == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]


def test_cosine_is_halfway_down_in_the_middle() -> None:
    found = rates(steps=9, schedule="cosine", **{"schedule.final_ratio": 0.2})
    assert found[0] == 1
    assert found[4] == pytest.approx(0.6)
    assert found[8] == pytest.approx(0.2)
    # A quarter of the way a half cosine has fallen by (1 - cos 45 degrees) / 2 of its height.
    assert found[2] == pytest.approx(1 - 0.8 * (1 - 2**-0.5) / 2)


def test_linear_falls_by_equal_amounts() -> None:
    assert rates(steps=5, schedule="linear", **{"schedule.final_ratio": 0.0}) == pytest.approx([1, 0.75, 0.5, 0.25, 0])


def test_wsd_stays_and_then_falls_over_the_last_share() -> None:
    found = rates(steps=10, schedule="wsd", **{"schedule.decay_fraction": 0.4, "schedule.final_ratio": 0.2})
    assert found == pytest.approx([1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


@given(
    steps=st.integers(1, 400),
    warmup=st.integers(0, 400),
    schedule=st.sampled_from([*SCHEDULES]),
    final=st.floats(0, 1),
    decay=st.floats(0.001, 1),
)
def test_every_schedule_rises_then_falls_and_ends_where_it_says(steps, warmup, schedule, final, decay):
    warmup = min(warmup, steps)
    fields = {"final_ratio": final, "decay_fraction": decay}
    own = {f"schedule.{name}": value for name, value in fields.items() if hasattr(SCHEDULES[schedule](), name)}
    found = rates(steps=steps, schedule=schedule, **{"schedule.warmup_steps": warmup, **own})
    top = max(warmup - 1, 0)
    assert found[top] == 1
    assert found[: top + 1] == sorted(found[: top + 1])
    assert found[top:] == sorted(found[top:], reverse=True)
    assert all(final * (1 - 1e-12) <= rate <= 1 for rate in found[top:])
    if schedule in ("cosine", "linear") and steps > top + 1:
        assert found[-1] == pytest.approx(final)


def test_the_rate_depends_on_the_step_alone() -> None:
    recipe = Recipe(seq_len=8, global_batch=1, steps=30)
    assert [learning_rate(recipe, 3) for _ in range(3)] == [learning_rate(recipe, 3)] * 3


@given(steps=st.integers(1, 10**7), warmup=st.integers(0, 5000), schedule=st.sampled_from([*SCHEDULES]))
def test_sampled_steps_have_the_first_the_last_and_the_peak(steps: int, warmup: int, schedule: str) -> None:
    fields = {"seq_len": 8, "global_batch": 1, "steps": steps, "schedule": schedule, "schedule.warmup_steps": warmup}
    recipe = from_fields(Recipe, {**fields, "learning_rate": 1.0})
    found = sampled_steps(recipe, 100)
    assert found == sorted(set(found))
    assert (found[0], found[-1]) == (0, steps - 1)
    assert len(found) <= 103
    assert max(learning_rate(recipe, step) for step in found) == max(
        learning_rate(recipe, step) for step in (0, min(max(warmup - 1, 0), steps - 1))
    )
