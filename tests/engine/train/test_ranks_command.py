"""`train --ranks`: each rank computes, keeps, holds and sends what its account says; a lost rank is replaced."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import commanded
import pytest

from trainledger.engine.train.records import read_lines
from trainledger.engine.train.run_directory import all_checkpoints
from trainledger.ledger.ranks import read_ranks

pytestmark = pytest.mark.process


def start(folder: Path, axis: str, steps: int) -> subprocess.Popen[str]:
    commanded.write(folder, layout=f"{axis} = 2", ranks=2, steps=steps, every=2)
    return commanded.start(folder, ranks=2)


@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_a_rank_does_what_its_account_says(tmp_path: Path, axis: str) -> None:
    out, err = (process := start(tmp_path, axis, 6)).communicate(timeout=300)
    assert process.returncode == 0, err
    (run_dir,) = (tmp_path / "runs").iterdir()
    ranks = read_ranks(run_dir)
    assert [each.rank for each in ranks] == [0, 1]
    for each in ranks:
        assert each.measured == each.predicted, each
        assert each.measured.sent_nbytes > 0
    assert re.search(r"0 \(every rank\) +equal +equal +equal +equal", out)


def test_a_killed_rank_is_replaced_and_the_run_goes_on(tmp_path: Path) -> None:
    process = start(tmp_path, "shard", 60)
    deadline = time.monotonic() + 200
    while not (found := list((tmp_path / "runs").glob("*/checkpoints/step-*"))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert found, process.communicate()[1]
    os.kill(commanded.children(process)[-1], signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert all_checkpoints(run_dir)[-1].name == "step-00000060"
    lines = list(read_lines(run_dir / "metrics.jsonl"))
    assert any(each.get("event") == "resume" for each in lines)
    assert sorted({each["step"] for each in lines if "loss" in each}) == list(range(1, 61))


def test_what_a_restart_does_not_mend_is_said_once_and_not_tried_again(tmp_path: Path) -> None:
    """A begun run without --resume: the ranks that torchrun starts again must not go on with it by themselves."""
    process = start(tmp_path, "shard", 4)
    assert process.wait(timeout=300) == 0, process.communicate()[1]
    (run_dir,) = (tmp_path / "runs").iterdir()
    before = (run_dir / "metrics.jsonl").read_bytes()
    _, err = (again := start(tmp_path, "shard", 4)).communicate(timeout=300)
    assert again.returncode == 2
    assert err.count("is already finished") == 1
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_what_ranks_do_not_train_is_said_once_and_leaves_nothing(tmp_path: Path) -> None:
    commanded.write(tmp_path, layout="shard = 2", ranks=2, steps=4, every=2)
    _, err = (process := commanded.start(tmp_path, "--set", "recipe.optimizer=sgd", ranks=2)).communicate(timeout=300)
    assert process.returncode == 2
    assert err.count("recipe.optimizer.implementation = 'fused'") == 1
    assert not (tmp_path / "runs").exists()
