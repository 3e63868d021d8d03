"""The engine's losses beside those of a plain PyTorch loop: ``python tools/loss_curves.py [--seeds 3] [--steps 300]``.

Both begin with the same weights, read the same tokens of Python's standard library in the same order, and follow the
same schedule; the plain loop is a page of PyTorch without anything of the engine's. A pair of runs for each seed.
Printed: the largest difference of a loss, and the mean difference of the last losses over the seeds with its standard
error. ``--figure docs/images/loss-curves.svg`` draws the pairs.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import nn

from trainledger.answers.load import load
from trainledger.engine.data.loader import halves
from trainledger.engine.data.mixture import train_batch
from trainledger.engine.data.prepare import prepare
from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.transformer import build
from trainledger.engine.train.engine import train
from trainledger.engine.train.records import read_lines
from trainledger.engine.train.step import derive
from trainledger.report.chart import COLOURS, Axis, Chart, Line
from trainledger.report.draw.chart import standalone
from trainledger.spec.run import Run

FIELDS = {
    "seq_len": 128, "global_batch": 8, "learning_rate": 2e-3, "precision": "fp32", "evaluation.every": 10**6,
    "checkpoints.every": 10**6, "schedule.warmup_steps": 30,
}  # fmt: skip
MODEL = {
    "preset": "gpt2", "n_layers": 4, "d_model": 128, "attention.n_heads": 4, "feed_forward.d_ff": 512,
    "vocab_size": 512, "max_seq_len": 128,
}  # fmt: skip
LAST = 20  # losses that are averaged at the end of a run


def plain(run: Run) -> list[float]:
    """The losses of a loop that a person would write, from the paper's formulas."""
    recipe, store = run.recipe, prepare(run.data, vocab_size=run.model.vocab_size, progress=False)
    model = build(run.model, recipe)
    initialize(model, seed=derive(recipe.seed, "init"))
    decayed = [each for each in model.parameters() if each.ndim >= 2]
    others = [each for each in model.parameters() if each.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    losses = []
    for step in range(recipe.total_steps):
        warm = (step + 1) / 30
        left = (step - 29) / (recipe.total_steps - 30)  # 0 at the last warm step, 1 at the last of all
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (warm if step < 30 else 0.1 + 0.9 * (1 + math.cos(math.pi * left)) / 2)
        inputs, targets = halves(train_batch(store, seed=recipe.seed, step=step, global_batch=8, seq_len=128))
        logits = model(inputs)
        loss = nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def engine(run: Run, folder: Path) -> list[float]:
    train(run, folder)
    return [each["loss"] for each in read_lines(folder / "metrics.jsonl") if "loss" in each]


def drawn(pairs: list[tuple[list[float], list[float]]]) -> str:
    """The pairs as curves: the engine's as lines, the plain loop's as points on them."""
    marks = []
    for seed, (ours, theirs) in enumerate(pairs):
        steps, colour = list(range(1, len(ours) + 1)), COLOURS[seed % len(COLOURS)]
        marks.append(Line(steps, ours, f"engine, seed {seed}", colour))
        points = steps[::10], theirs[::10]
        marks.append(Line(*points, f"plain loop, seed {seed}", colour, width=0, symbol="circle", size=5))
    title = "Loss of the engine and of a plain PyTorch loop"
    return standalone(Chart(title, tuple(marks), Axis("step"), Axis("loss, nats per token")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    pairs = []
    with tempfile.TemporaryDirectory() as name:
        for seed in range(args.seeds):
            data = {"tokenizer": "bytes", "cache": f"{name}/cache"}
            recipe = {**FIELDS, "steps": args.steps, "seed": seed}
            run = load({"model": MODEL, "recipe": recipe, "data": data, "cluster": {"backend": "cpu"}})
            pairs.append((engine(run, Path(name) / f"seed-{seed}"), plain(run)))
    print("seed   last losses: engine   plain loop   largest difference of any step")
    ends = []
    for seed, (ours, theirs) in enumerate(pairs):
        largest = max(abs(one - other) for one, other in zip(ours, theirs, strict=True))
        ends.append(mean(ours[-LAST:]) - mean(theirs[-LAST:]))
        print(f"{seed:4}   {mean(ours[-LAST:]):20.6f}   {mean(theirs[-LAST:]):10.6f}   {largest:30.2e}")
    error = stdev(ends) / math.sqrt(len(ends)) if len(ends) > 1 else math.nan
    print(f"difference of the last {LAST} losses: {mean(ends):+.2e}, standard error {error:.1e} over {len(ends)} pairs")
    if args.figure is not None:
        args.figure.write_text(drawn(pairs), encoding="utf-8")


if __name__ == "__main__":
    main()
