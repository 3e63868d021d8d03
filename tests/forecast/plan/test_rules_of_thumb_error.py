"""Rules of thumb beside the ledger: each row's two figures, worked out again by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

import trainledger as tl
from trainledger.answers.plan import plan
from trainledger.forecast.plan.plan import RuleOfThumb, rules_of_thumb, step_facts
from trainledger.ledger.memory.timeline import timeline
from trainledger.ledger.model.parameters import parameters
from trainledger.ledger.ranks import account_run


def rows_of(**changes: Any) -> dict[str, RuleOfThumb]:
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
    assert rows["16 N / memory"].by_rule == math.ceil(16 * N / (79.18 * 2**30)) == 14  # what the device gives
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


@pytest.mark.parametrize(
    ("recipe", "bytes_each"),
    [
        ({"precision": "bf16-mixed"}, 4 + 4 + 8),
        ({"precision": "bf16-sharded"}, 4 + 4 + 8),
        ({"precision": "bf16"}, 2 + 2 + 4),
        ({"precision": "bf16", "precision.moment_dtype": "fp32"}, 2 + 2 + 8),
        ({"precision": "bf16", "precision.master_weights": True}, 2 + 2 + 4 + 8),
        ({"precision": "bf16", "precision.master_weights": True, "precision.gradient_dtype": "fp32"}, 2 + 4 + 4 + 8),
        ({"precision": "bf16-mixed", "lora.rank": 4}, 4 + 4 + 8),
        ({"precision": "bf16", "lora.rank": 4}, 2 + 2 + 4),
    ],
)
def test_static_state_is_what_the_account_holds_of_weights_gradients_and_moments(
    recipe: dict[str, Any], bytes_each: int
) -> None:
    run = tl.load({"model": {"preset": "gpt2"}, "recipe": {"seq_len": 64, "global_batch": 1, "steps": 1, **recipe}})
    account = account_run(run, backend="cuda")
    ledger = account.ledger
    states = next(each for each in rules_of_thumb(account, 1) if each.quantity == "static state").by_ledger
    most = dict.fromkeys(("frozen weights", "parameters", "gradients", "optimizer state"), 0)
    for moment in timeline(ledger):
        most = {name: max(nbytes, moment.live.get(name, 0)) for name, nbytes in most.items()}
    assert states == sum(most.values())
    # By hand, where a step counter of each tensor is all that is left out; frozen weights have the others' format.
    frozen = parameters(run.model).total * (2 if recipe["precision"] == "bf16" else 4) if run.recipe.lora else 0
    assert states == pytest.approx(bytes_each * ledger.parameters + frozen, rel=1e-3)


def test_the_loss_is_divided_by_the_micro_batches_of_a_rank() -> None:
    run = tl.load({
        "model": {"preset": "gpt2"}, "recipe": {"seq_len": 64, "global_batch": 24, "micro_batch": 1, "steps": 1},
        "layout": {"replicate": 2, "shard": 2}, "cluster": {"count": 4, "device": "h100-sxm"},
    })  # fmt: skip
    made = plan(run)
    (fact,) = (each for each in step_facts(run, made.ledger) if each.what == "micro-batches")
    assert fact.numbers == (run.grad_accum,) == (6,)
    assert fact.sentence == "loss / 6, for each of 6 micro-batches of a data rank"
