"""Experts over several real processes: losses of one process, checkpoints for other layouts, books that agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_runs import run_of, train_on_ranks
from spread_runs import compare, go_on, told, train_alone
from test_parallel_ranks import Case, check, ledgers_by_rank, run_for_real, sent, tables

from trainledger.answers.load import load
from trainledger.engine.train.parallel.refusals import refuse_experts
from trainledger.spec.problem import InvalidInput

pytestmark = pytest.mark.process

EXPERTS: dict[str, Any] = {
    "feed_forward": "experts", "feed_forward.n_experts": 4, "feed_forward.per_token": 2,
    "feed_forward.expert_d_ff": 16,
}  # fmt: skip
LATENT: dict[str, Any] = {"feed_forward.expert_d_model": 24}
# Adam divides a gradient by its own size: where that is rounding, a small epsilon makes a whole step of it.
FIELDS: dict[str, Any] = {
    "optimizer.epsilon": 1e-5,
    "model": EXPERTS, "steps": 20, "global_batch": 8, "micro_batch": 2, "checkpoints.every": 20, "evaluation.every": 5,
}  # fmt: skip
# Ways to send tokens, each with the loss that keeps experts balanced.
WAYS: dict[str, dict[str, Any]] = {
    "dropless": {"load_balance_loss": 0.05},
    "places": {"load_balance_loss": 0.05, "expert_dispatch": "capacity", "expert_dispatch.factor": 1.1},
}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {"shards": {"shard": 2, "expert": 2}, "context": {"context": 2, "expert": 2}},
    4: {
        "shards with the same experts": {"shard": 4, "expert": 2},
        "all shards": {"shard": 4, "expert": 4},
        "replicas": {"shard": 2, "replicate": 2, "expert": 2},
        "context": {"shard": 2, "context": 2, "expert": 4},
        "stages": {"shard": 2, "pipeline": 2, "expert": 2},
    },
}
# Places are counted over a whole micro-batch, which context ranks do not see.
CASES = [
    (ranks, name, way)
    for ranks, layouts in LAYOUTS.items() for name in layouts for way in WAYS
    if way == "dropless" or "context" not in name
]  # fmt: skip


def fields_of(way: str) -> dict[str, Any]:
    return FIELDS | WAYS[way] | ({"model": EXPERTS | LATENT} if way == "places" else {})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every layout's run, and that of one process in ``alone``, by way."""
    where = tmp_path_factory.mktemp("experts")
    for way in WAYS:
        train_alone(where / way, fields_of(way))
    for ranks, layouts in LAYOUTS.items():
        runs = [
            {"dir": str(where / way / f"{ranks} {name}"), "layout": layouts[name], "fields": fields_of(way)}
            for count, name, way in CASES if count == ranks
        ]  # fmt: skip
        assert train_on_ranks(where, runs, ranks) == [[0] * ranks] * len(runs)
    return where


@pytest.mark.parametrize(("ranks", "name", "way"), CASES)
def test_expert_ranks_have_the_losses_of_one_process(trained: Path, ranks: int, name: str, way: str) -> None:
    alone, spread = trained / way / "alone", trained / way / f"{ranks} {name}"
    compare(spread, alone, FIELDS["steps"])


def test_a_run_goes_on_in_other_layouts_and_back(trained: Path, tmp_path: Path) -> None:
    legs: list[dict[str, Any]] = [
        {"layout": {"shard": 2, "expert": 2}, "stop_after": 4}, {"layout": {"shard": 2}, "stop_after": 8},
        {"layout": {"shard": 4, "expert": 2}, "stop_after": 12}, {"stop_after": 15},
        {"layout": {"context": 2, "expert": 2}},
    ]  # fmt: skip
    for leg in legs:
        go_on(tmp_path, leg, fields_of("dropless"))
    alone = told(trained / "dropless" / "alone", "loss")
    assert told(tmp_path / "run", "loss") == pytest.approx(alone, rel=1e-6)


# The books. Without places what arrives depends on the router; where every token goes to all experts it does not.

ALL: dict[str, Any] = {**EXPERTS, "feed_forward.per_token": 4}
FULL: dict[str, Any] = {"activation_checkpointing": "full"}
LORA: dict[str, Any] = {"lora.rank": 3}
ON_EXPERTS: dict[str, Any] = {**LORA, "lora.targets": ["linear", "experts"]}
BY_ROWS: dict[str, Any] = {**LORA, "lora.targets": ["experts"], "lora.experts": "rows"}
BOOKS: dict[int, dict[str, Case]] = {
    2: {
        "dropless": ({"shard": 2, "expert": 2}, ALL, {"load_balance_loss": 0.01}),
        "dropless, bf16": ({"shard": 2, "expert": 2}, ALL | LATENT, {"precision": "bf16-mixed"}),
        "places": ({"shard": 2, "expert": 2}, EXPERTS | LATENT, WAYS["places"]),
        "context": ({"context": 2, "expert": 2}, ALL, {"load_balance_loss": 0.01}),
        "checkpointed": ({"shard": 2, "expert": 2}, ALL, FULL),
        "adapters": ({"shard": 2, "expert": 2}, ALL, {**LORA, "precision": "bf16-mixed"}),
        "adapters on experts": ({"shard": 2, "expert": 2}, ALL, ON_EXPERTS),
        "adapters on experts, nf4": ({"shard": 2, "expert": 2}, ALL, {**ON_EXPERTS, "lora.base_format": "nf4"}),
        "adapters by rows, dropout": ({"shard": 2, "expert": 2}, ALL | LATENT, {**BY_ROWS, "lora.dropout": 0.1}),
        "adapters on experts, places": ({"shard": 2, "expert": 2}, EXPERTS, {**ON_EXPERTS, **WAYS["places"]}),
        "adapters on experts, bf16": ({"shard": 2, "expert": 2}, ALL, {**ON_EXPERTS, "precision": "bf16-sharded"}),
    },
    4: {
        "dropless": ({"shard": 4, "expert": 2}, ALL, {}),
        "dropless, bf16": ({"shard": 4, "expert": 2}, ALL, {"precision": "bf16-mixed"}),
        "places": ({"shard": 4, "expert": 2}, EXPERTS, WAYS["places"]),
        "checkpointed": ({"shard": 4, "expert": 2}, ALL, FULL),
        "replicas": ({"shard": 2, "replicate": 2, "expert": 2}, ALL, {}),
        "adapters on experts": ({"shard": 4, "expert": 2}, ALL, ON_EXPERTS),
        "adapters by rows": ({"shard": 4, "expert": 2}, ALL, {**BY_ROWS, "precision": "bf16"}),
        "adapters on experts, replicas": ({"shard": 2, "replicate": 2, "expert": 2}, ALL, ON_EXPERTS),
    },
}
NAMES = [(world, name) for world, cases in BOOKS.items() for name in cases]


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
def first(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], dict[str, Any]]:
    """The first rank where collectives do nothing, also not in copies."""
    return {
        (world, name): facts[0]
        for world, cases in BOOKS.items()
        for name, facts in run_for_real(cases, world, tmp_path_factory.mktemp("first"), fake=True).items()
    }


@pytest.mark.parametrize(("world", "name"), NAMES)
def test_memory_of_the_first_rank_is_the_ledgers(
    first: dict[tuple[int, str], dict[str, Any]], world: int, name: str
) -> None:
    """But for the sum of losses, 4 bytes, and for numbers of rows where the peak is while experts compute."""
    facts = first[world, name]
    ledger = ledgers_by_rank(load(tables(BOOKS[world][name])))[0]
    assert 0 <= facts["peak"] - ledger.peak().nbytes <= (80 if name.startswith(("adapters", "checkpointed")) else 4)
    assert sum(sent(ledger).values()) == sum(times for *_, times in facts["collectives"])


@pytest.mark.parametrize(
    ("fields", "layout", "named"),
    [
        ({}, {"shard": 2, "expert": 2, "zero": 1}, "layout.zero"),
        ({}, {"shard": 2, "expert": 2, "expert_send": "nodes"}, "layout.expert_send"),
        ({"compile": True}, {"shard": 2, "expert": 2}, "recipe.compile"),
        ({"expert_dispatch": "capacity"}, {"context": 2}, "recipe.expert_dispatch"),
        ({"expert_dispatch": "capacity"}, {"shard": 2, "expert": 2}, None),
    ],
)
def test_what_no_expert_ranks_train_is_refused(
    fields: dict[str, Any], layout: dict[str, Any], named: str | None
) -> None:
    run = run_of({"fields": {**FIELDS, **fields}, "layout": layout})
    if named is None:
        refuse_experts(run)
        return
    with pytest.raises(InvalidInput, match=named):
        refuse_experts(run)
