"""The moving average of the weights, and muP: closed form and trace have the same bytes and operations."""

from __future__ import annotations

from typing import Any

import pytest
from agreement import assert_agree

from trainledger.ledger.step import account
from trainledger.spec.model import ModelSpec
from trainledger.spec.optimizers import ACCOUNTED_ONLY, IMPLEMENTATIONS
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

MODEL = from_fields(
    ModelSpec,
    {
        "vocab_size": 96, "d_model": 32, "n_layers": 2, "attention.n_heads": 4, "feed_forward.d_ff": 48,
        "max_seq_len": 16,
    },
)  # fmt: skip
USUAL = {"seq_len": 16, "global_batch": 2, "steps": 1}


def run_of(**recipe: Any) -> Run:
    return Run(model=MODEL, recipe=from_fields(Recipe, USUAL | recipe))


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"optimizer.implementation": "foreach"},
        {"optimizer": "sgd", "optimizer.implementation": "loop"},
        {"optimizer": "muon"},
        {"optimizer": "lion", "precision": "bf16-mixed"},
        {"precision": "bf16", "precision.master_weights": True},
    ],
    ids=str,
)
@pytest.mark.long
def test_closed_form_and_trace_agree_on_the_average(recipe: dict[str, Any]) -> None:
    assert_agree(run_of(**recipe, **{"ema.decay": 0.99}))


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "adamw-8bit"])
@pytest.mark.parametrize("way", ["fused", "foreach", "loop"])
@pytest.mark.long
def test_closed_form_and_trace_agree_on_the_groups_of_mup(optimizer: str, way: str) -> None:
    """Embeddings are a group of their own, so lists of tensors are updated in three parts."""
    if way in IMPLEMENTATIONS[optimizer] and (optimizer, way) not in ACCOUNTED_ONLY:
        recipe = {"optimizer": optimizer, "optimizer.implementation": way, "mup.base_width": 16}
        predicted, _ = assert_agree(run_of(**recipe))
        kernels = [each for each in predicted.entries if each.kind == "update"]
        assert way != "fused" or len(kernels) == 3


def test_it_costs_a_copy_of_the_weights_and_a_pass_over_them() -> None:
    with_it, without = account(run_of(**{"ema.decay": 0.99})), account(run_of())
    n = without.parameters
    assert dict(with_it.resident)["optimizer state"] - dict(without.resident)["optimizer state"] == 4 * n
    assert with_it.flops - without.flops == n
    assert with_it.total("written") - without.total("written") == 4 * n
    assert with_it.total("read") - without.total("read") == 8 * n
