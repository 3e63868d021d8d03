"""Predicted step times beside hundreds of published ones: the errors, the ranks, whole runs, and the page of it all.

Everything is stored by commands (`fit_devices.py`, `throughput_hours.py`); here a sample of it is predicted again, and
all of it where slow tests run.
"""

import math

import pytest
from fit_devices import CATALOG, PRIORS, read_predicted
from published_case import read_rows
from published_sources import LEFT_OUT, REASONS, TIME
from throughput_case import CALIBRATED, TimeCase, from_gpt_flops, from_palm_flops
from throughput_columns import Columns, around
from throughput_fit import BOUNDS, changed, prior_of
from throughput_hours import predicted_hours, read_hours, whole_runs
from throughput_page import families, page
from throughput_predictions import (
    COUNTS,
    HOURS,
    MEDIAN,
    RANKS,
    SHARE,
    WITHIN,
    agreement,
    counting,
    errors,
    predicted_cases,
    ranked,
    sources,
    unseen_of,
)
from throughput_runs import time_case_of
from throughput_times import predicted, ranks_agree

from trainledger import catalog
from trainledger.spec.rules.run import run_problems

pytestmark = pytest.mark.published

TOLD = {each.case.name: each for each in predicted_cases()[0]}
SAMPLE = list(TOLD)[::6]  # what is predicted again by default


def test_the_goals_are_met_in_the_sample_and_with_each_source_left_out() -> None:
    assert len(counting()) >= 350
    for left_out in (False, True):
        found = errors(counting(), left_out=left_out)
        assert found.median <= MEDIAN
        assert found.within(WITHIN) >= SHARE


def test_layouts_are_ranked_as_measured_or_there_is_a_reason() -> None:
    for source, some in ranked():
        assert agreement(some) >= RANKS or source.title in REASONS["ranks"], source.title
    assert sum(agreement(some) >= RANKS for _, some in ranked()) >= 9


def test_all_that_a_source_has_is_ranked_as_measured() -> None:
    """With the rows that nothing was fitted on, where there are any: on the devices that the goals are about."""
    found = [(source, some) for source, some in ranked() if some[0].case.calibration in COUNTS]
    assert len(found) >= 10
    for source, some in found:
        assert agreement([*some, *unseen_of(source)]) >= RANKS, source.title


def test_every_row_is_predicted_or_has_a_reason() -> None:
    stored = read_predicted()
    for row in read_rows():
        found = time_case_of(row)
        if isinstance(found, TimeCase):
            assert row["id"] in stored
            assert stored[row["id"]].measured == pytest.approx(found.seconds, rel=1e-5)
        else:
            assert found != "not predicted", row["id"]
            assert row["id"] not in stored
    for part in LEFT_OUT["time"]:
        assert any(part in row["source"] for row in read_rows()), part


def test_every_source_above_15_percent_has_its_reason() -> None:
    for source, some in sources().items():
        assert errors(some).median <= MEDIAN or source.reason, source.title
    assert all(each.assumed and each.convention for each in TIME.values())


def test_what_is_stored_is_what_is_predicted() -> None:
    for name in SAMPLE:
        _compare(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TOLD if name not in SAMPLE])
def test_all_that_is_stored_is_what_is_predicted(name: str) -> None:
    _compare(name)


def _compare(name: str) -> None:
    assert predicted(TOLD[name].case).seconds == pytest.approx(TOLD[name].stored.seconds, rel=2e-5), name


def test_runs_are_of_the_devices_of_their_rows() -> None:
    for each in predicted_cases()[0]:
        case = each.case
        assert case.run.layout.devices == int(case.row["n_devices"]), case.name
        assert not list(run_problems(case.run)), case.name


def test_whole_runs_are_within_25_percent_or_there_is_a_reason() -> None:
    stored = read_hours()
    runs = {each.row["id"]: each for each in whole_runs()}
    assert {each.row for each in stored} == set(runs)
    near = [each for each in stored if abs(each.error) <= HOURS]
    assert len(near) >= 0.7 * len(stored)
    for name in ("LLaMA", "Llama 2", "Llama 3", "Llama 3.1", "Pythia"):
        some = families()[name]
        assert sum(each.predicted for each in some) == pytest.approx(sum(each.hours for each in some), rel=HOURS), name
    for each in stored:
        whole = runs[each.row]
        assert abs(each.error) <= HOURS or whole.reason, each.row
        assert not whole.at_most or each.predicted <= each.hours, each.row
        assert sum(hours for _, hours in each.bars) == pytest.approx(each.predicted, rel=1e-4)
    untold = {row["id"] for row in read_rows() if row["measured_total_hours_or_gpu_hours"]} - set(runs)
    assert untold <= set(LEFT_OUT["hours"]) | {"R0985", "R0989"}  # the last two have no sizes


@pytest.mark.parametrize("row", ["R0222", "R0977", "R0994"])
def test_stored_hours_are_what_is_predicted(row: str) -> None:
    _compare_hours(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", [each.row for each in read_hours()])
def test_all_stored_hours_are_what_is_predicted(row: str) -> None:
    _compare_hours(row)


def _compare_hours(row: str) -> None:
    stored = next(each for each in read_hours() if each.row == row)
    found = predicted_hours(next(each for each in whole_runs() if each.row["id"] == row))
    assert found.predicted == pytest.approx(stored.predicted, rel=1e-4)
    assert dict(found.bars) == pytest.approx(dict(stored.bars), rel=1e-3, abs=1e-3 * stored.predicted)


def test_the_page_is_what_would_be_written_today() -> None:
    assert page().stale() == [], "run python tools/published/throughput_page.py"


def test_calibrations_are_within_their_bounds_and_say_what_they_rest_on() -> None:
    for devices in CALIBRATED.values():
        for device in devices:
            found = catalog.efficiency(device)
            assert found is not None
            assert not list(found.problems())
            assert "published runs" in found.source
            assert (CATALOG / f"{device}.toml").exists()
            for name, (low, high) in BOUNDS.items():
                value = getattr(found, name)
                assert value == 0 or 0.8 * low <= value <= 1.001 * high, (device, name)


def test_columns_give_what_was_timed_exactly() -> None:
    """Around the constants that they were timed with; and nearly so with others near by."""
    some = [each.case for each in predicted_cases()[0] if each.case.calibration == "v100-sxm"][:4]
    prior = prior_of(PRIORS["v100-sxm"])
    near = around(Columns(some), prior)
    assert near.seconds(prior) == pytest.approx(near.exact, rel=1e-9)
    other = changed(prior, ["matmul_share", "bandwidth_share"], [prior.matmul_share * 0.9, prior.bandwidth_share * 0.9])
    exact = [float(predicted(each, other).seconds or 0) for each in some]
    assert near.seconds(other) == pytest.approx(exact, rel=0.01)


def test_conventions_turn_rates_into_seconds() -> None:
    case = next(each.case for each in predicted_cases()[0] if each.case.name == "R0161")
    # 1T on 3,072 A100 at 163 TFLOP/s: 450B tokens in 84 days (Narayanan et al. 2021, section 5.1).
    seconds = from_gpt_flops(case.row, case.run)
    days = 450e9 / case.run.recipe.tokens_per_step * seconds / 86400
    assert days == pytest.approx(84, rel=0.02)
    assert from_gpt_flops(case.row, case.run, recomputed=False) == pytest.approx(seconds * 0.75, rel=0.01)
    assert from_palm_flops(case.row, case.run) == pytest.approx(seconds * 0.75, rel=0.02)


def test_rank_correlation_takes_ties_at_their_mean() -> None:
    assert ranks_agree([1, 2, 3, 4], [1, 2, 2, 4]) == pytest.approx(4.5 / math.sqrt(5 * 4.5))
