"""A student is trained beside a frozen teacher of another architecture, to the same bits after a stop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_resume import StopAfter, curve, sha
from tiny_run import TINY, CountingFeed, tiny_run

from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.objective import loss_of_batch
from trainledger.engine.nn.weights import stored_in
from trainledger.engine.train.engine import train
from trainledger.engine.train.precision import add_reference, build_model
from trainledger.engine.train.stop import Interrupted
from trainledger.engine.train.trained import write_start
from trainledger.ledger.ranks import figures
from trainledger.ledger.step import account
from trainledger.observe.measure.meter import StepMeter
from trainledger.spec.parts import with_fields
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run

TEACHER = {"d_model": 48, "n_layers": 3, "norm": "layernorm", "positions": "learned", "feed_forward.d_ff": 80}


def student(**recipe: Any) -> Run:
    run = tiny_run(None, objective="distillation", **recipe)
    return replace(run, teacher=with_fields(TINY, {**TEACHER, "name": "teacher"}))


CASES: dict[str, dict[str, Any]] = {
    "the divergence alone": {},
    "with the next token, softened": {"objective.kd_ratio": 0.5, "objective.temperature": 2.0, "micro_batch": 2},
    "adapters": {"lora.rank": 3, "lora.dropout": 0.1},
    "bf16, recomputed": {"precision": "bf16-mixed", "activation_checkpointing": "full"},
}


@pytest.mark.parametrize("case", CASES)
def test_a_stopped_run_ends_with_the_same_bits(tmp_path: Path, case: str) -> None:
    run, meter = student(**CASES[case]), StepMeter()
    whole = train(run, tmp_path / "whole", open_feed=CountingFeed, observers=[meter])
    with pytest.raises(Interrupted):
        train(run, tmp_path / "cut", open_feed=CountingFeed, observers=[StopAfter(3)])
    again = train(run, tmp_path / "cut", open_feed=CountingFeed, resume=True)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert sha(again, file) == sha(whole, file)
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    losses = [line["loss"] for line in curve(tmp_path / "whole") if "loss" in line]
    assert losses[-1] < losses[0]
    assert not [name for name in stored_in([whole.checkpoint / "model.safetensors"]) if name.startswith("reference")]
    assert meter.ledger is not None
    measured, predicted = figures(meter.ledger), figures(account(run))
    assert measured.matmul_flops == predicted.matmul_flops
    assert measured.kept_nbytes == predicted.kept_nbytes
    assert meter.ledger.parameters == account(run).parameters
    assert measured.peak_nbytes == pytest.approx(predicted.peak_nbytes, rel=0.01)


def test_the_loss_is_that_of_the_paper() -> None:
    """By numpy in fp64 from the logits of both models."""
    run = student(**{"objective.kd_ratio": 0.3, "objective.temperature": 2.5})
    assert run.reference is not None
    model = build_model(run.model, run.recipe)
    initialize(model, seed=1)
    teacher = add_reference(model, run.reference)
    initialize(teacher, seed=2)
    inputs, targets = torch.randint(0, 64, (2, 4, 16)).unbind()

    def log_probabilities(module: torch.nn.Module, temperature: float) -> Any:
        logits = module(inputs).detach().double().numpy() / temperature
        logits -= logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    wanted, given = log_probabilities(teacher, 2.5), log_probabilities(model, 2.5)
    divergence = (np.exp(wanted) * (wanted - given)).sum(-1).mean()
    own = -np.take_along_axis(log_probabilities(model, 1.0), targets.numpy()[..., None], -1).mean()
    expected = 0.3 * 2.5**2 * divergence + 0.7 * own
    assert loss_of_batch(model, (inputs, targets), run.recipe).item() == pytest.approx(expected, rel=1e-5)


def test_a_student_that_is_its_teacher_has_nothing_to_learn(tmp_path: Path) -> None:
    run = student(steps=1)
    start = build_model(run.model, run.recipe)
    initialize(start, seed=7)
    write_start(start, tmp_path / "start")
    same = {"initial_weights": str(tmp_path / "start"), "objective.teacher_weights": str(tmp_path / "start")}
    run = replace(run, teacher=run.model, recipe=with_fields(run.recipe, same))
    train(run, tmp_path / "run", open_feed=CountingFeed)
    lines = curve(tmp_path / "run")
    assert [line["loss"] for line in lines if "loss" in line] == [pytest.approx(0, abs=1e-6)]
    other = replace(run, teacher=with_fields(run.model, {"d_model": 48}))
    with pytest.raises(InvalidInput, match=r"recipe\.objective\.teacher_weights: .* does not fit the run's model"):
        train(other, tmp_path / "other", open_feed=CountingFeed)
    held_out = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert held_out[-1] == pytest.approx(np.log(64), rel=0.05)  # of the next token, which nobody has learned
