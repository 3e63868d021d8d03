"""Preferences are trained: on pairs of a file, against a reference, to the same bits after a stop."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_resume import StopAfter, curve, sha
from tiny_run import tiny_run

from trainledger.cli import main
from trainledger.engine.data.pairs import IGNORED, open_pairs
from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.objective import loss_of_batch
from trainledger.engine.nn.weights import stored_in
from trainledger.engine.train.engine import train
from trainledger.engine.train.precision import add_reference, build_model
from trainledger.engine.train.stop import Interrupted
from trainledger.engine.train.trained import start_from, write_start
from trainledger.ledger.ranks import figures
from trainledger.ledger.step import account
from trainledger.observe.measure.meter import StepMeter
from trainledger.spec.parts import with_fields
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run

MODEL = {"vocab_size": 257, "max_seq_len": 32}
RECIPE = {"objective": "dpo", "seq_len": 24, "global_batch": 8, "micro_batch": 4, "learning_rate": 1e-3}


def pairs_in(directory: Path, count: int = 40) -> Path:
    """Prompts of which the chosen answer counts on, and the rejected one repeats."""
    lines = [
        {"prompt": f"{n} {n + 1} ", "chosen": f"{n + 2} {n + 3}", "rejected": f"{n} {n} {n}"}
        for n in range(100, 100 + count)
    ]
    path = directory / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def singles_in(directory: Path, count: int = 40) -> Path:
    """The same answers, each alone with its label."""
    pairs = [json.loads(line) for line in pairs_in(directory, count).read_text().splitlines()]
    lines = [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
        for pair in pairs
        for name in ("chosen", "rejected")
    ]
    path = directory / "singles.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run_in(directory: Path, **recipe: Any) -> Run:
    scores = {"scores": True, "tie_embeddings": False} if recipe.get("objective") == "reward" else {}
    run = tiny_run({**MODEL, **scores}, **{**RECIPE, **recipe})
    records = singles_in(directory) if run.recipe.objective.mismatched else pairs_in(directory)
    data = {"path": (str(records),), "validation_fraction": 0.2, "cache": str(directory / "cache")}
    return replace(run, data=with_fields(run.data, data))


CASES: dict[str, dict[str, Any]] = {
    "a second model": {},
    "adapters off": {"lora.rank": 3, "lora.dropout": 0.1},
    "adapters on nf4": {"lora.rank": 3, "lora.base_format": "nf4", "precision": "bf16-mixed"},
    "taken before": {"objective.reference": "precomputed"},
    "adapters, taken before": {"objective.reference": "precomputed", "lora.rank": 3},
    "in chunks": {"loss": "chunked", "loss.chunks": 8},
    "recomputed, bf16": {"precision": "bf16-mixed", "activation_checkpointing": "full"},
    "odds ratio": {"objective": "orpo"},
    "odds ratio, adapters, in chunks": {"objective": "orpo", "lora.rank": 3, "loss": "chunked", "loss.chunks": 8},
    "scores": {"objective": "reward"},
    "scores, adapters": {"objective": "reward", "lora.rank": 3, "lora.whole": ["lm_head"], "precision": "bf16-mixed"},
    "single answers": {"objective": "kto"},
    "single answers, adapters": {"objective": "kto", "lora.rank": 3, "lora.dropout": 0.1},
    "single answers, taken before": {"objective": "kto", "objective.reference": "precomputed"},
}


@pytest.mark.parametrize("case", CASES)
def test_a_stopped_run_ends_with_the_same_bits(tmp_path: Path, case: str) -> None:
    run, meter = run_in(tmp_path, **CASES[case]), StepMeter()
    whole = train(run, tmp_path / "whole", observers=[meter])
    with pytest.raises(Interrupted):
        train(run, tmp_path / "cut", observers=[StopAfter(3)])
    again = train(run, tmp_path / "cut", resume=True)
    assert sha(again) == sha(whole)
    assert sha(again, "optimizer.safetensors") == sha(whole, "optimizer.safetensors")
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    losses = [line["loss"] for line in curve(tmp_path / "whole") if "loss" in line]
    first = {"dpo": math.log(2), "orpo": losses[0], "reward": losses[0], "kto": 0.5}[run.recipe.objective.kind]
    assert losses[0] == pytest.approx(first, abs=1e-3)  # the model is still its reference
    assert min(losses) < 0.99 * losses[0]
    assert not [name for name in stored_in([whole.checkpoint / "model.safetensors"]) if name.startswith("reference")]
    # The metered step of the run against the account.
    assert meter.ledger is not None
    measured, predicted = figures(meter.ledger), figures(account(run))
    assert measured.matmul_flops == predicted.matmul_flops
    assert measured.kept_nbytes == predicted.kept_nbytes
    assert meter.ledger.parameters == account(run).parameters
    assert measured.peak_nbytes == pytest.approx(predicted.peak_nbytes, rel=0.01)


def test_scores_begin_beside_the_weights_of_a_language_model_and_are_those_of_the_last_token(tmp_path: Path) -> None:
    words = run_in(tmp_path)
    start = build_model(words.model, words.recipe)
    initialize(start, seed=7)
    write_start(start, tmp_path / "start")
    run = run_in(tmp_path, objective="reward", steps=1, initial_weights=str(tmp_path / "start"))
    model = build_model(run.model, run.recipe)
    assert start_from(run, model, print)["file"].endswith("model.safetensors")
    torch.testing.assert_close(model.embed_tokens.weight, start.embed_tokens.weight)
    assert model.lm_head.weight.shape == (1, run.model.d_model)
    inputs, targets = next(iter(open_pairs(run, "cpu").batches(0)))[0]
    with torch.no_grad():
        scores, loss = model(inputs)[..., 0], loss_of_batch(model, (inputs, targets), run.recipe)
    last = [int(np.flatnonzero(row >= 0)[-1]) for row in targets.numpy()]
    own = [float(scores[row, at]) for row, at in enumerate(last)]
    margins = np.array(own[0::2]) - np.array(own[1::2])
    assert float(loss) == pytest.approx(float(np.log1p(np.exp(-margins)).mean()), rel=1e-5)
    train(run, tmp_path / "run")
    assert main(["sample", str(tmp_path / "run")]) == 2


def test_both_kinds_of_reference_train_alike(tmp_path: Path) -> None:
    runs = {kind: run_in(tmp_path, **{"objective.reference": kind}) for kind in ("device", "precomputed")}
    curves = {}
    for kind, run in runs.items():
        train(run, tmp_path / kind)
        curves[kind] = [line["loss"] for line in curve(tmp_path / kind) if "loss" in line]
    assert curves["device"] == pytest.approx(curves["precomputed"], rel=1e-4)


def test_a_run_begins_with_given_weights_and_so_does_its_reference(tmp_path: Path) -> None:
    start = build_model(with_fields(run_in(tmp_path).model, {}), run_in(tmp_path).recipe)
    initialize(start, seed=7)
    write_start(start, tmp_path / "start")
    run = run_in(tmp_path, initial_weights=str(tmp_path / "start"), steps=2)
    train(run, tmp_path / "run")
    losses = [line["loss"] for line in curve(tmp_path / "run") if "loss" in line]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)


def test_the_loss_is_that_of_the_paper(tmp_path: Path) -> None:
    """By numpy in fp64 from the logits: sums of log-probabilities of the answers, then equation 7."""
    run = run_in(tmp_path, **{"objective.beta": 0.3})
    model = build_model(run.model, run.recipe)
    initialize(model, seed=1)
    initialize(add_reference(model, run), seed=2)
    batch = next(iter(open_pairs(run, "cpu").batches(0)))[0]
    inputs, targets = (part.numpy() for part in batch)
    assert (targets[:, 0] == IGNORED).all()
    assert (targets != IGNORED).any(axis=1).all()

    ours, theirs = (log_probabilities(each, batch[0], targets) for each in (model, model.reference))
    ratio = ours - theirs
    margin = 0.3 * (ratio[0::2] - ratio[1::2])
    expected = np.log1p(np.exp(-margin)).mean()
    assert loss_of_batch(model, batch, run.recipe).item() == pytest.approx(expected, rel=1e-5)
    assert inputs.shape == (4, 24)


def log_probabilities(model: Any, inputs: torch.Tensor, targets: Any) -> Any:
    """By numpy in fp64 from the logits: the sum over the targets of each row."""
    logits = model(inputs).detach().double().numpy()
    logp = logits - logits.max(-1, keepdims=True)
    logp -= np.log(np.exp(logp).sum(-1, keepdims=True))
    return (np.take_along_axis(logp, np.maximum(targets, 0)[..., None], -1)[..., 0] * (targets != IGNORED)).sum(1)


def test_the_odds_ratio_is_that_of_the_paper(tmp_path: Path) -> None:
    """Equations 1, 4, 6 and 7, whose probabilities are means over an answer's tokens."""
    run = run_in(tmp_path, objective="orpo", **{"objective.weight": 0.3})
    model = build_model(run.model, run.recipe)
    initialize(model, seed=1)
    batch = next(iter(open_pairs(run, "cpu").batches(0)))[0]
    targets = batch[1].numpy()
    mean = log_probabilities(model, batch[0], targets) / (targets != IGNORED).sum(1)
    odds = np.exp(mean) / (1 - np.exp(mean))
    expected = (-mean[0::2] + 0.3 * np.log1p(odds[1::2] / odds[0::2])).mean()
    assert loss_of_batch(model, batch, run.recipe).item() == pytest.approx(expected, rel=1e-5)


def test_the_value_of_single_answers_is_that_of_the_paper(tmp_path: Path) -> None:
    """Equation 8: the sigmoid of beta times the logarithm of the ratio less the distance of mismatched answers."""
    run = run_in(tmp_path, objective="kto", **{"objective.beta": 0.3, "objective.undesirable": 1.5})
    model = build_model(run.model, run.recipe)
    initialize(model, seed=1)
    initialize(add_reference(model, run), seed=2)
    inputs, targets, weights, others, other_targets = next(iter(open_pairs(run, "cpu").batches(0)))[0]
    assert set(weights.tolist()) <= {1.0, -1.5}

    def ratio(inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        ours, theirs = (log_probabilities(each, inputs, targets.numpy()) for each in (model, model.reference))
        return ours - theirs

    distance = max(0.0, ratio(others, other_targets).mean())
    signs = np.sign(weights.numpy())
    value = 1 / (1 + np.exp(-0.3 * signs * (ratio(inputs, targets) - distance)))
    expected = (np.abs(weights.numpy()) * (1 - value)).mean()
    batch = (inputs, targets, weights, others, other_targets)
    assert loss_of_batch(model, batch, run.recipe).item() == pytest.approx(expected, rel=1e-5)


def test_mismatched_rows_have_their_prompt_and_another_answer(tmp_path: Path) -> None:
    pairs = open_pairs(run_in(tmp_path, objective="kto"), "cpu")
    for pair, before in zip(pairs.train, [pairs.train[-1], *pairs.train[:-1]], strict=True):
        (own, begins), (other, other_begins) = pair.rows
        assert begins == other_begins
        assert own[:begins].tolist() == other[:begins].tolist()
        assert other[begins:].tolist() == before.rows[0][0][begins:].tolist()
    run = run_in(tmp_path, objective="kto")
    (tmp_path / "singles.jsonl").write_text('{"prompt": "a", "completion": "b", "label": "good"}\n')
    with pytest.raises(InvalidInput, match="has the label 'good', which must be true or false"):
        open_pairs(run, "cpu")


def test_what_is_of_documents_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_in(tmp_path, steps=2)
    train(run, tmp_path / "run")
    assert main(["data", str(tmp_path / "run" / "run.toml")]) == 2
    assert main(["evaluate", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "has answers to prompts, which are tokenized when training begins" in said
    assert "is not a run with held-out text; name files, directories or globs" in said


def test_rows_are_prompt_and_answer_between_end_tokens(tmp_path: Path) -> None:
    pairs = open_pairs(run_in(tmp_path), "cpu")
    inputs, targets, *rest = next(iter(pairs.batches(0)))[0]
    assert rest == []
    text = bytes(token for token in inputs[0].tolist() if token != pairs.end_id).decode()
    number = int(text[:3])
    assert text == f"{number} {number + 1} {number + 2} {number + 3}"
    answer = [token for token in targets[1].tolist() if token != IGNORED]
    assert bytes(answer[:-1]).decode() == f"{number} {number} {number}"
    assert answer[-1] == pairs.end_id
    assert pairs.documents(0)[0].endswith(f"pairs.jsonl:{number - 99}")
    assert pairs.validation_sequences == {"": 4}


@pytest.mark.parametrize(
    ("line", "data", "sentence"),
    [
        ({"prompt": "a", "chosen": "b"}, {}, "has no field 'rejected'; its fields are 'prompt', 'chosen'"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, {}, "has a prompt and no text in the field rejected"),
        ({"prompt": "a" * 40, "chosen": "b", "rejected": "c"}, {}, "leaves 0 pairs to train on and 0 to hold out"),
        ({}, {"tokenizer": "bpe"}, "is not trained on pairs; nearest that works: bytes"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, line: dict[str, str], data: dict[str, Any], sentence: str) -> None:
    run = run_in(tmp_path)
    (tmp_path / "pairs.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(InvalidInput, match=sentence):
        open_pairs(replace(run, data=with_fields(run.data, data)), "cpu")
