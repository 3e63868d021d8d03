from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import CountingFeed, tiny_run

from trainledger.engine.nn.transformer import build
from trainledger.engine.train.engine import train
from trainledger.engine.train.evaluation import evaluate
from trainledger.engine.train.observer import EvaluationRecord, Observer, TrainingState
from trainledger.ledger.step import account
from trainledger.observe.measure.meter import AllocatorPeak


def test_the_mean_is_over_tokens_whatever_the_batches() -> None:
    run = tiny_run(**{"evaluation.sequences": 7})
    model = build(run.model, run.recipe)
    ids_BT = CountingFeed(run, torch.device("cpu")).sequences(5, 7)
    inputs_BT, targets_BT = ids_BT[:, :-1], ids_BT[:, 1:]
    uneven = [(inputs_BT[:3], targets_BT[:3]), (inputs_BT[3:], targets_BT[3:])]
    with torch.no_grad():
        whole = torch.nn.functional.cross_entropy(model(inputs_BT).flatten(0, 1), targets_BT.flatten()).item()
    assert evaluate(model, uneven, run.recipe) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize("kind", ["chunked", "fused"])
def test_a_loss_in_chunks_is_the_same(kind: str) -> None:
    run = tiny_run(loss=kind, **{"loss.chunks": 5})
    model = build(run.model, run.recipe)
    batches = CountingFeed(run, torch.device("cpu")).validation()
    whole = evaluate(model, batches, tiny_run().recipe)
    assert evaluate(model, batches, run.recipe) == pytest.approx(whole, rel=1e-6)


def test_dropout_is_off_and_training_mode_comes_back() -> None:
    run = tiny_run(dropout=0.5)
    model = build(run.model, run.recipe)
    batches = CountingFeed(run, torch.device("cpu")).validation()
    model.train()
    before = torch.get_rng_state()
    assert evaluate(model, batches, run.recipe) == evaluate(model, batches, run.recipe)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert all(each.grad is None for each in model.parameters())


# Where states weigh most, and logits, and activations that are not kept; each way to take the loss.
SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "states": ({"d_model": 128}, {}),
    "logits": ({"vocab_size": 3000}, {}),
    "chunked": ({"vocab_size": 3000}, {"loss": "chunked", "loss.chunks": 8}),
    "fused": ({"vocab_size": 3000}, {"loss": "fused", "loss.chunks": 8}),
    "recomputed": ({"vocab_size": 3000}, {"activation_checkpointing": "full"}),
    "one sequence at a time": ({"vocab_size": 3000, "d_model": 64}, {"micro_batch": 1}),
    "bf16 autocast": ({"vocab_size": 3000}, {"precision": "bf16-mixed", "loss": "chunked"}),
    "bf16 weights": ({"vocab_size": 3000}, {"precision": "bf16"}),
    "masters": ({"vocab_size": 3000, "d_model": 64}, {"precision": "bf16", "precision.master_weights": True}),
    "no moments": ({"vocab_size": 3000, "d_model": 64}, {"optimizer": "sgd", "loss": "chunked"}),
    "average": ({"vocab_size": 3000}, {"ema.decay": 0.9}),
    "written-out attention": ({"max_seq_len": 64}, {"attention": "math", "seq_len": 64}),
    "ahead": ({"vocab_size": 2000, "n_mtp_layers": 1}, {}),
    "adapters": ({"vocab_size": 3000}, {"lora.rank": 4}),
}


class EvaluationPeak(Observer):
    """The most bytes that an evaluation has taken, and whether it began without gradients."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []

    def on_start(self, state: TrainingState) -> None:
        self._state = state

    @contextmanager
    def around_phase(self, phase: str) -> Iterator[None]:
        if phase != "evaluation":
            yield
            return
        with AllocatorPeak(self._state.device) as peak:
            yield
        assert peak.nbytes is not None
        self.nbytes.append(peak.nbytes)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        assert all(each.grad is None for each in self._state.model.parameters())


@pytest.mark.parametrize("name", [*SIZES, pytest.param("compiled", marks=pytest.mark.slow)])
def test_an_evaluation_needs_no_more_than_the_account_of_a_step(name: str, tmp_path: Path) -> None:
    """It would with gradients that are still there, and with all logits where a step takes its loss in chunks."""
    model, recipe = SIZES.get(name, ({"vocab_size": 3000}, {"loss": "compiled"}))
    run = tiny_run(model, **{"steps": 2, "evaluation.every": None, "schedule.warmup_steps": 1, **recipe})
    peak = EvaluationPeak()
    train(run, tmp_path, open_feed=CountingFeed, observers=[peak], say=lambda _: None)
    step = account(run, backend="cpu")
    states = sum(nbytes for name, nbytes in step.resident if name != "batch")
    validation = 2 * 8 * run.recipe.evaluation.sequences * run.recipe.seq_len
    (nbytes,) = peak.nbytes
    assert 0 < states + nbytes - validation <= step.peak().nbytes
