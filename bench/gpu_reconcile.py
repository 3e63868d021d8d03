"""Runs of the engine on a GPU from the command line: forecast before, metered in their first step, reconciled after.

Called by ``bench/gpu.py``, for 124M, 350M and 1.2B parameters, in a folder that is removed again (15 GB at most).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_speed

import trainledger

STEPS = 40
RUN = """
[model]
preset = "{preset}"
vocab_multiple = 64
[recipe]
seq_len = {seq_len}
global_batch = {batch}
steps = {steps}
precision = "bf16-mixed"
compile = true
[data]
path = "text.txt"
tokenizer = "bytes"
"""


def reconciled(calibration: Path, models: list[str]) -> Iterator[dict[str, Any]]:
    """Each run's reconciliation as its command prints it, and each quantity predicted and measured."""
    found_in = os.pathsep.join([str(Path(trainledger.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = dict(os.environ, TRAINLEDGER_CALIBRATION=str(calibration.resolve()), PYTHONPATH=found_in)
    for preset, seq_len, batch in (each for each in gpu_speed.SIZES if each[0] in models):
        with tempfile.TemporaryDirectory() as folder:
            text = " ".join(f"{number} times {number} is {number**2}, they say." for number in range(200_000))
            Path(folder, "text.txt").write_text(text)
            run = RUN.format(preset=preset, seq_len=seq_len, batch=batch, steps=STEPS)
            Path(folder, "run.toml").write_text(run)
            command = [sys.executable, "-m", "trainledger", "train", "run.toml", "--json"]
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            yield {"model": preset, "failed": done.stderr.splitlines()[-5:]}
            continue
        found = json.loads(done.stdout)
        quantities = {
            each["quantity"]: [each["predicted"], each["measured"], each["unexplained"]]
            for each in found["reconciliation"]["rows"]
        }
        yield {"model": preset, "quantities": quantities, "text": found["reconciliation_text"].splitlines()}
