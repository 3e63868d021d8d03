"""What metering costs a loop: ``python bench/metering.py [DEVICE]``.

Three loops of the same small model take turns: plain, metered, plain again. The ratio is of processor time, which other
programs do not add to, and of wall time in the rounds that nothing else disturbed. The microseconds that metering takes
in a step are those of a model so small that they show. A recorded step and those line by line are timed once.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

import trainledger as tl
from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.transformer import build
from trainledger.engine.train.device import synchronize
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.observe.measure.hardware import watched

ROUNDS, STEPS = 30, 5
DEVICE = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
LARGER = 4 if DEVICE.type == "cuda" else 1


def loop() -> tuple[Callable[[], None], torch.nn.Module, torch.optim.Optimizer]:
    sizes = {"vocab_size": 2048, "d_model": 192 * LARGER, "n_layers": 4, "max_seq_len": 256}
    sizes |= {"attention": {"n_heads": 4}, "feed_forward": {"d_ff": 768 * LARGER}}
    run = tl.load({"model": sizes, "recipe": {"seq_len": 256, "global_batch": 4, "steps": 1}})
    with DEVICE:
        model = build(run.model, run.recipe)
    initialize(model, seed=0)
    optimizer = build_optimizer(model, run.recipe)
    inputs_BT, targets_BT = (torch.randint(0, 2048, (4 * LARGER, 256), device=DEVICE) for _ in range(2))

    def step() -> None:
        loss = F.cross_entropy(model(inputs_BT).flatten(0, 1), targets_BT.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, model, optimizer


def timed(step: Callable[[], None], times: int = STEPS) -> tuple[float, float, bool]:
    """Processor and wall seconds of a step, and whether something else disturbed it."""
    processor = time.process_time()
    with watched(torch.get_num_threads()) as sample:
        for _ in range(times):
            step()
        synchronize(DEVICE)
    return (time.process_time() - processor) / times, sample.seconds / times, sample.disturbed


def tiny() -> tuple[Callable[[], None], torch.nn.Module, torch.optim.Optimizer]:
    """A loop whose steps take next to nothing."""
    model = torch.nn.Linear(8, 8, device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens_BT = torch.zeros(8, 8, dtype=torch.long, device=DEVICE)

    def step() -> None:
        model(tokens_BT.float()).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, model, optimizer


def microseconds(folder: Path) -> float:
    """What metering adds to a step, as the least of several measurements of each."""
    bare, *_ = tiny()
    metered, *hooked = tiny()
    with tl.meter_loop(*hooked, folder, say=lambda sentence: None):
        least = [min(timed(each, 200)[1] for _ in range(7)) for each in (bare, metered)]
    return 1e6 * (least[1] - least[0])


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        plain, *_ = loop()
        again, *_ = loop()
        metered, *hooked = loop()
        meter = tl.meter_loop(*hooked, Path(folder) / "run", say=lambda sentence: None)
        loops = {"plain": plain, "metered": metered, "plain again": again}
        for each in loops.values():
            timed(each, 3)
        found: dict[str, list[tuple[float, float, bool]]] = {name: [] for name in loops}
        for turn in range(ROUNDS):
            for name, step in list(loops.items())[:: 1 if turn % 2 else -1]:
                found[name].append(timed(step))
        meter.close()
        record: dict[str, object] = {
            "torch": torch.__version__,
            "step_seconds": median(each[1] for each in found["plain"]),
        }
        for name in ("metered", "plain again"):
            processor = median(mine[0] / theirs[0] for mine, theirs in zip(found[name], found["plain"], strict=True))
            quiet = [
                mine[1] / theirs[1]
                for mine, theirs in zip(found[name], found["plain"], strict=True)
                if not (mine[2] or theirs[2])
            ]
            record[name] = {"processor": processor, "wall": median(quiet) if quiet else None, "rounds": len(quiet)}
        deep, *hooked = loop()
        with tl.meter_loop(*hooked, Path(folder) / "deep", deep=2, say=lambda sentence: None):
            costs = [timed(deep, 1)[0] for _ in range(9)]
        record["microseconds"] = microseconds(Path(folder) / "tiny")
        usual = median(each[0] for each in found["plain"])
        record["deep"] = {"recorded": costs[1] / usual, "line by line": median(costs[2:7]) / usual}
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
