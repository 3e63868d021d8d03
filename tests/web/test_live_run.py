"""A run that trains, is killed and resumed by the command line, as the page sees it all the while."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainledger.web import answers
from trainledger.web.calculators.runs import runs_in

pytestmark = pytest.mark.process
RUN = """
[model]
vocab_size = 257
d_model = 64
n_layers = 2
max_seq_len = 64
attention.n_heads = 4
feed_forward.d_ff = 128

[recipe]
seq_len = 64
global_batch = 4
steps = 200
precision = "fp32"
checkpoints.every = 20

[data]
path = ["text.txt"]
tokenizer = "bytes"
validation_fraction = 0.05
"""


def start(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "trainledger", "train", "run.toml", *more]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # several wait for each other where all cores are busy
    return subprocess.Popen(command, cwd=folder, env=one_thread, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def seen_until(folder: Path, holds: Callable[[dict[str, Any]], bool], seconds: float = 120) -> dict[str, Any]:
    """The first view of the newest run that holds, asked for again and again as the page does."""
    calculators = {"runs": runs_in(folder / "runs")}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        seen = answers.view("runs", {}, calculators=calculators)
        if holds(seen):
            return seen
        time.sleep(0.1)
    raise AssertionError(f"not seen within {seconds} s: {seen['verdict']}")


def step_of(seen: dict[str, Any]) -> int:
    _, _, after = seen["verdict"].partition("step ")
    digits = after.split(" ")[0].replace(",", "")
    return int(digits) if digits.isdigit() else 0


def test_the_page_follows_a_run_that_is_killed_and_resumed(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 4000)
    child = start(tmp_path)
    try:
        early = seen_until(tmp_path, lambda seen: "running" in seen["verdict"] and step_of(seen) >= 25)
        assert early["again_seconds"]
        assert " of 200" in early["verdict"]
        later = seen_until(tmp_path, lambda seen: step_of(seen) > step_of(early))
        assert later["drawings"][0]["title"] == "Loss"
    finally:
        child.kill()
        child.wait()
    killed = seen_until(tmp_path, lambda seen: "killed" in seen["verdict"])
    assert killed["again_seconds"] > early["again_seconds"]
    assert killed["tone"] == "bad"
    child = start(tmp_path, "--resume")
    try:
        ended = seen_until(tmp_path, lambda seen: "running" not in seen["verdict"] and "killed" not in seen["verdict"])
    finally:
        child.kill()
        child.wait()
    assert step_of(ended) == 200
    assert ended["tone"] == "good", ended["verdict"]
