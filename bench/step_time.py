"""Predicted step time beside the measured one: ``python bench step_time [--json OUT] [--rounds 8] [--seconds 0.4]``.

Twelve configurations of the engine on this machine: width, depth, batch, sequence, number format, compiled and not.
The machine is calibrated in the same run. Then the configurations take turns, round after round, so that a disturbance
costs each of them little; samples during which other processes took the processor (/proc/stat) are thrown away, and the
median of the others is held against the prediction. Where nothing undisturbed is left the fastest sample stands in, and
the line says so.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.utils.deterministic

from trainledger.answers.load import load
from trainledger.engine.nn.init import initialize
from trainledger.engine.train.device import keep_freed_memory, set_fp32_matmuls
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.engine.train.precision import build_model
from trainledger.engine.train.step import Clock, optimizer_step
from trainledger.forecast.predict.step import StepTime, step_time
from trainledger.ledger.model.parameters import leaves_of
from trainledger.ledger.step import account
from trainledger.observe.measure.hardware import Sample, watched
from trainledger.observe.measure.machine import measure_machine
from trainledger.spec.calibration import Calibration
from trainledger.spec.run import Run

# width, layers, sequences, tokens of each, precision, compiled, family
CONFIGURATIONS: tuple[tuple[int, int, int, int, str, bool, str], ...] = (
    (128, 2, 8, 128, "fp32", False, "llama"),
    (128, 2, 8, 128, "fp32", True, "llama"),
    (64, 8, 16, 64, "fp32", False, "llama"),
    (256, 4, 4, 256, "fp32", False, "llama"),
    (256, 4, 4, 256, "bf16-mixed", False, "llama"),
    (256, 4, 4, 256, "bf16-mixed", True, "llama"),
    (384, 6, 2, 512, "fp32", False, "llama"),
    (384, 6, 2, 512, "fp32", True, "llama"),
    (512, 4, 8, 128, "bf16-mixed", False, "llama"),
    (768, 2, 2, 256, "fp32", False, "llama"),
    (256, 4, 8, 128, "fp32", False, "gpt"),
    (256, 4, 8, 128, "bf16-mixed", True, "gpt"),
)
LLAMA = {
    "norm": "rmsnorm",
    "norm.bias": False,
    "feed_forward.activation": "silu",
    "feed_forward.gated": True,
    "positions": "rope",
    "attention.bias": False,
    "feed_forward.bias": False,
}
GPT = {
    "norm": "layernorm",
    "norm.bias": True,
    "feed_forward.activation": "gelu_tanh",
    "feed_forward.gated": False,
    "positions": "learned",
    "attention.bias": True,
    "feed_forward.bias": True,
}
VOCABULARY = 4096
WARM_UP = 3


def run_of(width: int, layers: int, batch: int, tokens: int, precision: str, compiled: bool, family: str) -> Run:
    """One configuration as a run."""
    parts = LLAMA if family == "llama" else GPT
    d_ff = 64 * round(width * 8 / 3 / 64) if family == "llama" else 4 * width
    return load(
        {
            "model": {
                "vocab_size": VOCABULARY,
                "d_model": width,
                "n_layers": layers,
                "attention.n_heads": width // 64 or 1,
                "feed_forward.d_ff": d_ff,
                "max_seq_len": tokens,
                **parts,
            },
            "recipe": {
                "seq_len": tokens,
                "global_batch": batch,
                "steps": 1,
                "precision": precision,
                "compile": compiled,
            },
        }
    )


@dataclass
class Trial:
    """One configuration, ready to be stepped, and the samples taken of it."""

    name: str
    run: Run
    samples: list[Sample] = field(default_factory=list)
    by_phase: dict[str, float] = field(default_factory=dict)
    steps: int = 0

    def prepare(self) -> None:
        """Build and warm up; compiled blocks are compiled here."""
        recipe = self.run.recipe
        self.model = build_model(self.run.model, recipe)
        initialize(self.model, seed=0)
        self.model.train()
        self.optimizer = build_optimizer(self.model, recipe)
        if recipe.compile:
            for layer in self.model.layers:
                layer.compile()
        shape = (self.run.device_batch, recipe.seq_len)
        generator = torch.Generator().manual_seed(0)
        self.batches = [
            tuple(torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(2))
            for _ in range(self.run.grad_accum)
        ]
        self.step(WARM_UP)
        start = time.perf_counter()
        self.step(1)
        self.seconds = time.perf_counter() - start

    def step(self, count: int, clock: Clock | None = None) -> None:
        with arithmetic(self.run):
            for _ in range(count):
                optimizer_step(self.model, self.optimizer, self.batches, self.run.recipe, clock=clock)  # type: ignore[arg-type]

    def sample(self, seconds: float, threads: int) -> None:
        """Step for about so many seconds."""
        count = max(1, round(seconds / self.seconds))
        with watched(threads) as sample:
            self.step(count, self._clock)
        sample.seconds /= count
        self.steps += count
        self.samples.append(sample)

    @contextmanager
    def _clock(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.by_phase[phase] = self.by_phase.get(phase, 0.0) + time.perf_counter() - start

    @property
    def kept(self) -> list[float]:
        return [each.seconds for each in self.samples if not each.disturbed]

    @property
    def measured(self) -> float:
        return median(self.kept) if self.kept else min(each.seconds for each in self.samples)


@contextmanager
def arithmetic(run: Run) -> Iterator[None]:
    """The switches under which the engine runs a step on a CPU."""
    set_fp32_matmuls(run.recipe.precision)
    if run.recipe.compile:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def predicted(run: Run, machine: Calibration) -> StepTime:
    tensors = leaves_of(run.model, run.recipe).trained().tensors
    return step_time(account(run, backend="cpu"), machine, tensors=tensors)


def name_of(configuration: tuple[Any, ...]) -> str:
    width, layers, batch, tokens, precision, compiled, family = configuration
    return f"{family} d{width} L{layers} B{batch} T{tokens} {precision}{' compiled' if compiled else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="where to write the figures")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.4, help="of one sample")
    parser.add_argument("--phases", action="store_true", help="also the ratios of each phase")
    parser.add_argument("--calibration", help="a calibration to use instead of one made now")
    args = parser.parse_args()
    keep_freed_memory()
    if args.calibration:
        from trainledger.spec.calibration import read_calibration

        machine = read_calibration(args.calibration)
    else:
        machine = measure_machine("cpu")
    trials = [Trial(name_of(each), run_of(*each)) for each in CONFIGURATIONS]
    for trial in trials:
        trial.prepare()
    for _ in range(args.rounds):
        for trial in trials:
            trial.sample(args.seconds, torch.get_num_threads())
    rows = [_row(trial, predicted(trial.run, machine)) for trial in trials]
    error = median(abs(row["ratio"] - 1) for row in rows)
    print(f"{machine.title}, {machine.threads} threads, torch {torch.__version__}")
    print(f"calibration: {machine.discarded} of {machine.samples} samples discarded{', busy' * machine.busy}\n")
    print(f"{'configuration':44}{'predicted':>11}{'measured':>11}{'ratio':>7}{'kept':>8}")
    for row in rows:
        kept = f"{row['kept']}/{row['samples']}"
        print(
            f"{row['name']:44}{row['predicted'] * 1e3:8.1f} ms{row['measured'] * 1e3:8.1f} ms"
            f"{row['ratio']:7.2f}{kept:>8}"
        )
    print(f"\nmedian absolute error {error:.1%}")
    alone = sum(not row["kept"] for row in rows)
    if alone:
        print(f"{alone} configurations have no undisturbed sample and stand here with their fastest")
    if args.phases:
        print(f"\n{'predicted over measured by phase':44}")
        for row in rows:
            print(f"{row['name']:44}" + "  ".join(f"{phase} {ratio:.2f}" for phase, ratio in row["phases"].items()))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine.title, "median_absolute_error": error, "rows": rows}, file, indent=1)


def _row(trial: Trial, time_: StepTime) -> dict[str, Any]:
    assert time_.seconds is not None
    measured = {phase: seconds / trial.steps for phase, seconds in trial.by_phase.items()}
    phases = {phase: time_.by_phase.get(phase, 0.0) / seconds for phase, seconds in measured.items()}
    return {
        "name": trial.name, "predicted": time_.seconds, "measured": trial.measured,
        "ratio": time_.seconds / trial.measured, "kept": len(trial.kept), "samples": len(trial.samples),
        "phases": phases,
    }  # fmt: skip


if __name__ == "__main__":
    main()
