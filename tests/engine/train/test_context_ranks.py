"""Sequences over several real processes: losses of one process, checkpoints for other layouts, books that agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import run_of
from spread_runs import compare, go_on, told, train_all
from test_parallel_ranks import Case, check, ledgers_by_rank, run_for_real, sent, tables
from tiny_run import CountingFeed, tiny_run

from trainledger.answers.load import load
from trainledger.engine.train.parallel.context import own_part
from trainledger.engine.train.parallel.refusals import refuse_context
from trainledger.spec.layout import Layout
from trainledger.spec.problem import InvalidInput

pytestmark = pytest.mark.process

# Adam divides a gradient by its own size: where that is rounding, a small epsilon makes a whole step of it.
FIELDS: dict[str, Any] = {
    "optimizer.epsilon": 1e-5,
    "model": {"attention.n_heads": 8, "attention.n_kv_heads": 4}, "steps": 20, "global_batch": 4, "micro_batch": 2,
    "checkpoints.every": 20, "evaluation.every": 5,
}  # fmt: skip
ALL: dict[str, Any] = {"context_kind": "all-to-all"}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "ring": {"context": 2},
        "all-to-all": {"context": 2, **ALL},
        "zero 1": {"context": 2, "zero": 1},
        "zero 2": {"context": 2, "zero": 2, **ALL},
    },
    4: {
        "ring of four": {"context": 4},
        "shards": {"context": 2, "shard": 2},
        "shards, all-to-all": {"context": 2, "shard": 2, **ALL},
        "replicas": {"context": 2, "replicate": 2},
        "tensor": {"context": 2, "tensor": 2},
        "tensor and sequence, all-to-all": {"context": 2, "tensor": 2, "sequence_parallel": True, **ALL},
        "stages": {"context": 2, "pipeline": 2},
    },
}
NAMES = [name for layouts in LAYOUTS.values() for name in layouts]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every layout's run, and that of one process in ``alone``."""
    return train_all(tmp_path_factory.mktemp("contexts"), LAYOUTS, FIELDS)


@pytest.mark.parametrize("name", NAMES)
def test_context_ranks_have_the_losses_of_one_process(trained: Path, name: str) -> None:
    compare(trained / name, trained / "alone", FIELDS["steps"])


def test_a_run_goes_on_in_other_layouts_and_back(trained: Path, tmp_path: Path) -> None:
    legs: list[dict[str, Any]] = [
        {"layout": {"context": 2}, "stop_after": 4}, {"layout": {"shard": 2}, "stop_after": 8},
        {"layout": LAYOUTS[4]["tensor"], "stop_after": 12}, {"stop_after": 15},
        {"layout": LAYOUTS[2]["zero 1"], "stop_after": 17}, {"layout": LAYOUTS[2]["all-to-all"]},
    ]  # fmt: skip
    for leg in legs:
        go_on(tmp_path, leg, FIELDS)
    assert told(tmp_path / "run", "loss") == pytest.approx(told(trained / "alone", "loss"), rel=1e-6)


# The books

# Heads as wide as this make attention the peak of a step.
WIDE: dict[str, Any] = {
    "vocab_size": 8, "max_seq_len": 256, "feed_forward.d_ff": 8, "n_layers": 2, "attention.head_dim": 64,
}  # fmt: skip
LONG: dict[str, Any] = {"seq_len": 256, "global_batch": 4}
BOOKS: dict[int, dict[str, Case]] = {
    2: {
        "ring": ({"context": 2}, {}, {}),
        "ring, peak in attention": ({"context": 2}, WIDE, LONG),
        "ring, bf16": ({"context": 2}, WIDE, {**LONG, "precision": "bf16-mixed"}),
        "ring, checkpointed": ({"context": 2}, WIDE, {**LONG, "activation_checkpointing": "full"}),
        "all-to-all": ({"context": 2, **ALL}, {}, {}),
        "all-to-all, peak in attention": ({"context": 2, **ALL}, WIDE, LONG),
        "all-to-all, selective": ({"context": 2, **ALL}, WIDE, {**LONG, "activation_checkpointing": "selective"}),
        "zero 1": ({"context": 2, "zero": 1}, {}, {}),
    },
    4: {
        "ring of four": ({"context": 4}, WIDE, LONG),
        "shards": ({"context": 2, "shard": 2}, {}, {}),
        "replicas, all-to-all": ({"context": 2, "replicate": 2, **ALL}, {}, {}),
        "tensor": ({"context": 2, "tensor": 2}, {}, {}),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return run_for_real(BOOKS[2], 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", BOOKS[2])
def test_a_rank_of_two_is_what_the_ledger_says(two: dict[str, list[dict[str, Any]]], name: str) -> None:
    check(load(tables(BOOKS[2][name])), two[name])


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    for name, ranks in run_for_real(BOOKS[4], 4, tmp_path).items():
        check(load(tables(BOOKS[4][name])), ranks)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The first rank of two whose collectives do nothing, also not in copies."""
    return run_for_real(BOOKS[2], 2, tmp_path_factory.mktemp("first"), fake=True)


@pytest.mark.parametrize("name", [each for each in BOOKS[2] if each != "zero 1"])
def test_memory_of_the_first_rank_is_the_ledgers(first: dict[str, list[dict[str, Any]]], name: str) -> None:
    """But for the sum of losses, 4 bytes."""
    (facts,) = first[name]
    ledger = ledgers_by_rank(load(tables(BOOKS[2][name])))[0]
    assert 0 <= facts["peak"] - ledger.peak().nbytes <= 4
    assert sum(sent(ledger).values()) == sum(times for *_, times in facts["collectives"])


# What is refused


@pytest.mark.parametrize(
    ("fields", "layout", "named"),
    [
        ({"model": {"n_mtp_layers": 1}}, {}, "model.n_mtp_layers"),
        ({"model": {"positions": "learned"}}, {}, "model.positions"),
        ({"model": {"positions": "learned"}}, ALL, None),
        ({"dropout": 0.1}, {}, "recipe.dropout"),
        ({"compile": True}, {}, "recipe.compile"),
        ({"activation_checkpointing": "selective"}, {}, "recipe.activation_checkpointing"),
        ({"activation_checkpointing": "selective"}, ALL, None),
    ],
)
def test_what_no_context_ranks_train_is_refused(
    fields: dict[str, Any], layout: dict[str, Any], named: str | None
) -> None:
    run = run_of({"fields": {**FIELDS, **fields}, "layout": {"context": 2, **layout}})
    if named is None:
        refuse_context(run)
        return
    with pytest.raises(InvalidInput, match=named):
        refuse_context(run)


@pytest.mark.parametrize("layout", [Layout(context=2), Layout(context=4), Layout(context=4, context_kind="all-to-all")])
def test_every_token_is_on_one_rank(layout: Layout) -> None:
    run = tiny_run()
    ((inputs_BT, targets_BT),) = CountingFeed(run, torch.device("cpu")).validation()
    parts = [own_part(layout, rank, (inputs_BT, targets_BT)) for rank in range(layout.context)]
    for whole_BT, own in ((inputs_BT, [each for each, _ in parts]), (targets_BT, [each for _, each in parts])):
        assert torch.cat(own, 1).sort(1).values.equal(whole_BT.sort(1).values)
