"""kill -9 at random moments, saving among them: nothing damaged is ever loaded and the end is the same bits."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trainledger.engine.train.run_directory import all_checkpoints, damage

CHILD = Path(__file__).with_name("train_tiny.py")
# 2.5 million parameters, 30 MB a checkpoint, one checkpoint a step: saving takes most of the time.
BIG = {"vocab_size": 2048, "d_model": 256, "n_layers": 2, "feed_forward.d_ff": 704, "attention.n_heads": 4}
FIELDS: dict[str, Any] = {"model": BIG, "checkpoints.every": 1, "evaluation.every": 5, "dropout": 0.1}


def start(run_dir: Path, n_steps: int, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(CHILD), str(run_dir), json.dumps(FIELDS | {"steps": n_steps}), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def to_the_end(run_dir: Path, n_steps: int, *more: str) -> tuple[str, str]:
    """Train to the last step; the SHA-256 of the final weights, and what stderr said."""
    child = start(run_dir, n_steps, *more)
    out, err = child.communicate(timeout=300)
    assert child.returncode == 0, err
    return hashlib.sha256((Path(out.strip()) / "model.safetensors").read_bytes()).hexdigest(), err


def kill_and_resume(tmp_path: Path, n_kills: int, n_steps: int, seed: int) -> dict[str, int]:
    """Kill a run at random moments until it was killed so often, then let it end; counts of what was met."""
    began = time.time()
    expected, _ = to_the_end(tmp_path / "whole", n_steps)
    wall = time.time() - began
    chance = random.Random(seed)
    met = {"kills": 0, "while saving": 0, "runs": 0, "damaged": 0}
    while met["kills"] < n_kills:
        met["runs"] += 1
        run_dir = tmp_path / f"killed-{met['runs']}"
        while met["kills"] < n_kills:
            child = start(run_dir, n_steps, "resume")
            try:
                # Uniform over a whole run, so that imports, steps, saving and the end are all met.
                child.communicate(timeout=chance.uniform(0, wall))
            except subprocess.TimeoutExpired:
                child.kill()
                child.communicate()
                met["kills"] += 1
                met["while saving"] += any((run_dir / "checkpoints").glob(".tmp-step-*"))
                met["damaged"] += sum(damage(each) is not None for each in all_checkpoints(run_dir))
                continue
            assert child.returncode == 0
            break
        found, err = to_the_end(run_dir, n_steps, "resume")
        assert "skipped" not in err, "a kill left a directory that looks like a checkpoint and is none"
        assert found == expected
        assert not list((run_dir / "checkpoints").glob(".tmp-*"))
    return met


@pytest.mark.process
def test_a_run_killed_at_random_ends_in_the_same_bits(tmp_path: Path) -> None:
    met = kill_and_resume(tmp_path, n_kills=3, n_steps=10, seed=20)
    assert met["damaged"] == 0


@pytest.mark.gpu
def test_a_deterministic_run_on_a_gpu_ends_in_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = FIELDS | {"deterministic": True, "precision": "bf16-mixed", "attention_dropout": 0.1}
    monkeypatch.setattr(sys.modules[__name__], "FIELDS", fields)
    kill_and_resume(tmp_path, n_kills=1, n_steps=12, seed=3)


@pytest.mark.slow
def test_thirty_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    met = kill_and_resume(tmp_path, n_kills=30, n_steps=40, seed=1)
    with capsys.disabled():
        print(f"\n{met}")
    assert met["damaged"] == 0
    assert met["while saving"] > 0, "no kill met a save: make the model larger"
