"""How long a checkpoint stops the steps: ``python bench/checkpoint.py [--nbytes 1GB] [--rounds 5] [--json OUT]``.

The state of a model (weights and Adam's moments, fp32) is saved in the foreground and in the background, in turns, onto
the disk of ``--dir``. In the background the steps stand still while tensors are copied to memory that is kept for it,
and while the finished checkpoint is given its name; the first time that memory is new. Printed: medians of both, their
ratio, and how much slower a matmul of matrices runs while the background writes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

from trainledger.engine.train.ranks import Ranks
from trainledger.engine.train.saving import Saver
from trainledger.spec.units import format_nbytes, format_seconds, parse_nbytes

STATES = 3  # of each parameter: itself and Adam's moments, 4 bytes each


def model_of(nbytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Matrices of 16 MiB with gradients and Adam's moments."""
    side = 2048
    model = nn.ParameterDict({f"w{at}": torch.randn(side, side) for at in range(nbytes // (STATES * 4 * side**2))})
    optimizer = torch.optim.AdamW(model.parameters())
    for each in model.parameters():
        each.grad = torch.randn_like(each)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def saved(saver: Saver, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """Seconds for which steps stand still, and until the checkpoint has its name."""
    os.sync()  # what was written before must not slow this one down
    start = time.perf_counter()
    saver.begin(step, model, optimizer, {})
    stalled = time.perf_counter() - start
    while saver.writing:
        time.sleep(0.01)
    naming = time.perf_counter()
    saver.finish()
    end = time.perf_counter()
    return stalled + end - naming, end - start


def matmuls(seconds: float) -> float:
    """Matmuls of matrices in a second."""
    a, count, start = torch.randn(512, 512), 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        a @ a
        count += 1
    return count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nbytes", type=parse_nbytes, default=parse_nbytes("1GB"), help="of weights and moments (1GB)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to write (a temporary directory)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model, optimizer = model_of(args.nbytes)
    nbytes = STATES * sum(each.nbytes for each in model.parameters())
    foreground, background, whole, slowed = [], [], [], []
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        savers = [
            Saver(Path(name) / each, Ranks(), None, background=each == "background") for each in ("f", "background")
        ]
        first, _ = saved(savers[1], 0, model, optimizer)
        for step in range(1, args.rounds + 1):
            foreground.append(saved(savers[0], step, model, optimizer)[0])
            stalled, written = saved(savers[1], step, model, optimizer)
            background.append(stalled)
            whole.append(written)
            alone = matmuls(0.5)
            savers[1].begin(step + 10**6, model, optimizer, {})
            slowed.append(alone / matmuls(0.5) - 1)
            savers[1].finish()
        savers[1].close()
    ratio = median(background) / median(foreground)
    print(f"{format_nbytes(nbytes)} of weights and moments, medians of {args.rounds}")
    background_told = f"{format_seconds(median(background))} ({ratio:.1%}; the first time {format_seconds(first)})"
    print(f"steps stand still for {format_seconds(median(foreground))} in the foreground")
    print(f"                      {background_told} in the background")
    print(f"in the background it is written after {format_seconds(median(whole))};", end=" ")
    print(f"matmuls are {median(slowed):+.0%} slower meanwhile")
    if args.json is not None:
        figures = {
            "nbytes": nbytes, "foreground_seconds": median(foreground), "background_seconds": median(background),
            "first_background_seconds": first, "written_seconds": median(whole), "slower": median(slowed),
        }  # fmt: skip
        args.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
