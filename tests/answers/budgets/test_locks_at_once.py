"""Processes that lock targets into one file at the same time lose nothing of one another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainledger.answers.budgets.check import lock
from trainledger.answers.budgets.lockfile import read_lock
from trainledger.spec.durable import held

RUN = """
[model]
preset = "gpt2"
[recipe]
seq_len = 32
global_batch = 8
micro_batch = 2
steps = 10
"""
# Locks one run file. All have read the lock and know their figures before any of them writes, which takes a while.
ONE_OF_SEVERAL = """
import sys, time
from pathlib import Path
from trainledger.answers.budgets import check

name, others = sys.argv[1], sys.argv[2:]
write = check.write_lock

def slowly(path, targets):
    time.sleep(0.1)
    write(path, targets)

def say(what):
    if not what:
        Path(f"{name}.reckoned").touch()
        while not all(Path(f"{each}.reckoned").exists() for each in others):
            time.sleep(0.01)

check.write_lock = slowly
check.lock([name], root=Path.cwd(), say=say)
"""
HOLDS = """
import sys
from pathlib import Path
from trainledger.spec.durable import held

with held(Path(sys.argv[1]), wait=False):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_no_process_loses_what_another_locks(project: Path) -> None:
    names = [f"{each}.toml" for each in "abcd"]
    for name in names:
        (project / name).write_text(RUN)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_OF_SEVERAL, name, *(each for each in names if each != name)],
            cwd=project, stderr=subprocess.PIPE, text=True,
        )
        for name in names
    ]  # fmt: skip
    for each in started:
        _, err = each.communicate(timeout=120)
        assert each.returncode == 0, err
    assert list(read_lock(project / "trainledger.lock")) == names
    left = {each.name for each in project.iterdir()}
    assert left == {"trainledger.lock", *names, *(f"{each}.reckoned" for each in names)}


def test_all_targets_keep_what_came_in_meanwhile(project: Path) -> None:
    """Who locks everything takes out what was there and is gone, and not what it has not seen."""
    for name in ("run.toml", "other.toml", "gone.toml"):
        (project / name).write_text(RUN)
    lock(["gone.toml"], root=project)
    (project / "gone.toml").unlink()

    def another(what: str) -> None:
        if what == "run.toml":
            lock(["other.toml"], root=project)

    made = lock(root=project, say=another)
    assert list(read_lock(project / "trainledger.lock")) == ["other.toml", "run.toml"]
    assert made.gone == ("gone.toml",)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_one_process_holds_another_does_not_get(kind: str, project: Path) -> None:
    path = project / "held"
    if kind == "folder":
        path.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, os.fspath(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(BlockingIOError), held(path, wait=False):
        raise AssertionError("two hold it")
    holder.kill()
    holder.communicate()
    with held(path, wait=True):
        pass
