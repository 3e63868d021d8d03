import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger.catalog import published
from trainledger.forecast.predict.run import daly, expected_seconds, run_mtbf, young


def simulated(work, interval, *, write, restart, mtbf, draw):
    """One run by the clock: failures as they come, in work, saving and restarting alike."""
    clock, done = 0.0, 0.0
    failure = draw.expovariate(1 / mtbf)
    while done < work:
        span = min(interval, work - done) + write
        if failure >= clock + span:
            clock, done = clock + span, done + span - write
            continue
        clock = failure
        failure = clock + draw.expovariate(1 / mtbf)
        while failure < clock + restart:  # a restart that fails begins again
            clock = failure
            failure = clock + draw.expovariate(1 / mtbf)
        clock += restart
    return clock


@pytest.mark.parametrize(
    ("interval", "write", "restart", "mtbf"),
    [(600.0, 30.0, 300.0, 10_000.0), (3000.0, 60.0, 900.0, 8_000.0), (900.0, 0.0, 0.0, 5_000.0)],
)
def test_the_mean_time_is_that_of_simulated_runs(interval, write, restart, mtbf):
    work, runs = 100_000.0, 400
    draw = random.Random(7)
    times = [simulated(work, interval, write=write, restart=restart, mtbf=mtbf, draw=draw) for _ in range(runs)]
    mean = sum(times) / runs
    error = math.sqrt(sum((each - mean) ** 2 for each in times) / (runs - 1) / runs)
    answer = expected_seconds(work, interval, write=write, restart=restart, mtbf=mtbf)
    assert abs(answer - mean) < 4 * error
    assert 4 * error < 0.03 * answer  # else the simulation would say little


@given(write=st.floats(0.1, 600.0), mtbf=st.floats(3600.0, 1e7), restart=st.floats(0.0, 2000.0))
def test_no_interval_is_better_than_dalys_by_more_than_a_hundredth(write, mtbf, restart):
    work, best = 1e7, daly(write, mtbf)

    def of(interval):
        # Intervals that divide the work, so that a short last one does not favour any.
        return expected_seconds(
            work, work / max(1, round(work / interval)), write=write, restart=restart, mtbf=mtbf
        )  # fmt: skip

    answer = of(best)
    assert all(answer <= 1.01 * of(best * factor) for factor in (0.2, 0.5, 0.8, 1.25, 2.0, 5.0))


def test_dalys_interval_is_youngs_where_saving_is_quick():
    assert daly(1e-3, 1e6) == pytest.approx(young(1e-3, 1e6), rel=1e-3)
    assert daly(3000.0, 1000.0) == 1000.0  # where a write takes longer than two failures: once a failure


@given(
    interval=st.floats(60.0, 5000.0), write=st.floats(0.0, 100.0), restart=st.floats(0.0, 1000.0),
    mtbf=st.floats(5e3, 1e7),
)  # fmt: skip
def test_failures_only_cost(interval, write, restart, mtbf):
    work = 1e5
    saves = math.ceil(work / interval - 1e-9)
    answer = expected_seconds(work, interval, write=write, restart=restart, mtbf=mtbf)
    assert answer >= (work + saves * write) * (1 - 1e-9)
    assert answer <= expected_seconds(work, interval, write=write, restart=restart, mtbf=mtbf / 2)
    assert answer <= expected_seconds(work, interval, write=write, restart=restart + 1, mtbf=mtbf)


def test_a_run_that_never_ends_is_infinite():
    assert expected_seconds(1e9, 1e9, write=0.0, restart=0.0, mtbf=1.0) == math.inf


def test_llama_3_published_more_than_nine_tenths():
    """54 days on 16,384 H100, 419 unexpected interruptions and more than 90 % effective time (section 3.3.4)."""
    (rate,) = [each for each in published("h100-sxm") if each.name == "mtbf_device_hours"]
    assert rate.value == pytest.approx(16384 * 54 * 24 / 419, rel=1e-4)
    mtbf = run_mtbf(rate.value * 3600, 16384)
    assert 54 * 86400 / mtbf == pytest.approx(419, rel=1e-4)
    (restart,) = [each.value for each in published("h100-sxm") if each.name == "restart_seconds"]
    # 405B: parameters and an optimizer's state of 12 bytes at the 2 TB/s that the storage sustained.
    write = 405e9 * 14 / 2e12
    total = 54 * 86400
    interval = daly(write, mtbf)
    useful = total / (expected_seconds(1e7, interval, write=write, restart=restart + write, mtbf=mtbf) / 1e7)
    assert 0.90 < useful / total < 0.95
