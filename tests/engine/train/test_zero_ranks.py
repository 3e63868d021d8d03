"""ZeRO-1 and 2 in real processes: what each rank holds and sends is what the ledger says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_parallel_ranks import GPT2, Case, check, ledgers_by_rank, run_for_real, tables

from trainledger.answers.load import load

pytestmark = pytest.mark.process

ODD = {"feed_forward.d_ff": 81, "vocab_size": 97, "d_model": 33, "attention.head_dim": 8}
EXPERTS = {
    "feed_forward": "experts", "feed_forward.n_experts": 4, "feed_forward.per_token": 2,
    "feed_forward.expert_d_ff": 16,
}  # fmt: skip
TWO: dict[str, Case] = {
    "fully sharded": ({"shard": 2}, {}, {}),
    "zero 1": ({"shard": 2, "zero": 1}, {}, {}),
    "zero 1, one micro-batch": ({"shard": 2, "zero": 1}, {}, {"micro_batch": 4}),
    "zero 1, odd sizes": ({"shard": 2, "zero": 1}, ODD, {}),
    "zero 1, tied": ({"shard": 2, "zero": 1}, GPT2, {}),
    "zero 2": ({"shard": 2, "zero": 2}, {}, {}),
    "zero 2, one micro-batch": ({"shard": 2, "zero": 2}, {}, {"micro_batch": 4}),
    "zero 2, odd sizes": ({"shard": 2, "zero": 2}, ODD, {}),
    "zero 2, tied": ({"shard": 2, "zero": 2}, GPT2, {}),
}
TWO_MORE: dict[str, Case] = {
    "zero 1, checkpointed": ({"shard": 2, "zero": 1}, {}, {"activation_checkpointing": "full"}),
    "zero 2, checkpointed": ({"shard": 2, "zero": 2}, {}, {"activation_checkpointing": "full"}),
    "zero 1, bf16": ({"shard": 2, "zero": 1}, {}, {"precision": "bf16-mixed"}),
    "zero 2, bf16": ({"shard": 2, "zero": 2}, {}, {"precision": "bf16-mixed"}),
    "zero 1, experts": ({"shard": 2, "zero": 1}, EXPERTS, {}),
    "zero 2, experts": ({"shard": 2, "zero": 2}, EXPERTS, {}),
    "zero 1, lion": ({"shard": 2, "zero": 1}, {}, {"optimizer": "lion"}),
}
FOUR: dict[str, Case] = {
    "zero 1, replicated": ({"shard": 2, "replicate": 2, "zero": 1}, {}, {}),
    "zero 2, replicated": ({"shard": 2, "replicate": 2, "zero": 2}, {}, {}),
    "zero 1 over four, odd sizes": ({"shard": 4, "zero": 1}, ODD, {}),
    "zero 2 over four, odd sizes": ({"shard": 4, "zero": 2}, ODD, {}),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return run_for_real(TWO, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", TWO)
def test_a_rank_of_two_is_what_the_ledger_says(two: dict[str, list[dict[str, Any]]], name: str) -> None:
    check(load(tables(TWO[name])), two[name])


@pytest.mark.parametrize("name", [each for each in TWO if each != "zero 1, odd sizes"])
def test_the_peak_is_the_ledgers_to_the_byte(two: dict[str, list[dict[str, Any]]], name: str) -> None:
    """Of odd sizes ZeRO-1's peak is the reduction, which gloo does in a copy of its input."""
    for facts, ledger in zip(two[name], ledgers_by_rank(load(tables(TWO[name]))), strict=True):
        assert facts["peak"] == ledger.peak().nbytes


@pytest.mark.parametrize("name", ["zero 1", "zero 2"])
def test_what_is_shared_does_not_change_the_losses(two: dict[str, list[dict[str, Any]]], name: str) -> None:
    for mine, fully_sharded in zip(two[name], two["fully sharded"], strict=True):
        assert mine["losses"] == pytest.approx(fully_sharded["losses"], rel=1e-6)


@pytest.mark.slow
def test_more_of_two_ranks(tmp_path: Path) -> None:
    for name, ranks in run_for_real(TWO_MORE, 2, tmp_path).items():
        check(load(tables(TWO_MORE[name])), ranks)


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    for name, ranks in run_for_real(FOUR, 4, tmp_path).items():
        check(load(tables(FOUR[name])), ranks)
