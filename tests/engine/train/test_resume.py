"""A run is a function of its file: stopped anywhere and resumed, it ends in the same bits."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tiny_run import CountingFeed, tiny_run

from trainledger.engine.train.engine import train
from trainledger.engine.train.observer import Finished, Observer, StepRecord
from trainledger.engine.train.records import read_lines
from trainledger.engine.train.stop import Interrupted
from trainledger.spec.problem import InvalidInput
from trainledger.spec.recipe import OPTIMIZERS
from trainledger.spec.run import Run
from trainledger.spec.runfile import run_name


class StopAfter(Observer):
    """Sends this process the signal that a person or a scheduler would send."""

    def __init__(self, step: int, signum: int = signal.SIGTERM) -> None:
        self.step, self.signum = step, signum

    def on_step_end(self, record: StepRecord) -> None:
        if record.step == self.step:
            os.kill(os.getpid(), self.signum)


def sha(finished: Finished, name: str = "model.safetensors") -> str:
    return hashlib.sha256((finished.checkpoint / name).read_bytes()).hexdigest()


def in_sessions(run: Run, run_dir: Path, *stops: int) -> Finished:
    for number, stop in enumerate(stops):
        with pytest.raises(Interrupted):
            train(run, run_dir, open_feed=CountingFeed, resume=number > 0, observers=[StopAfter(stop)])
    return train(run, run_dir, open_feed=CountingFeed, resume=True)


def curve(run_dir: Path) -> list[dict[str, Any]]:
    """What the metrics say of the numbers, without the times."""
    timed = ("seconds", "time", "phase_seconds")
    lines = [each for each in read_lines(run_dir / "metrics.jsonl") if "event" not in each]
    return [{key: value for key, value in each.items() if key not in timed} for each in lines]


CASES: dict[str, dict[str, Any]] = {
    **{f"{name}": {"optimizer": name} for name in OPTIMIZERS},
    **{f"{name} foreach": {"optimizer": name, "optimizer.implementation": "foreach"} for name in ("adamw", "momentum")},
    "accumulation": {"micro_batch": 1},
    "dropout": {"dropout": 0.3, "micro_batch": 2},
    "dropout and recomputation": {"dropout": 0.3, "activation_checkpointing": "full"},
    "bf16": {"precision": "bf16-mixed", "micro_batch": 2, "dropout": 0.1},
    "math attention": {"attention": "math", "schedule": "wsd"},
    "no clipping, evaluated at every step": {"grad_clip": None, "evaluation.every": 1},
    "tied": {"model": {"tie_embeddings": True}},
    "gpt": {
        "model": {
            "norm": "layernorm",
            "norm.bias": True,
            "positions": "learned",
            "feed_forward.gated": False,
            "feed_forward.activation": "gelu",
            "attention.bias": True,
            "feed_forward.bias": True,
        }
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_ends_in_the_same_bits(case: str, tmp_path: Path) -> None:
    fields = dict(CASES[case])
    run = tiny_run(fields.pop("model", None), **fields)
    whole = train(run, tmp_path / "whole", open_feed=CountingFeed)
    parts = in_sessions(run, tmp_path / "parts", 3, 4)
    assert (sha(parts), sha(parts, "optimizer.safetensors")) == (sha(whole), sha(whole, "optimizer.safetensors"))
    assert (parts.loss, parts.validation_loss) == (whole.loss, whole.validation_loss)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")


def test_a_run_goes_on_to_more_steps_where_its_rate_does_not_depend_on_them(tmp_path: Path) -> None:
    recipe = {"schedule": "constant", "dropout": 0.1}
    whole = train(tiny_run(**recipe, steps=10), tmp_path / "whole", open_feed=CountingFeed)
    train(tiny_run(**recipe), tmp_path / "parts", open_feed=CountingFeed)
    said: list[str] = []
    again = {"open_feed": CountingFeed, "resume": True, "say": said.append}
    assert sha(train(tiny_run(**recipe, steps=10), tmp_path / "parts", **again)) == sha(whole)
    assert said[0] == "recipe.steps is now 10, before 6: the steps are the same."
    with pytest.raises(InvalidInput, match=r"recipe\.steps = 8: is less than the run has done; nearest .*: 10"):
        train(tiny_run(**recipe, steps=8), tmp_path / "parts", **again)
    assert run_name(tiny_run(steps=10)) != run_name(tiny_run()), "a cosine ends with the run"


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_run_goes_on_with_smaller_micro_batches(dropout: float, tmp_path: Path) -> None:
    whole = train(tiny_run(micro_batch=2, dropout=dropout), tmp_path / "whole", open_feed=CountingFeed)
    run_dir = tmp_path / "parts"
    with pytest.raises(Interrupted):
        train(tiny_run(micro_batch=2, dropout=dropout), run_dir, open_feed=CountingFeed, observers=[StopAfter(3)])
    said: list[str] = []
    smaller = tiny_run(micro_batch=1, dropout=dropout)
    parts = train(smaller, run_dir, open_feed=CountingFeed, resume=True, say=said.append)
    effect = "sums are rounded otherwise" + (", dropout draws other masks" if dropout else "")
    assert said[0] == f"recipe.micro_batch is now 1, before 2: {effect}."
    assert parts.loss is not None
    assert parts.loss == pytest.approx(whole.loss, rel=0.1 if dropout else 1e-5)


def test_evaluation_does_not_disturb_training(tmp_path: Path) -> None:
    often = train(tiny_run(dropout=0.3, **{"evaluation.every": 1}), tmp_path / "often", open_feed=CountingFeed)
    never = train(tiny_run(dropout=0.3, **{"evaluation.every": None}), tmp_path / "never", open_feed=CountingFeed)
    assert sha(often) == sha(never)


def test_the_seed_changes_the_run(tmp_path: Path) -> None:
    assert sha(train(tiny_run(), tmp_path / "a", open_feed=CountingFeed)) == sha(
        train(tiny_run(), tmp_path / "b", open_feed=CountingFeed)
    )
    assert sha(train(tiny_run(), tmp_path / "c", open_feed=CountingFeed)) != sha(
        train(tiny_run(seed=1), tmp_path / "d", open_feed=CountingFeed)
    )


def test_the_metrics_of_a_lost_session_are_cut_back(tmp_path: Path) -> None:
    """Steps after the last checkpoint are run again; the curve must show each of them once."""
    run = tiny_run(**{"checkpoints.every": 2})
    with pytest.raises(Interrupted):
        train(run, tmp_path, open_feed=CountingFeed, observers=[StopAfter(3)])
    metrics = tmp_path / "metrics.jsonl"
    assert [each["step"] for each in curve(tmp_path) if "loss" in each] == [1, 2, 3]
    # As after a kill: the checkpoint of step 3 never came to be, and the last line was cut short.
    newest = tmp_path / "checkpoints" / "step-00000003"
    newest.rename(tmp_path / "gone")
    metrics.write_text(metrics.read_text() + json.dumps({"step": 4, "loss": 1.0})[:-4])
    train(run, tmp_path, open_feed=CountingFeed, resume=True)
    assert [each["step"] for each in curve(tmp_path) if "loss" in each] == [1, 2, 3, 4, 5, 6]
    events = [(each["event"], each["step"]) for each in read_lines(metrics) if "event" in each]
    assert events[:3] == [("start", 0), ("checkpoint", 2), ("resume", 2)]
    assert events[-1] == ("finish", 6)


def test_the_run_learns(tmp_path: Path) -> None:
    finished = train(tiny_run(steps=60, global_batch=8, **{"evaluation.every": None}), tmp_path, open_feed=CountingFeed)
    assert finished.validation_loss is not None
    assert finished.unigram_entropy is not None
    assert finished.validation_loss < finished.unigram_entropy / 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "again", "loss"),
    [("fp32", "none", "full"), ("bf16-mixed", "none", "compiled"), ("bf16-mixed", "selective", "full")],
)
def test_a_compiled_run_ends_in_the_same_bits(precision: str, again: str, loss: str, tmp_path: Path) -> None:
    run = tiny_run(compile=True, precision=precision, dropout=0.1, activation_checkpointing=again, loss=loss)
    whole = train(run, tmp_path / "whole", open_feed=CountingFeed)
    assert sha(in_sessions(run, tmp_path / "parts", 3)) == sha(whole)
