"""Muon on real processes that have rows of each matrix: what each gathers and holds, and the losses of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from spread_runs import go_on, told, train_all
from test_parallel_ranks import Case, check, run_for_real, tables

from trainledger.answers.load import load

pytestmark = pytest.mark.process

FIELDS: dict[str, Any] = {
    "optimizer": "muon",
    "steps": 20,
    "global_batch": 8,
    "micro_batch": 1,
    "checkpoints.every": 20,
}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {"replicas": {"replicate": 2}, "shards": {"shard": 2}, "context": {"context": 2}},
    4: {"replicas of shards": {"shard": 2, "replicate": 2}},
}
NAMES = [name for layouts in LAYOUTS.values() for name in layouts]
BOOKS: dict[str, Case] = {
    "shards": ({"shard": 2}, {}, {"optimizer": "muon"}),
    "uneven": ({"shard": 2}, {"feed_forward.d_ff": 81}, {"optimizer": "muon"}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_all(tmp_path_factory.mktemp("muon"), LAYOUTS, FIELDS)


@pytest.mark.parametrize("name", NAMES)
def test_the_losses_are_those_of_one_process(trained: Path, name: str) -> None:
    """To the last bits before the first update; then those of a gradient decide how bf16 rounds what is orthogonalized.

    Replicas, whose matrices are whole, drift as far.
    """
    alone, mine = (told(trained / each, "loss") for each in ("alone", name))
    assert mine[:2] == pytest.approx(alone[:2], rel=1e-5)
    assert mine == pytest.approx(alone, rel=1e-3)


def test_a_run_goes_on_in_other_layouts(trained: Path, tmp_path: Path) -> None:
    legs: list[dict[str, Any]] = [{"layout": {"shard": 2}, "stop_after": 8}, {}]
    for leg in legs:
        go_on(tmp_path, leg, FIELDS)
    assert told(tmp_path / "run", "loss") == pytest.approx(told(trained / "alone", "loss"), rel=1e-3)


def test_a_rank_holds_and_gathers_what_the_ledger_says(tmp_path: Path) -> None:
    for name, ranks in run_for_real(BOOKS, 2, tmp_path).items():
        check(load(tables(BOOKS[name])), ranks)
