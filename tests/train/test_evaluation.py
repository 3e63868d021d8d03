from __future__ import annotations

import pytest
import torch
from tiny_run import CountingFeed, tiny_run

from trainledger.nn.transformer import build
from trainledger.spec.precision import FP32
from trainledger.train.evaluation import evaluate


def test_the_mean_is_over_tokens_whatever_the_batches() -> None:
    run = tiny_run(**{"evaluation.sequences": 7})
    model = build(run.model, run.recipe)
    ids_BT = CountingFeed(run, torch.device("cpu")).sequences(5, 7)
    inputs_BT, targets_BT = ids_BT[:, :-1], ids_BT[:, 1:]
    uneven = [(inputs_BT[:3], targets_BT[:3]), (inputs_BT[3:], targets_BT[3:])]
    with torch.no_grad():
        whole = torch.nn.functional.cross_entropy(model(inputs_BT).flatten(0, 1), targets_BT.flatten()).item()
    assert evaluate(model, uneven, FP32()) == pytest.approx(whole, rel=1e-6)


def test_dropout_is_off_and_training_mode_comes_back() -> None:
    run = tiny_run(dropout=0.5)
    model = build(run.model, run.recipe)
    batches = CountingFeed(run, torch.device("cpu")).validation()
    model.train()
    before = torch.get_rng_state()
    assert evaluate(model, batches, FP32()) == evaluate(model, batches, FP32())
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert all(each.grad is None for each in model.parameters())
