"""What the loop pays for: annotated lines, gathered batches, checkpoints, the meter."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count, takewhile
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import trainledger as tl
from trainledger.engine.data.loader import halves
from trainledger.engine.data.mixture import train_batch
from trainledger.engine.data.prepare import prepare
from trainledger.engine.data.store import Tokens
from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.transformer import build
from trainledger.engine.train.device import synchronize
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.engine.train.ranks import Ranks
from trainledger.engine.train.saving import Saver
from trainledger.observe.measure.hardware import Pace, Sample, watched
from trainledger.spec.run import DataSpec
from trainledger.spec.units import MIB, format_nbytes, format_seconds, parse_nbytes

ANNOTATED_SIZES = {"short steps": (64, 2, 4, 64, 4, 512, 20), "long steps": (256, 4, 8, 256, 8, 8192, 4)}
ANNOTATED = """
import sys, time
import torch, torch.nn.functional as F
from torch import nn
torch.set_num_threads(1)
D, L, H, T, B, V, STEPS = map(int, sys.argv[1:])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        q, k, v = (each.view(B, T, H, -1).transpose(1, 2) for each in self.qkv(self.before(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(B, T, D))
        return x + self.down(F.gelu(self.up(self.between(x))))


model = nn.Sequential(nn.Embedding(V, D), *(Block() for _ in range(L)), nn.LayerNorm(D), nn.Linear(D, V, bias=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
least = 1e9
for _ in range(STEPS):
    ids = torch.randint(0, V, (B, T))
    began = time.process_time()
    optimizer.zero_grad()
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    least = min(least, time.process_time() - began)
print("seconds", least)
"""
LINES = """
import time
began, total = time.process_time(), 0
for at in range(300_000):
    total += at
print("seconds", (time.process_time() - began) / 600_000)
"""


def least(command: list[str]) -> float:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = next(each for each in (done.stdout + done.stderr).splitlines() if each.startswith("seconds"))
    return float(told.split()[1])


def both(program: str, arguments: tuple[int, ...]) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(program)
        words = [str(file), *map(str, arguments)]
        plain = [sys.executable, *words]
        annotated = [sys.executable, "-m", "trainledger", "annotate", "--busy", *words]
        times = [(least(plain), least(annotated)) for _ in range(3)]
    return min(each for each, _ in times), min(each for _, each in times)


def annotate() -> None:
    """What annotating costs: processor time of a step without and with it, where operations are short and long.

    A small GPT, fp32, AdamW, one thread; the least of the steps' own process times, three runs of each taken in
    turn. Also a loop of plain Python, whose lines are counted and do nothing to tensors.
    """
    for name, sizes in ANNOTATED_SIZES.items():
        plain, annotated = both(ANNOTATED, sizes)
        print(f"{name}: {1e3 * plain:.1f} ms plain, {1e3 * annotated:.1f} ms annotated, {annotated / plain:.2f} times")
    plain, annotated = both(LINES, ())
    print(f"a line of Python: {1e9 * plain:.0f} ns plain, {1e9 * annotated:.0f} ns annotated")


SECONDS, SEQ_LEN, GLOBAL_BATCH = 20, 1024, 256


def corpus(folder: Path, nbytes: int) -> DataSpec:
    """Documents of random letters."""
    drawn = np.random.default_rng(0)
    for number in range(16):
        letters = drawn.integers(97, 123, nbytes // 16, dtype=np.uint8)
        letters[::80] = 10  # line ends
        (folder / f"{number}.txt").write_bytes(letters.tobytes())
    return DataSpec(path=(str(folder / "*.txt"),), cache=str(folder / "cache"))


def loader() -> None:
    """How quickly the token store gives batches.

    A store of random tokens; batches are gathered from it at random places as training does, and as many bytes are
    copied from array to array, in turns for 20 s. The pages of the store are in memory: a disk is not timed.
    Printed: medians of the turns that nothing disturbed, tokens per second, and the ratio of a batch as the model
    takes it (inputs and targets, int64) and of its rows as they are stored to copies of the same bytes.
    """
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256, help="of text (256)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        store = prepare(corpus(Path(name), args.mebibytes * MIB), vocab_size=None, progress=True)
        store.train.read(0, store.train.tokens)  # every page in memory, every block verified
        tokens = GLOBAL_BATCH * SEQ_LEN
        stored, wide = np.zeros(tokens, dtype=store.train.dtype), np.zeros(2 * tokens, dtype=np.int64)
        into = {each.dtype: np.empty_like(each) for each in (stored, wide)}

        def rows(step: int) -> Tokens:
            return train_batch(store, seed=0, step=step, global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN)

        works: dict[str, Callable[[int], object]] = {
            "batch": lambda step: halves(rows(step)),
            "copy of the batch": lambda step: np.copyto(into[wide.dtype], wide),
            "rows": rows,
            "copy of the rows": lambda step: np.copyto(into[stored.dtype], stored),
        }
        pace = Pace()
        samples: dict[str, list[Sample]] = {each: [] for each in works}
        began = time.perf_counter()
        for step in takewhile(lambda _: time.perf_counter() - began < SECONDS, count()):
            for name_of_work, work in works.items():
                with watched(threads=1, pace=pace) as sample:
                    work(step)
                samples[name_of_work].append(sample)
    undisturbed = {name: [each.seconds for each in found if not each.disturbed] for name, found in samples.items()}
    if not all(undisturbed.values()):
        raise SystemExit("every turn was disturbed: other processes, or a processor below its full speed")
    medians = {each: median(found) for each, found in undisturbed.items()}
    print(f"{'':<18} {'median':>8}       tokens/s   times the copy")
    for each, found in medians.items():
        ratio = found / medians.get(f"copy of the {each}", found)
        print(f"{each:<18} {1000 * found:8.3f} ms {tokens / found:13,.0f} {ratio:16.2f}")
    if args.json is not None:
        args.json.write_text(json.dumps({"seconds": medians, "tokens": tokens}))


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


def checkpoint() -> None:
    """How long a checkpoint stops the steps.

    The state of a model (weights and Adam's moments, fp32) is saved in the foreground and in the background, in
    turns, onto the disk of ``--dir``. In the background the steps stand still while tensors are copied to memory
    that is kept for it, and while the finished checkpoint is given its name; the first time that memory is new.
    Printed: medians of both, their ratio, and how much slower a matmul of matrices runs while the background
    writes.
    """
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter)
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


DEVICE = torch.device("cuda" if "cuda" in sys.argv else "cpu")  # of metering
LARGER = 4 if DEVICE.type == "cuda" else 1
ROUNDS, STEPS = 30, 5  # of metering


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


def metering() -> None:
    """What metering costs a loop.

    Three loops of the same small model take turns: plain, metered, plain again. The ratio is of processor time,
    which other programs do not add to, and of wall time in the rounds that nothing else disturbed. The microseconds
    that metering takes in a step are those of a model so small that they show. A recorded step and those line by
    line are timed once.
    """
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
