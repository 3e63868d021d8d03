"""A small run started by the command line in processes of its own, which tests then signal, stop and starve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RUN = """
[model]
vocab_size = 512
d_model = 32
n_layers = 2
max_seq_len = 32
attention.n_heads = 4
feed_forward.d_ff = 64
[recipe]
seq_len = 32
global_batch = 8
micro_batch = 2
steps = {steps}
[recipe.checkpoints]
every = {every}
[recipe.evaluation]
sequences = 8
[layout]
{layout}
[cluster]
count = {ranks}
[data]
path = ["text.txt"]
"""
SECONDS = 300


def write(folder: Path, *, layout: str = "", ranks: int = 1, steps: int = 100_000, every: int = 1000) -> None:
    """The run file and its text, in a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text("\n\n".join(f"sentence {each} of a text for ranks" for each in range(3000)))
    (folder / "run.toml").write_text(RUN.format(layout=layout, ranks=ranks, steps=steps, every=every))


def start(
    folder: Path, *words: str, ranks: int = 1, redirect: str = "", environment: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """`trainledger train` in a folder; ``redirect`` is for the shell that starts it, as a person would write it."""
    command = [sys.executable, "-m", "trainledger", "train", "run.toml", *words]
    if ranks > 1:
        command += ["--ranks", str(ranks)]
    if redirect:
        command = ["sh", "-c", f'exec "$@" {redirect}', "sh", *command]
    there = os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {})
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=folder, env=there, text=True, stdout=pipe, stderr=pipe)
    _STARTED.append(process)
    return process


_STARTED: list[subprocess.Popen[str]] = []


def end_all() -> None:
    """End what a test has started and left: torchrun's agent ends its ranks."""
    while _STARTED:
        process = _STARTED.pop()
        if process.poll() is None:
            process.terminate()
            try:
                process.communicate(timeout=60)
            except (subprocess.TimeoutExpired, ValueError):  # ValueError: the test has closed its pipes
                process.kill()
                process.wait()


def until_step(folder: Path, step: int, process: subprocess.Popen[str]) -> Path:
    """Wait until a run has written the record of a step; its directory."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        for each in folder.glob("runs/*/metrics.jsonl"):
            if each.read_text().count('"loss"') >= step:
                return each.parent
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError(f"no step {step} within {SECONDS} s")


def children(process: subprocess.Popen[str]) -> list[int]:
    """The processes that a process has started, the first one first: of `--ranks` its ranks."""
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = {int(pid): _environment(int(pid)).get("RANK") for pid in listed}
    return [pid for _, pid in sorted((int(rank), pid) for pid, rank in ranks.items() if rank is not None)]


def _environment(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(each.split("=", 1) for each in entries if "=" in each)


def end(process: subprocess.Popen[str], seconds: float = SECONDS) -> tuple[int, str, str]:
    """Wait for the end of a process: its exit code and what it said."""
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def state_of(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "state.json").read_text())
    return found


def lines_with(text: str, words: Sequence[str]) -> list[str]:
    """The lines that hold all words."""
    return [each for each in text.splitlines() if all(word in each for word in words)]
