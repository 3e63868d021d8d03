"""The published runs of the package: their table is in step with the rows and the pages that it is made from."""

import csv
from functools import cache

import pytest
from nearest_table import RUNS, SOURCES, predicted_memory, table, texts
from tables import DOCS
from throughput_case import TimeCase
from throughput_predictions import predicted_cases
from unseen_runs import unseen

from trainledger.forecast.plan.published import PublishedRun, nearest

pytestmark = pytest.mark.sweep

WRITE = "run python tools/published/nearest_table.py"
ALL = 10**4
EVERY = 9  # of the runs, one in so many is looked for


@cache
def stored() -> dict[str, dict[str, str]]:
    names, *rows = (line.split("\t") for line in RUNS.read_text(encoding="utf-8").splitlines())
    found = [dict(zip(names, row, strict=True)) for row in rows]
    return {each["id"]: each for each in found}


@cache
def cases() -> dict[str, TimeCase]:
    return {each.case.name: each.case for each in (*predicted_cases()[0], *unseen())}


def compare(memory: dict[str, int]) -> None:
    runs, sources = texts(table(memory))
    assert RUNS.read_text(encoding="utf-8") == runs, WRITE
    assert SOURCES.read_text(encoding="utf-8") == sources, WRITE


def test_the_table_is_what_would_be_written_today_with_the_memory_that_it_has() -> None:
    has = {name: each["predicted_peak_nbytes"] for name, each in stored().items()}
    compare({name: int(nbytes) for name, nbytes in has.items() if nbytes})


@pytest.mark.published
def test_the_predicted_memory_is_that_of_today() -> None:
    compare(predicted_memory())


def printed(name: str, column: str) -> dict[str, str]:
    """A column of a table of all rows, by the row's name."""
    with open(DOCS / "tables" / f"{name}.csv", newline="", encoding="utf-8") as file:
        return {row["row"]: row[column] for row in csv.DictReader(file)}


@pytest.mark.parametrize(
    ("name", "column", "predicted", "measured"),
    [
        ("throughput_rows", "left out: error %", "predicted_step_seconds", "step_seconds"),
        ("unseen_rows", "error %", "predicted_step_seconds", "step_seconds"),
        ("memory_rows", "error %", "predicted_peak_nbytes", "peak_nbytes"),
    ],
)
def test_errors_are_those_of_the_pages(name: str, column: str, predicted: str, measured: str) -> None:
    rows = printed(name, column)
    of = {name: each for name, each in stored().items() if each[measured] and name in rows}
    assert len(of) >= 150
    for row, each in of.items():
        assert f"{100 * (float(each[predicted]) / float(each[measured]) - 1):+.1f}" == rows[row], row


def test_every_published_run_finds_itself_at_distance_0() -> None:
    for name, case in list(cases().items())[::EVERY]:
        found = [each for each in nearest(case.run, ALL) if each.distance == 0]
        assert name in {each.published.id for each in found}, name
        assert all(each.differs == "the same in all that is compared" for each in found)


def test_two_runs_are_as_far_apart_seen_from_either() -> None:
    pairs = 0
    for name, case in list(cases().items())[::41]:
        for each in nearest(case.run, ALL)[::5]:
            other = cases().get(each.published.id)
            if other is None:  # only its memory is published
                continue
            back = next(one for one in nearest(other.run, ALL) if one.published.id == name)
            assert back.distance == pytest.approx(each.distance), (name, each.published.id)
            pairs += 1
    assert pairs > 200


def test_where_constants_are_fitted_on_a_run_it_is_predicted_by_others() -> None:
    left_out = {each.case.name: each.stored.left_out for each in predicted_cases()[0]}
    fitted = [name for name, each in stored().items() if each["fitted"] == "yes"]
    assert len(fitted) > 450
    assert all(float(stored()[name]["predicted_step_seconds"]) == left_out[name] for name in fitted)
    assert {each.name for each in cases().values()} <= set(stored())
    assert PublishedRun.__dataclass_fields__.keys() == stored()[fitted[0]].keys()
