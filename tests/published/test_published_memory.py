"""Predicted memory beside hundreds of published figures: the errors, what fits, and the page that tells of them."""

import csv

import pytest
from published_case import Case, read_rows
from published_memory import COUNTS, by_source, labels, median_that_counts, predictions
from published_page import far_off, page
from published_runs import case_of
from published_sources import LEFT_OUT, MEMORY, REASONS
from tables import DOCS

from trainledger.forecast.predict.device_memory import FRAMEWORKS
from trainledger.spec.rules.run import run_problems

pytestmark = pytest.mark.published


def test_the_median_error_of_dense_pretraining_is_at_most_9_percent() -> None:
    assert sum(len(each.errors) for each in by_source() if each.source.group == COUNTS) >= 75
    assert median_that_counts() <= 0.09


def test_every_source_above_20_percent_has_its_reason() -> None:
    for each in by_source():
        assert each.median <= 0.20 or each.source.reason, each.source.title


def test_every_row_far_off_and_every_miss_has_its_reason_and_no_other_has() -> None:
    predicted, _ = predictions()
    assert {each.case.name for each in far_off(predicted)} == set(REASONS["memory"])
    assert {each.case.name for each in predicted if each.case.too_large and each.fits} == set(REASONS["missed"])


def test_every_row_is_predicted_or_has_a_reason() -> None:
    rows = read_rows()
    predicted, left_out = predictions()
    names = {each.case.name for each in predicted}
    assert len(rows) == 670
    for row in rows:
        found = case_of(row)
        if isinstance(found, Case):
            assert row["id"] in names
            assert not list(run_problems(found.run)), row["id"]
        else:
            assert found != "not predicted", row["id"]
    assert (
        len(left_out) + len(predicted) == len(rows) + 2
    )  # R0051 has no figure of its own; both of its labels are predicted
    for part in LEFT_OUT["memory"]:
        assert any(part in row["source"] for row, _ in left_out), part


def test_the_sizes_of_a_run_are_those_of_its_row() -> None:
    """Where the row says how many parameters there are, some as two digits of a label."""
    from trainledger.ledger.model.parameters import parameters

    for each in predictions()[0]:
        printed = each.case.row["params"]
        if printed and each.case.source.group == COUNTS and "LoRA" not in each.case.row["model_family"]:
            assert parameters(each.case.run.model).total == pytest.approx(float(printed), rel=0.02), each.case.name


def test_layers_and_devices_of_every_run_add_up() -> None:
    for each in predictions()[0]:
        row, run = each.case.row, each.case.run
        assert run.layout.devices == int(row["n_devices"])
        if run.layout.stage_layers is not None:
            assert sum(run.layout.stage_layers) == int(row["n_layers"])


def test_runs_that_fitted_are_never_said_not_to_and_most_that_did_not_are() -> None:
    for group in (COUNTS, None):
        found = labels(group)
        assert found.said_and_so + found.missed >= 9
        assert found.precision >= 0.9
        assert found.recall >= 0.7


def test_every_assumption_says_why_and_frameworks_reserve_what_their_code_says() -> None:
    assert all(each.assumed and each.unit_why and each.title for each in MEMORY.values())
    reserved = {name for each in predictions()[0] for name, _ in each.rank.ledger.reserved}
    assert reserved == set(FRAMEWORKS)


def test_the_page_is_what_would_be_written_today() -> None:
    assert page().stale() == [], "run python tools/published/published_page.py"


def test_the_rows_are_a_table_of_facts_with_sources() -> None:
    with open(DOCS.parent / "tools/published/runs.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len({row["id"] for row in rows}) == len(rows)
    assert all(row["source"] for row in rows)
