"""The tiny run in layouts of real ranks beside that of one process (``alone``): made, resumed by legs, compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_runs import run_of, train_on_ranks
from tiny_run import CountingFeed

from trainledger.engine.nn.transformer import build
from trainledger.engine.train.engine import train
from trainledger.engine.train.records import read_lines
from trainledger.engine.train.run_directory import all_checkpoints
from trainledger.engine.train.saving import model_tensors, read_into
from trainledger.spec.layout import Layout

Layouts = Mapping[str, Mapping[str, Any]]  # by the name of a run's directory
SPREAD: Layouts = {  # two data ranks
    "replicas": {"replicate": 2}, "shards": {"shard": 2}, "zero 1": {"shard": 2, "zero": 1},
    "zero 2": {"shard": 2, "zero": 2},
}  # fmt: skip


def train_alone(where: Path, fields: dict[str, Any]) -> None:
    """The run of one process, in ``alone``."""
    train(run_of({"fields": fields}), where / "alone", open_feed=CountingFeed)


def train_each(where: Path, ranks: int, layouts: Layouts, fields: dict[str, Any]) -> None:
    """The runs of layouts of so many ranks."""
    runs = [{"dir": str(where / name), "layout": each, "fields": fields} for name, each in layouts.items()]
    assert train_on_ranks(where, runs, ranks) == [[0] * ranks] * len(runs)


def train_all(where: Path, by_ranks: Mapping[int, Layouts], fields: dict[str, Any]) -> Path:
    """The run of one process and those of all layouts."""
    train_alone(where, fields)
    for ranks, layouts in by_ranks.items():
        train_each(where, ranks, layouts, fields)
    return where


def go_on(where: Path, leg: Mapping[str, Any], fields: dict[str, Any]) -> None:
    """Train the run in ``run`` further: a leg has the layout, and perhaps the step after which it stops."""
    ranks = Layout(**leg.get("layout", {})).devices
    described = {"dir": str(where / "run"), "fields": fields, "resume": True, **leg}
    assert train_on_ranks(where, [described], ranks) == [[143 if "stop_after" in leg else 0] * ranks]


def told(run_dir: Path, what: str) -> list[float]:
    """What each line of a run's metrics says that has it."""
    return [each[what] for each in read_lines(run_dir / "metrics.jsonl") if what in each]


def weights(run_dir: Path, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights of a run's newest checkpoint, whatever layout wrote it."""
    run = run_of({"fields": fields})
    tensors = model_tensors(build(run.model, run.recipe))
    read_into(all_checkpoints(run_dir)[-1], tensors)
    return tensors


def compare(spread: Path, alone: Path, steps: int) -> None:
    """Losses of training and of held-out sequences, and gradient norms, are those of one process."""
    assert len(told(alone, "loss")) == steps
    for what in ("loss", "validation_loss"):
        assert told(spread, what) == pytest.approx(told(alone, what), rel=1e-6)
    assert told(spread, "grad_norm") == pytest.approx(told(alone, "grad_norm"), rel=1e-5)
