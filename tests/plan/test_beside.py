"""Rules of thumb beside the ledger: each row's two figures, worked out again by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

import trainledger as tl
from trainledger.plan.beside import Beside
from trainledger.questions import plan


def rows_of(**changes: Any) -> dict[str, Beside]:
    run = tl.load(
        {
            "model": {"preset": "llama-3-70b"},
            "recipe": {
                "seq_len": 8192,
                "global_batch": 4,
                "micro_batch": 1,
                "tokens": "15T",
                "precision": "bf16-mixed",
            },
            "cluster": {"device": "h100-sxm", "count": 1024},
        },
        changes,
    )
    return {each.rule: each for each in plan(run).rules}


def test_what_the_rules_say_of_a_70b_on_1024_devices() -> None:
    rows = rows_of()
    N, L, d, T = 70_553_706_496, 80, 8192, 8192
    assert rows["12 d^2 L + V d"].by_rule == 12 * d * d * L + 128256 * d
    assert rows["12 d^2 L + V d"].by_ledger == N
    assert rows["6 N"].by_rule == 6 * N
    assert rows["16 N"].by_rule == 16 * N
    assert rows["16 N / memory"].by_rule == math.ceil(16 * N / 80e9) == 15
    rate = 1024 * 989.5e12 * 0.5
    steps = 15 * 10**12 // (4 * T)
    assert rows["6 N D / rate"].by_rule == pytest.approx(6 * N * steps * 4 * T / rate)
    # The ledger by hand: matmuls are all parameters but the embedding's, attention has 12 L T (H K) per token.
    per_token = 6 * (N - 128256 * d - (2 * L + 1) * d) + 12 * L * T * 64 * 128
    assert rows["6 N"].by_ledger == per_token
    assert rows["6 N D / rate"].by_ledger == pytest.approx(per_token * steps * 4 * T / rate)


def test_micro_batches_change_the_memory_and_not_the_work() -> None:
    few, many = rows_of(), rows_of(**{"recipe.micro_batch": 4})
    assert few["6 N"].by_ledger == many["6 N"].by_ledger
    assert few["6 N D / rate"].by_ledger == many["6 N D / rate"].by_ledger
    assert few["16 N / memory"].by_ledger < many["16 N / memory"].by_ledger


def test_a_rule_that_does_not_speak_of_the_optimizer_is_left_out() -> None:
    assert "16 N" not in rows_of(**{"recipe.optimizer": "sgd"})
    assert rows_of()["6 N"].error == pytest.approx(-0.1207, abs=1e-3)
