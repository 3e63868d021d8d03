"""A save that meets a full disk, a directory that may not be written any longer, or a clock that goes backwards."""

from __future__ import annotations

import os
import random
import resource
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_run import CountingFeed, tiny_run

from trainledger.engine.train.engine import train
from trainledger.engine.train.observer import Observer
from trainledger.engine.train.records import read_lines
from trainledger.engine.train.run_directory import all_checkpoints, damage, read_state
from trainledger.engine.train.stop import CannotSave
from trainledger.spec.run import Run


class OnceSaved(Observer):
    """Does something when the first checkpoint is kept, and takes it back when the session ends."""

    def __init__(self, do: Callable[[], object], undo: Callable[[], object]) -> None:
        self.do, self.undo = do, undo

    def on_checkpoint(self, step: int, path: Path, seconds: float) -> None:
        self.do()

    def on_stop(self) -> None:
        self.undo()


def weights(run_dir: Path) -> bytes:
    return (all_checkpoints(run_dir)[-1] / "model.safetensors").read_bytes()


def save_under(run: Run, run_dir: Path, do: Callable[[], object], undo: Callable[[], object]) -> str:
    """What a run says that cannot write its second checkpoint; the first one is whole, and it ends the same later."""
    with pytest.raises(CannotSave) as caught:
        train(run, run_dir, open_feed=CountingFeed, observers=[OnceSaved(do, undo)])
    (kept,) = all_checkpoints(run_dir)
    assert kept.name == "step-00000002"
    assert damage(kept) is None
    assert caught.value.exit_code == 4
    assert "step-00000002, untouched" in str(caught.value)
    assert not list((run_dir / "checkpoints").glob(".tmp-*"))
    assert train(run, run_dir, open_feed=CountingFeed, resume=True).step == 6
    return str(caught.value)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_is_full_at_any_byte_of_a_save(tmp_path: Path, asynchronous: bool) -> None:
    """The kernel's refusal at a random byte: files may be so large and no larger."""
    run = tiny_run(**{"checkpoints.asynchronous": asynchronous})
    expected = train(run, tmp_path / "whole", open_feed=CountingFeed).checkpoint
    largest = max(each.stat().st_size for each in expected.iterdir())
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    chance = random.Random(7)
    for number in range(6):
        run_dir = tmp_path / str(number)
        # Above the records of a step, which are a sentence of their own, and below the largest file.
        at = chance.randrange(20_000, largest)
        said = save_under(
            run,
            run_dir,
            lambda at=at: resource.setrlimit(resource.RLIMIT_FSIZE, (at, hard)),  # type: ignore[misc]
            lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard)),
        )
        assert said.startswith("No space to save step 4"), at
        assert weights(run_dir) == weights(tmp_path / "whole")


def test_a_directory_that_may_not_be_written_any_longer(tmp_path: Path) -> None:
    run, checkpoints = tiny_run(), tmp_path / "run" / "checkpoints"
    root = os.geteuid() == 0

    def take() -> None:
        checkpoints.chmod(0o555)
        if root:  # for whom permissions hold only where it gives up being root
            for each in checkpoints.parents:  # nobody else could look into them
                each.chmod(each.stat().st_mode | stat.S_IXGRP | stat.S_IXOTH)
            os.seteuid(65534)

    def give() -> None:
        if root:
            os.seteuid(0)
        checkpoints.chmod(0o755)

    said = save_under(run, tmp_path / "run", take, give)
    assert said.startswith("Step 4 cannot be saved")
    assert "Permission denied" in said


def test_a_clock_that_goes_backwards_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run()
    train(run, tmp_path / "whole", open_feed=CountingFeed)
    real, started = time.time, time.time()
    monkeypatch.setattr(time, "time", lambda: started - 1000 * (real() - started))
    finished = train(run, tmp_path / "back", open_feed=CountingFeed)
    for number, each in enumerate(all_checkpoints(tmp_path / "back")):
        os.utime(each, (1000 - number, 1000 - number))  # the newest by its step is the oldest by its time
    (finished.checkpoint / "optimizer.safetensors").unlink()
    said: list[str] = []
    train(run, tmp_path / "back", open_feed=CountingFeed, resume=True, say=said.append)
    assert weights(tmp_path / "back") == weights(tmp_path / "whole")
    for name in ("back", "whole"):
        steps = [each for each in read_lines(tmp_path / name / "metrics.jsonl") if "loss" in each]
        assert [each["step"] for each in steps] == [1, 2, 3, 4, 5, 6]
        assert all(each["seconds"] > 0 for each in steps)
    state = read_state(tmp_path / "back")
    assert state is not None
    assert state["seconds"] > 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_whose_directory_was_deleted_does_not_end_as_if_it_were_there(tmp_path: Path, asynchronous: bool) -> None:
    run, run_dir = tiny_run(**{"checkpoints.asynchronous": asynchronous}), tmp_path / "run"
    deleting = OnceSaved(lambda: shutil.rmtree(run_dir, ignore_errors=True), lambda: None)
    with pytest.raises(OSError, match=r"was deleted while the run went on"):
        train(run, run_dir, open_feed=CountingFeed, observers=[deleting])
