"""Attention that stops at documents on several real processes: losses of one process, books that agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from spread_runs import compare, told, train_all, train_alone
from test_parallel_ranks import Case, check, run_for_real, tables

from trainledger.answers.load import load

pytestmark = pytest.mark.process

FIELDS: dict[str, Any] = {
    "optimizer.epsilon": 1e-5, "steps": 12, "global_batch": 8, "micro_batch": 2, "documents": "masked",
    "evaluation.every": 6,
}  # fmt: skip
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "shards": {"shard": 2},
        "replicas": {"replicate": 2},
        "zero 1": {"shard": 2, "zero": 1},
        "tensor and sequence": {"tensor": 2, "sequence_parallel": True},
    }
}
BOOKS: dict[str, Case] = {
    "shards": ({"shard": 2}, {}, {"documents": "masked"}),
    "shards, checkpointed": ({"shard": 2}, {}, {"documents": "masked", "activation_checkpointing": "full"}),
    "tensor": ({"tensor": 2}, {}, {"documents": "masked"}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every layout's run, and that of one process in ``alone``; in ``joined`` attention goes on across documents."""
    where = train_all(tmp_path_factory.mktemp("documents"), LAYOUTS, FIELDS)
    train_alone(where / "joined", {**FIELDS, "documents": None})
    return where


@pytest.mark.parametrize("name", LAYOUTS[2])
def test_ranks_have_the_losses_of_one_process(trained: Path, name: str) -> None:
    compare(trained / name, trained / "alone", FIELDS["steps"])


def test_masking_makes_a_difference(trained: Path) -> None:
    masked, joined = (told(trained / each / "alone", "loss") for each in (".", "joined"))
    assert masked != pytest.approx(joined, rel=1e-4)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return run_for_real(BOOKS, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", BOOKS)
def test_a_rank_of_two_is_what_the_ledger_says(two: dict[str, list[dict[str, Any]]], name: str) -> None:
    check(load(tables(BOOKS[name])), two[name])
