"""Steps that nothing was fitted on: what was copied of them, what is predicted of them, and the page of it."""

import csv
from collections import Counter

import pytest
from published_case import read_rows
from throughput_case import gpt_flops
from throughput_predictions import MEDIAN, SHARE, WITHIN, predicted_cases
from throughput_times import predicted
from unseen_page import errors_of, page
from unseen_runs import HERE, unseen, unseen_cases, unseen_rows

from trainledger.spec.rules.run import run_problems
from trainledger.spec.units import TERA

pytestmark = pytest.mark.published

UNSEEN = {each.case.name: each for each in unseen()}
SAMPLE = list(UNSEEN)[::12]  # what is predicted again by default


def test_printed_rates_say_the_same_as_printed_seconds() -> None:
    """Both are printed on BigScience's page: until 02-20 by 96 l h^2 for each token, then by Narayanan's formula."""
    with open(HERE / "unseen_bigscience.csv", newline="", encoding="utf-8") as file:
        printed = list(csv.DictReader(file))
    cases = [each for each in unseen_cases() if each.name.startswith("B")]
    assert len(cases) == len(printed) == 66
    for row, case in zip(printed, cases, strict=True):
        model, recipe = case.run.model, case.run.recipe
        flops = gpt_flops(case.run, recomputed=True)
        if row["date"] == "02-20":
            flops = 96 * model.n_layers * model.d_model**2 * recipe.seq_len * recipe.global_batch
        rate = flops / case.seconds / case.run.layout.devices
        assert rate == pytest.approx(float(row["tflops"]) * TERA, rel=0.0015), row


def test_no_step_is_one_that_constants_were_fitted_on() -> None:
    """A configuration may be in both, measured twice; its time is then another one."""
    columns = (
        "n_layers", "d_model", "n_heads", "n_devices", "tp", "pp", "micro_batch_per_device", "global_batch_seqs",
        "measured_step_time_s",
    )  # fmt: skip

    def key(row: dict[str, str]) -> tuple[float, ...]:
        return tuple(round(float(row[name] or 0), 2) for name in columns)

    megatron = [row for row in unseen_rows() if row["id"][0] in "BV"]
    assert not {key(row) for row in megatron} & {key(row) for row in read_rows()}
    assert not {each.name for each in unseen_cases()} & {each.case.name for each in predicted_cases()[0]}
    assert max(Counter(each.name for each in unseen_cases()).values()) == 1


def test_every_step_is_predicted() -> None:
    rows = [row["id"] for row in unseen_rows()]
    assert set(rows) <= {each.name for each in unseen_cases()}
    for each in unseen_cases():
        assert not list(run_problems(each.run)), each.name


def test_the_goals_are_met_where_nothing_was_fitted() -> None:
    found = errors_of(unseen())
    assert found.median <= MEDIAN
    assert found.within(WITHIN) >= SHARE


def test_predictions_that_are_stored_are_those_of_today() -> None:
    for name in SAMPLE:
        _compare(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in UNSEEN if name not in SAMPLE])
def test_all_predictions_that_are_stored_are_those_of_today(name: str) -> None:
    _compare(name)


def _compare(name: str) -> None:
    assert predicted(UNSEEN[name].case).seconds == pytest.approx(UNSEEN[name].seconds, rel=2e-5), name


def test_the_page_is_what_would_be_written_today() -> None:
    assert page().stale() == [], "run python tools/published/unseen_page.py"
