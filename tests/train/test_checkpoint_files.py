"""What a checkpoint directory promises, with real files cut short, flipped and filled up."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import CountingFeed, tiny_run

from trainledger.nn.transformer import build
from trainledger.train import checkpoint, loading, saving
from trainledger.train.engine import train
from trainledger.train.optimizer import build_optimizer

FILES = ("model.safetensors", "optimizer.safetensors", "training.json", "manifest.json")


def names(run_dir: Path) -> list[str]:
    return [each.name for each in checkpoint.all_checkpoints(run_dir)]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("how", ["cut short", "a bit flipped", "emptied", "missing"])
def test_a_damaged_checkpoint_is_skipped_and_the_run_ends_the_same(file: str, how: str, tmp_path: Path) -> None:
    run = tiny_run()
    finished = train(run, tmp_path, open_feed=CountingFeed)
    expected = (finished.checkpoint / "model.safetensors").read_bytes()
    harmed = finished.checkpoint / file
    content = harmed.read_bytes()
    if how == "missing":
        harmed.unlink()
    elif how == "a bit flipped":
        # In the middle: of the manifest that is a letter of a hash or a name, of the others any byte.
        at = len(content) // 2
        harmed.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
    else:
        harmed.write_bytes(content[: len(content) // 2 if how == "cut short" else 0])
    said: list[str] = []
    latest = checkpoint.latest_valid(tmp_path, said.append)
    assert latest is not None
    assert latest.name == "step-00000004"
    assert len(said) == 1
    assert str(finished.checkpoint) in said[0]

    again = train(run, tmp_path, open_feed=CountingFeed, resume=True, say=said.append)
    assert (again.checkpoint / "model.safetensors").read_bytes() == expected
    aside = tmp_path / "checkpoints" / "damaged-1-step-00000006"
    assert aside.is_dir(), "a damaged checkpoint is set aside, not deleted"
    assert any(str(aside) in each for each in said)


def test_with_every_checkpoint_damaged_the_run_starts_again(tmp_path: Path) -> None:
    run = tiny_run()
    expected = (train(run, tmp_path, open_feed=CountingFeed).checkpoint / "model.safetensors").read_bytes()
    for each in checkpoint.all_checkpoints(tmp_path):
        (each / "optimizer.safetensors").unlink()
    said: list[str] = []
    again = train(run, tmp_path, open_feed=CountingFeed, resume=True, say=said.append)
    assert (again.checkpoint / "model.safetensors").read_bytes() == expected
    assert any("starts at step 0" in each for each in said)
    assert len(list((tmp_path / "checkpoints").glob("damaged-*"))) == 3


def test_the_newest_and_the_multiples_are_kept(tmp_path: Path) -> None:
    run = tiny_run(steps=9, **{"checkpoints.every": 1, "checkpoints.keep_last": 2, "checkpoints.keep_every": 3})
    train(run, tmp_path, open_feed=CountingFeed)
    assert names(tmp_path) == ["step-00000003", "step-00000006", "step-00000008", "step-00000009"]


def test_what_a_killed_process_left_is_cleaned_at_the_next_start(tmp_path: Path) -> None:
    run = tiny_run()
    train(run, tmp_path, open_feed=CountingFeed)
    left = tmp_path / "checkpoints" / ".tmp-step-00000008"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half a file")
    (tmp_path / "state.json").write_text('{"state": "running", "step": 6}')
    train(run, tmp_path, open_feed=CountingFeed, resume=True)
    assert not left.exists()


def test_a_tied_weight_is_stored_once_and_nothing_is_pickled(tmp_path: Path) -> None:
    finished = train(tiny_run({"tie_embeddings": True}), tmp_path, open_feed=CountingFeed)
    assert "lm_head.weight" not in load_file(finished.checkpoint / "model.safetensors")
    assert sorted(each.name for each in finished.checkpoint.iterdir()) == sorted(FILES)
    for each in finished.checkpoint.iterdir():
        assert b"torch" not in each.read_bytes()[:4096]


def test_weights_and_optimizer_state_come_back_as_they_were(tmp_path: Path) -> None:
    run = tiny_run()
    finished = train(run, tmp_path, open_feed=CountingFeed)
    model = build(run.model, run.recipe)
    optimizer = build_optimizer(model, run.recipe)
    facts = loading.load(finished.checkpoint, model, optimizer)
    assert facts["step"] == 6
    stored = load_file(finished.checkpoint / "optimizer.safetensors")
    state = saving.optimizer_tensors(model, optimizer)
    assert state.keys() == stored.keys()
    assert all(torch.equal(state[name], stored[name]) for name in stored)
    assert len(stored) == 3 * len(list(model.parameters()))


def test_the_manifest_says_size_and_sha256_of_each_file(tmp_path: Path) -> None:
    finished = train(tiny_run(), tmp_path, open_feed=CountingFeed)
    told = json.loads((finished.checkpoint / "manifest.json").read_text())["files"]
    assert sorted(told) == sorted(FILES[:3])
    for name, each in told.items():
        content = (finished.checkpoint / name).read_bytes()
        assert each == {"nbytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_a_full_disk_is_a_sentence_and_the_old_checkpoints_stay(tmp_path: Path) -> None:
    """The kernel's own refusal: a limit on file size that the second process cannot go beyond."""
    fields: dict[str, Any] = {"steps": 6, "checkpoints.every": 2, "model": {"vocab_size": 512}}
    run = tiny_run(fields["model"], steps=6, **{"checkpoints.every": 2})
    last = train(run, tmp_path, open_feed=CountingFeed).checkpoint
    largest = (last / "model.safetensors").stat().st_size - 1
    for each in ("model.safetensors", "optimizer.safetensors"):
        (last / each).unlink()  # so that the run has something left to save
    child = [sys.executable, str(Path(__file__).with_name("train_tiny.py")), str(tmp_path)]
    limited = json.dumps(fields | {"largest_file": largest})
    full = subprocess.run([*child, limited, "resume"], capture_output=True, text=True)
    assert full.returncode == 4
    assert "Traceback" not in full.stderr
    assert "No space to save step 6" in full.stderr
    assert "step-00000004, untouched" in full.stderr
    assert checkpoint.damage(tmp_path / "checkpoints" / "step-00000004") is None
    assert not list((tmp_path / "checkpoints").glob(".tmp-*"))
    assert json.loads((tmp_path / "state.json").read_text())["state"] == "failed"
    assert train(run, tmp_path, open_feed=CountingFeed, resume=True).step == 6
