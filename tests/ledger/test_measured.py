import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.measured import Measured, Spread, measured_run, spread
from trainledger.spec.plain import read_json, write_json


def step(number, seconds, **phases):
    return {"step": number, "loss": 2.0, "tokens": 100 * number, "seconds": seconds, "time": float(number),
            "phase_seconds": phases or {"forward": seconds / 4, "backward": seconds / 2}}  # fmt: skip


def run_of(*seconds, start=1):
    return [{"event": "start", "step": 0}, *(step(start + at, each) for at, each in enumerate(seconds))]


@given(st.lists(st.floats(1e-6, 1e6), min_size=2))
def test_the_spread_is_that_of_the_standard_library(samples):
    seen = spread(samples)
    expected = statistics.quantiles(samples, n=4, method="inclusive")
    assert [seen.low, seen.median, seen.high] == pytest.approx(expected)
    assert seen.count == len(samples)


@given(st.lists(st.floats(1e-6, 1e6), max_size=20))
def test_any_number_of_steps_gives_a_measurement(seconds):
    seen = measured_run(run_of(*seconds))
    assert (seen.step_seconds is None) == (len(seconds) <= 2)
    assert bool(seen.step_seconds_by_phase) == (len(seconds) > 2)


def test_no_sample_has_no_middle():
    assert spread([]) is None


def test_the_first_steps_of_each_session_are_warm_up_and_the_step_time_is_of_the_last():
    lines = [*run_of(9.0, 9.0, 33.0, 33.0), {"event": "resume", "step": 4}, step(5, 9.0), step(6, 9.0)]
    assert measured_run(lines).step_seconds == Spread(median=33.0, low=33.0, high=33.0, count=2)
    seen = measured_run([*lines, step(7, 1.0), step(8, 1.0)])
    assert seen.step_seconds == Spread(median=1.0, low=1.0, high=1.0, count=2)
    assert sum(seen.seconds_by_phase.values()) == pytest.approx(0.75 * (4 * 9 + 2 * 33 + 2))


def test_metered_and_disturbed_steps_are_left_out():
    lines = run_of(9.0, 9.0, *[1.0] * 6, 50.0, 7.0)
    seen = measured_run(lines, metered={9}, disturbed={10})
    assert seen.step_seconds == Spread(median=1.0, low=1.0, high=1.0, count=6, discarded=1)
    assert seen.notes == ()


def test_phases_of_the_steady_step_are_those_of_the_middle_half():
    """Of eight steps the two quickest and the two slowest are left out, in whatever order they came."""
    seconds = [4.0, 90.0, 3.0, 1.0, 6.0, 80.0, 2.0, 5.0]
    lines = [{"event": "start", "step": 0}, step(1, 9.0), step(2, 9.0)]
    for number, each in enumerate(seconds, 3):
        lines.append(step(number, each, **({"forward": each} if each < 6 else {"backward": each})))
    seen = measured_run(lines)
    assert seen.step_seconds_by_phase == {"forward": (3.0 + 4.0 + 5.0) / 4, "backward": 6.0 / 4}


def test_a_run_that_was_never_alone_says_so():
    lines = run_of(9.0, 9.0, *[1.0] * 6)
    seen = measured_run(lines, disturbed=set(range(1, 7)))
    assert seen.step_seconds.count == 6
    assert "4 of 6 steps were disturbed" in seen.notes[0]


def test_phases_of_a_step_and_of_the_run():
    lines = run_of(9.0, 9.0, 1.0, 2.0, 3.0)
    lines += [{"step": 5, "validation_loss": 1.0, "phase_seconds": {"evaluation": 0.5}},
              {"event": "checkpoint", "step": 5, "phase_seconds": {"checkpoint": 0.25}},
              {"event": "finish", "step": 5, "seconds": 24.75}]  # fmt: skip
    seen = measured_run(lines)
    assert seen.step_seconds_by_phase == {"forward": 0.5, "backward": 1.0}
    # Steady steps take 0.5 and 1 seconds forward and backward; the first two took 2.25 and 4.5, of all 6 and 12.
    of_steps = {"forward": 6.0 - 3.5, "backward": 12.0 - 7.0, "warm-up": 10.5}
    assert seen.seconds_by_phase == {**of_steps, "evaluation": 0.5, "checkpoint": 0.25}
    assert seen.total_seconds == 24.75
    assert seen.tokens_per_step == 100
    assert seen.tokens_per_second == 50.0


def test_metering_is_a_part_of_its_own():
    seen = measured_run(run_of(1.0, 1.0, 1.0, 7.0, 1.0, 1.0), metered={4})
    assert seen.seconds_by_phase == {"forward": 0.25 * 6, "backward": 0.5 * 6, "metering": 0.75 * 6}


def test_steps_that_were_not_clocked_count_as_split_like_those_that_were():
    lines = run_of(9.0, 3.0, *[4.0] * 6)
    for line in (*lines[1:6], lines[7]):
        del line["phase_seconds"]
    seen = measured_run(lines)
    whole = 9.0 + 3.0 + 4 * 4.0 + 2 * 3.0  # what is clocked of a step of four seconds is three
    assert sum(seen.seconds_by_phase.values()) == pytest.approx(whole)
    assert seen.seconds_by_phase["warm-up"] == pytest.approx(9.0 - 3.0)
    assert seen.seconds_by_phase["backward"] == pytest.approx(2 * seen.seconds_by_phase["forward"])


def test_first_steps_that_were_no_slower_have_no_warm_up():
    assert "warm-up" not in measured_run(run_of(0.5, 1.0, 1.0, 2.0, 3.0)).seconds_by_phase


@given(st.lists(st.floats(1e-3, 1e3), max_size=12))
def test_phases_sum_to_the_time_of_their_steps(seconds):
    seen = measured_run(run_of(*seconds))
    assert sum(seen.seconds_by_phase.values()) == pytest.approx(0.75 * sum(seconds))
    assert all(each >= -1e-9 * sum(seconds) for each in seen.seconds_by_phase.values())


def test_a_ledger_gives_its_figures_and_the_file_keeps_them(tmp_path):
    entries = (
        Entry("mm", "", "forward", "matmul", flops=8, model_flops=8, kept=4, allocated=(("activations", 4),)),
        Entry("norm", "", "forward", "norm", flops=3, kept=2, allocated=(("activations", 2),)),
    )
    seen = measured_run(run_of(1.0), Ledger(entries, resident=(("parameters", 10),), parameters=5, tokens=7))
    assert (seen.parameters, seen.tokens_per_step, seen.kept_nbytes, seen.peak_nbytes) == (5, 7, 6, 16)
    assert seen.kept_by_kind == {"matmul": 4, "norm": 2}
    assert seen.flops == {"matmul": 8, "norm": 3}
    write_json(seen, tmp_path / "measured.json")
    assert read_json(Measured, tmp_path / "measured.json") == seen


@pytest.mark.parametrize("lines", [[], [{"event": "start", "step": 0}], [{"event": "finish", "step": 0}]])
def test_a_run_without_a_step_is_empty_not_wrong(lines):
    seen = measured_run(lines)
    assert seen.step_seconds is seen.tokens_per_second is None


def test_a_run_that_was_mostly_disturbed_says_so_and_has_the_steps_that_were_not():
    lines = run_of(9.0, 9.0, *[1.0] * 8, *[2.0] * 9)
    seen = measured_run(lines, disturbed=set(range(11, 20)))
    assert (seen.step_seconds.median, seen.step_seconds.count, seen.step_seconds.discarded) == (1.0, 8, 9)
    assert "9 of 17 steps were disturbed; the step time is that of the others" in seen.notes[0]
    assert measured_run(lines, disturbed=set(range(11, 19))).notes == ()
