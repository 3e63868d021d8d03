"""A processor that is slower than it can be: here one that is given a larger matmul than before, which is as slow."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainledger.observe.measure.hardware import SIZE, SLOWED, Pace, pace_of, watched
from trainledger.observe.measure.kernels import kernels
from trainledger.observe.measure.meter import QuietSteps
from trainledger.observe.measure.rounds import MOST_ROUNDS, busy_sentence, time_all
from trainledger.spec.calibration import Calibration, write_calibration

CPU = torch.device("cpu")


def slow_down(pace, times=4):
    """So many rows and columns more: 64 times the work."""
    pace._matrix = torch.ones(times * SIZE, times * SIZE)
    pace._product = torch.empty_like(pace._matrix)
    pace._at = -math.inf


def test_a_sample_at_a_slower_pace_is_disturbed():
    pace = Pace()
    pace.now()
    slow_down(pace)
    with watched(1, pace) as sample:
        pass
    assert sample.slowdown > SLOWED
    assert sample.disturbed
    assert pace.slowdown() > SLOWED


def test_a_sample_is_judged_by_the_fastest_that_is_ever_seen():
    pace = Pace()
    slow_down(pace)
    with watched(1, pace) as sample:
        pass
    before = sample.slowdown
    pace.fastest /= 2
    assert sample.slowdown == 2 * before > SLOWED


def test_without_a_pace_nothing_is_slower():
    with watched(1) as sample:
        pass
    assert sample.slowdown == 1.0


def test_it_is_read_a_few_times_a_second_at_most():
    pace = Pace()
    assert pace.now() == pace.now()


def test_no_recorder_sees_it():
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    pace = Pace()
    with Recorder():
        pace.now()
    assert seen == []


def calibration(**fields):
    made = Calibration(
        title="a machine", backend="cpu", date="2026-11-27", torch_version=torch.__version__,
        threads=torch.get_num_threads(), kernels=(), pace_seconds=1e-9,
    )  # fmt: skip
    return replace(made, **fields)


@pytest.mark.parametrize(
    ("fields", "fastest"),
    [
        ({}, 1e-9),
        ({"pace_seconds": None}, math.inf),
        ({"threads": torch.get_num_threads() + 1}, math.inf),
        ({"torch_version": "1.0"}, math.inf),
    ],
)
def test_the_pace_of_a_calibration_counts_where_it_is_comparable(monkeypatch, tmp_path, fields, fastest):
    monkeypatch.setenv("TRAINLEDGER_CALIBRATION", str(tmp_path / "machine.toml"))
    write_calibration(calibration(**fields), tmp_path / "machine.toml")
    assert pace_of(CPU).fastest == fastest


def test_a_damaged_calibration_and_a_gpu_have_none(monkeypatch, tmp_path):
    (tmp_path / "machine.toml").write_text("format = ")
    monkeypatch.setenv("TRAINLEDGER_CALIBRATION", str(tmp_path / "machine.toml"))
    assert pace_of(CPU).fastest == math.inf
    assert pace_of(torch.device("cuda")) is None


def test_steps_below_the_full_speed_are_disturbed(monkeypatch, tmp_path):
    monkeypatch.setenv("TRAINLEDGER_CALIBRATION", str(tmp_path / "machine.toml"))
    write_calibration(calibration(), tmp_path / "machine.toml")

    class State:
        device = CPU

    steps = QuietSteps()
    steps.on_start(State())
    with steps.around_step(1):
        pass
    assert steps.disturbed == {1}
    assert len(steps.slowdowns) == 1
    assert steps.slowdowns[0] > 1000


def test_kernels_are_tried_more_often_and_then_given_by_their_fastest_calls():
    chosen = kernels(CPU, ["fp32"], quick=True)[:2]
    pace = Pace(1e-9)
    with watched(1) as whole:
        timings = time_all(chosen, CPU, 1, seconds=0.02, rounds=2, tell=lambda share, name: None, pace=pace)
    assert all(0 < len(each.blocks) <= MOST_ROUNDS * 2 for each in timings)
    assert all(each.undisturbed == [] for each in timings)
    assert "or it ran below its full speed: 2 of 2 kernels have no undisturbed" in busy_sentence(timings, whole)
    assert timings[0].best()[0] == min(each.fastest for each in timings[0].blocks)
