"""What a checkpoint directory promises, with real files cut short, flipped and filled up."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import CountingFeed, tiny_run

from trainledger.engine.nn.transformer import build
from trainledger.engine.train import run_directory, saving
from trainledger.engine.train.engine import train
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.engine.train.ranks import Ranks
from trainledger.spec.problem import InvalidInput

FILES = ("model.safetensors", "optimizer.safetensors", "training.json", "manifest.json")


Trained = Callable[..., Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Copies the directory of a tiny run, trained once for each recipe, and gives its newest checkpoint."""
    run_dirs: dict[str, Path] = {}

    def copied(to: Path, **recipe: Any) -> Path:
        if str(recipe) not in run_dirs:
            there = tmp_path_factory.mktemp("trained")
            run_dirs[str(recipe)] = train(tiny_run(**recipe), there, open_feed=CountingFeed).run_dir
        shutil.copytree(run_dirs[str(recipe)], to, dirs_exist_ok=True)
        return run_directory.all_checkpoints(to)[-1]

    return copied


def names(run_dir: Path) -> list[str]:
    return [each.name for each in run_directory.all_checkpoints(run_dir)]


@pytest.mark.parametrize(
    ("file", "how"),
    [
        *((file, how) for file in FILES for how in ("cut short", "a bit flipped", "emptied", "missing")),
        *((file, "of another run") for file in FILES),
        *((file, "nested") for file in FILES[2:]),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_the_run_ends_the_same(
    file: str, how: str, tmp_path: Path, trained: Trained
) -> None:
    checkpoint = trained(tmp_path)
    expected = (checkpoint / "model.safetensors").read_bytes()
    harmed = checkpoint / file
    content = harmed.read_bytes()
    if how == "missing":
        harmed.unlink()
    elif how == "of another run":
        harmed.write_bytes((trained(tmp_path / "other", seed=3) / file).read_bytes())
    elif how == "nested":
        harmed.write_bytes(b"[" * 100_000)
    elif how == "a bit flipped":
        # In the middle: of the manifest that is a letter of a hash or a name, of the others any byte.
        at = len(content) // 2
        harmed.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
    else:
        harmed.write_bytes(content[: len(content) // 2 if how == "cut short" else 0])
    said: list[str] = []
    latest = run_directory.latest_valid(tmp_path, said.append)
    assert latest is not None
    assert latest.name == "step-00000004"
    assert len(said) == 1
    assert str(checkpoint) in said[0]

    again = train(tiny_run(), tmp_path, open_feed=CountingFeed, resume=True, say=said.append)
    assert (again.checkpoint / "model.safetensors").read_bytes() == expected
    aside = tmp_path / "checkpoints" / "damaged-1-step-00000006"
    assert aside.is_dir(), "a damaged checkpoint is set aside, not deleted"
    assert any(str(aside) in each for each in said)


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "optimizer.old.safetensors"])
def test_a_file_that_no_manifest_names_is_not_read_with_the_others(name: str, tmp_path: Path, trained: Trained) -> None:
    checkpoint = trained(tmp_path)
    expected = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / name).write_bytes(expected)
    assert run_directory.damage(checkpoint) == f"holds {name}, which its manifest does not name"
    again = train(tiny_run(), tmp_path, open_feed=CountingFeed, resume=True)
    assert (again.checkpoint / "model.safetensors").read_bytes() == expected


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"step": 4}, "has a training.json of step 4"),
        ({"threads": "one"}, "has a damaged training.json (threads = 'one' is not a number of threads)"),
        ({"loss": [1.0]}, "has a damaged training.json (loss = [1.0] is not a loss)"),
    ],
)
def test_facts_that_nothing_can_go_on_from_are_damage(
    change: dict[str, Any], sentence: str, tmp_path: Path, trained: Trained
) -> None:
    """With its hash in the manifest put right, as a hand would do it that edits both."""
    path = trained(tmp_path)
    training, manifest = path / "training.json", path / "manifest.json"
    training.write_text(json.dumps(json.loads(training.read_text()) | change))
    told = json.loads(manifest.read_text())
    content = training.read_bytes()
    told["files"]["training.json"] = {"nbytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.write_text(json.dumps(told))
    assert run_directory.damage(path) == sentence


@pytest.mark.parametrize("ranks", [0, 10**12, True, "two", None, 2])
def test_a_manifest_of_so_many_ranks_is_damage(ranks: object, tmp_path: Path, trained: Trained) -> None:
    path = trained(tmp_path)
    told = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(told | {"ranks": ranks}))
    assert run_directory.damage(path) is not None


def test_a_checkpoint_of_another_run_is_passed_over(tmp_path: Path, trained: Trained) -> None:
    checkpoint, other = trained(tmp_path / "run"), trained(tmp_path / "other", steps=8, seed=1)
    expected = (checkpoint / "model.safetensors").read_bytes()
    shutil.rmtree(checkpoint)
    there = shutil.copytree(other, checkpoint.with_name("step-00000008"))
    said: list[str] = []
    again = train(tiny_run(), tmp_path / "run", open_feed=CountingFeed, resume=True, say=said.append)
    assert (again.checkpoint / "model.safetensors").read_bytes() == expected
    assert any("step-00000008 is a checkpoint of run" in each and "skipped" in each for each in said)
    assert not there.exists()
    assert (there.parent / "damaged-1-step-00000008").is_dir()


def test_only_checkpoints_of_another_run_are_refused(tmp_path: Path, trained: Trained) -> None:
    """The run's own may lie elsewhere: nothing is begun anew beside them."""
    shutil.rmtree(trained(tmp_path / "run").parent)
    other = trained(tmp_path / "other", steps=8, seed=1)
    there = shutil.copytree(other, tmp_path / "run" / "checkpoints" / other.name)
    with pytest.raises(InvalidInput, match=r"is a checkpoint of run .*, not of"):
        train(tiny_run(), tmp_path / "run", open_feed=CountingFeed, resume=True)
    assert there.is_dir()


@pytest.mark.parametrize("content", [None, b"", b"\0" * 100, b"[model", b'[model]\nvocab_size = "many"'])
def test_a_damaged_run_file_is_written_anew_from_its_own(
    content: bytes | None, tmp_path: Path, trained: Trained
) -> None:
    trained(tmp_path)
    path, said = tmp_path / "run.toml", list[str]()
    whole = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    train(tiny_run(), tmp_path, open_feed=CountingFeed, resume=True, say=said.append)
    assert path.read_bytes() == whole
    assert any("is written anew" in each for each in said)
    path.unlink()
    with pytest.raises(InvalidInput):
        train(tiny_run(learning_rate=0.5), tmp_path, open_feed=CountingFeed, resume=True)


def test_with_every_checkpoint_damaged_the_run_starts_again(tmp_path: Path, trained: Trained) -> None:
    expected = (trained(tmp_path) / "model.safetensors").read_bytes()
    for each in run_directory.all_checkpoints(tmp_path):
        (each / "optimizer.safetensors").unlink()
    said: list[str] = []
    again = train(tiny_run(), tmp_path, open_feed=CountingFeed, resume=True, say=said.append)
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
    facts = saving.load(finished.checkpoint, model, optimizer)
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


@pytest.mark.process
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
    assert run_directory.damage(tmp_path / "checkpoints" / "step-00000004") is None
    assert not list((tmp_path / "checkpoints").glob(".tmp-*"))
    assert json.loads((tmp_path / "state.json").read_text())["state"] == "failed"
    assert train(run, tmp_path, open_feed=CountingFeed, resume=True).step == 6


@pytest.mark.parametrize("background", [False, True])
def test_a_saver_tells_when_there_is_nothing_to_wait_for(background: bool, tmp_path: Path) -> None:
    run = tiny_run()
    model = build(run.model, run.recipe)
    saver = saving.Saver(tmp_path, Ranks(), None, background=background)
    saver.begin(1, model, build_optimizer(model, run.recipe), {})
    assert saver.pending
    deadline = time.monotonic() + 60
    while saver.writing:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert run_directory.damage(saver.finish()) is None
    assert not saver.pending
    saver.close()
