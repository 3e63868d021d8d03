"""The error model: coverage on sources left out, the method on drawn errors, and that file and page are current."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from statistics import median

import pytest
from accuracy_page import page
from error_model import PATH, fitting, measured_memory, memory_intervals, pair_intervals, step_intervals, text
from error_rows import MEMORY, memory_text, predicted_memory, step_rows
from error_statistics import Interval, conformal, coverage, quantile, sources_left_out, student
from left_out import bound_of, read_left_out
from tables import DOCS
from throughput_predictions import percent
from throughput_times import cases

from trainledger.spec.device import SHARE

pytestmark = pytest.mark.sweep


@dataclass(frozen=True)
class Drawn:
    """A row of a source that was drawn."""

    name: str
    source: str
    error: float


def drawn(seed: int, sources: int, between: float, inside: float, *, most: int = 60) -> list[Drawn]:
    """Rows of sources with very different numbers of them."""
    dice = random.Random(seed)
    rows = []
    for at in range(sources):
        middle = 0.1 + dice.gauss(0, between)
        rows += [Drawn(f"{at} {row}", str(at), middle + dice.gauss(0, inside)) for row in range(dice.randint(1, most))]
    return rows


@pytest.mark.parametrize(("between", "inside"), [(0.1, 0.1), (0.2, 0.05), (0.02, 0.1)])
def test_intervals_hold_the_share_that_they_say_on_drawn_errors(between: float, inside: float) -> None:
    """Of many worlds, so that the mean says what the method gives and not what one draw did."""
    for method, sources in ((conformal, 24), (lambda rows: student(rows)[""].bounds, 7)):
        found: list[Interval] = []
        shares = []
        for seed in range(12):
            found = sources_left_out(drawn(seed, sources, between, inside), _same(method))
            shares.append(coverage(found).of_sources)
        assert SHARE - 0.06 < sum(shares) / len(shares) < SHARE + 0.09, method


def _same(method: object):
    def of(rows: Sequence[Drawn]):
        bounds = method(rows)  # type: ignore[operator]
        return lambda row: bounds

    return of


def test_few_sources_say_nothing_of_tails() -> None:
    """Of eight sources the next may lie beyond all, in one of nine cases: more than a tail of 10 %."""
    low, high = conformal(drawn(1, 8, 0.1, 0.1))
    assert (low, high) == (float("-inf"), float("inf"))
    assert quantile([(1.0, 0.5), (2.0, 0.5)], 0.5) == 1.0


def test_a_source_with_many_rows_weighs_as_one_with_few() -> None:
    rows = drawn(3, 20, 0.1, 0.1)
    more = [*rows, *(Drawn(f"{each.name} again", each.source, each.error) for each in rows if each.source < "5")]
    assert conformal(more) == conformal(rows)


def test_of_80_percent_intervals_75_to_85_hold_the_truth() -> None:
    """Of the rows of runs.csv, each with its source left out; of sources alike; of peaks."""
    steps = [each for each in step_intervals() if each.row.name.startswith("R")]
    assert len(steps) >= 420
    for shown, most in ((steps, 0.85), (memory_intervals(), 0.90)):  # six sources of memory: each is a sixth
        found = coverage(shown)
        assert 0.75 <= found.of_rows <= 0.85
        assert 0.75 <= found.of_sources <= most
    for basis in ("own", "other", "bound"):
        assert 0.75 <= coverage(step_intervals(basis)).of_sources <= 0.90, basis


@pytest.mark.published
def test_of_80_percent_intervals_of_ratios_75_to_85_hold_the_truth() -> None:
    found = coverage(pair_intervals())
    assert 0.75 <= found.of_rows <= 0.85
    assert 0.75 <= found.of_sources <= 0.85


def test_chances_of_fitting_are_those_with_which_published_runs_fit() -> None:
    some = fitting()
    sure = [each for each in some if each.chance > 0.95]
    unsure = [each for each in some if each.chance < 0.5]
    assert len(sure) > 90
    assert sum(each.fitted for each in sure) / len(sure) >= 0.95
    assert sum(each.fitted for each in unsure) / len(unsure) <= 0.6
    brier = sum((each.chance - each.fitted) ** 2 for each in some) / len(some)
    always = sum(each.fitted for each in some) / len(some)
    assert brier < always * (1 - always)  # better than the share of all runs that fit


def test_no_step_is_predicted_by_what_its_own_source_has_taught() -> None:
    stored = {row.name: row for row in step_rows()}
    unseen = {name: each.left_out for name, each in read_left_out().items() if each.left_out is not None}
    assert len(unseen) == 375
    assert all(stored[name].seconds == seconds for name, seconds in unseen.items())
    assert {each.name for each in cases()} | set(unseen) == set(stored)


def test_the_file_of_the_catalog_is_what_would_be_written_today() -> None:
    assert PATH.read_text(encoding="utf-8") == text(), "run python tools/published/error_model.py"


def test_the_readme_says_these_figures() -> None:
    said = " ".join((DOCS.parent / "README.md").read_text(encoding="utf-8").split())
    steps, memory = step_intervals(), memory_intervals()
    inside = coverage([each for each in steps if each.row.name.startswith("R")]).of_rows
    for figure in (
        f"The median error of {len(steps)} published steps is {percent(_off(steps))}",
        f"that of {len(memory)} published memory peaks is {percent(_off(memory))}",
        f"contain {inside:.0%} of the steps of the main table and {coverage(memory).of_rows:.0%} of the peaks",
    ):  # fmt: skip
        assert figure.replace("%", " %").replace("  %", " %") in said, figure


def _off(some: Sequence[Interval]) -> float:
    """The median of predicted over measured, less one, without its sign."""
    return median(abs(exp(-each.row.error) - 1) for each in some)


@pytest.mark.published
def test_the_page_is_what_would_be_written_today() -> None:
    assert page().stale() == [], "run python tools/published/accuracy_page.py"


@pytest.mark.published
def test_the_stored_memory_is_what_is_predicted_today() -> None:
    assert MEMORY.read_text(encoding="utf-8") == memory_text(predicted_memory()), "run tools/published/error_rows.py"
    assert len(measured_memory()) >= 150


@pytest.mark.published
def test_steps_by_the_data_sheet_are_what_is_predicted_today() -> None:
    stored = read_left_out()
    for each in cases()[::40]:
        assert bound_of(each) == pytest.approx(stored[each.name].bound, rel=1e-4), each.name
