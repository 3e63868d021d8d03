"""Two directories of ranks compared: medians over ranks, and stragglers that are gone, new or still there."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_ranks import LATE_US, written

from trainledger.cli import main
from trainledger.observe.profiler.against import RanksAgainst, ranks_against
from trainledger.observe.profiler.ranks import WAITS, Ranks, ranks_of
from trainledger.observe.profiler.step_time import EXPOSED


def program(folder, late: int | None, *, ranks: int = 3, early_us: float = LATE_US) -> Ranks:
    """Ranks of one program, which all wait for one of them."""
    folder.mkdir()
    for rank in range(ranks):
        written(folder, rank, ranks=ranks, early_us=0.0 if late in (None, rank) else early_us)
    return ranks_of(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def held_up(folder) -> Ranks:
    return program(folder / "held_up", late=1)


@pytest.fixture(scope="module")
def even(folder) -> Ranks:
    return program(folder / "even", late=None)


def said_of(found: RanksAgainst) -> str:
    return str(found).replace("\n", " ")


@pytest.mark.long
def test_a_straggler_that_is_gone_is_named_with_what_it_cost(held_up, even):
    found = ranks_against(even, held_up)
    # In each step two all-reduces wait 400 us for rank 1.
    assert "Rank 1 held the others up before (each waited 800 us of a step" in said_of(found)
    assert held_up.costs_of_a_step_ns(held_up.stragglers[0]) == 2 * LATE_US * 1000
    (waits,) = (each for each in found.changes.parts if each.name == WAITS)
    assert waits.after_ns == 0
    assert waits.before_ns == sum(held_up.ranks[0].waited_in_median_ns.values()) > 0
    (exposed,) = (each for each in found.changes.parts if each.name == EXPOSED)
    for some, time in ((held_up, exposed.before_ns), (even, exposed.after_ns)):
        every = sorted(
            each.profile.step.parts_ns[EXPOSED] - sum(each.waited_in_median_ns.values()) for each in some.ranks
        )
        assert time == every[1]


@pytest.mark.long
def test_a_straggler_that_is_new_and_one_that_is_still_there(tmp_path, held_up, even):
    assert "Rank 1 now holds the others up: each waits 800 us of a step" in said_of(ranks_against(held_up, even))
    worse = program(tmp_path / "worse", late=1, early_us=2 * LATE_US)
    said = said_of(ranks_against(worse, held_up))
    assert "Rank 1 still holds the others up: each waits 800 us of a step" in said
    assert "and 1.6 ms of a step" in said


def test_ranks_are_like_themselves(held_up):
    same = ranks_against(held_up, held_up)
    assert same.difference_ns == 0
    assert all(
        not each.difference_ns
        for each in (*same.changes.parts, *same.changes.kernels, *same.changes.matmuls, *same.changes.collectives)
    )
    assert "as long as before" in str(same)
    assert same.notes == ()


def test_only_ranks_that_both_have_stand_side_by_side(even):
    fewer = replace(even, ranks=even.ranks[:2])
    found = ranks_against(fewer, even)
    data = json.loads(json.dumps(found.document().data()))
    assert [each["rank"] for each in data["ranks"]] == [0, 1]
    assert any("not of the same ranks (3 and 2)" in each for each in found.notes)
    assert "No rank holds the others up" in said_of(found)


def test_a_directory_is_compared_with_a_directory_only(folder, even, capsys):
    ranks = folder / "even"
    one = ranks / "rank0.json"
    for trace, other, rule in ((ranks, one, "a directory of ranks"), (one, ranks, "one trace")):
        assert main(["reconcile", "--trace", str(trace), "--against", str(other)]) == 2
        assert f"must be {rule}" in capsys.readouterr().err


def test_the_command_writes_json_and_a_page(folder, held_up, even, tmp_path, capsys):
    command = ["reconcile", "--trace", str(folder / "even"), "--against", str(folder / "held_up")]
    assert main([*command, "--json", "--html", str(tmp_path / "out.html")]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["stragglers"] == {"before": [1], "after": []}
    assert sum(len(data[each]["ranks"]) for each in ("before", "after")) == 6
    page = (tmp_path / "out.html").read_text()
    assert page.count("<figure>") == 2
    assert "rank 1, before" in page
