"""A run directory as the engine, the forecast and the meter leave it, written by their own code from a tiny run."""

import json
import sys
from pathlib import Path

from trainledger.forecast.predict.predict import forecast
from trainledger.ledger.ledger import write_ledger
from trainledger.ledger.measured import measured_run
from trainledger.ledger.ranks import RunAccount
from trainledger.ledger.step import account
from trainledger.spec.calibration import Calibration, KernelTime
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.plain import write_json
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.spec.runfile import to_toml

STEPS = 12


def calibration() -> Calibration:
    """A machine of round numbers."""
    kernels = (
        KernelTime(
            kind="matmul", dtype="fp32", shape=(64, 64, 64), flops=2 * 64**3, nbytes=3 * 4 * 64**2, seconds=1e-5
        ),
        KernelTime(kind="attention", dtype="fp32", shape=(1, 8, 8), flops=10**6, nbytes=10**4, seconds=1e-5),
        KernelTime(
            kind="attention", dtype="fp32", shape=(1, 8, 8), flops=10**6, nbytes=10**4, seconds=2e-5, phase="backward"
        ),
        KernelTime(kind="copy", dtype="fp32", shape=(1000,), flops=0, nbytes=8000, seconds=1e-6),
    )
    return Calibration(
        title="a <b>machine</b>", backend="cpu", date="2026-01-02", torch_version="2.13.0", threads=1, kernels=kernels,
        operation_seconds=1e-6, storage_bytes_per_second=1e8,
    )  # fmt: skip


def tiny_run(**recipe) -> Run:
    model = from_fields(
        ModelSpec,
        {
            "vocab_size": 64,
            "d_model": 16,
            "n_layers": 3,
            "attention.n_heads": 2,
            "feed_forward.d_ff": 32,
            "max_seq_len": 16,
        },
    )
    return Run(
        model=model,
        recipe=from_fields(Recipe, {"seq_len": 16, "global_batch": 4, "micro_batch": 2, "steps": STEPS, **recipe}),
    )


def lines(step_seconds: float = 0.01) -> list[dict]:
    found: list[dict] = [{"event": "start", "step": 0}]
    for step in range(1, STEPS + 1):
        seconds = step_seconds * (1 + 0.01 * (step % 5))
        phases = {"forward": 0.3 * seconds, "backward": 0.6 * seconds}
        found.append(
            {"step": step, "loss": 5.0 - 0.2 * step, "tokens": 64 * step, "seconds": seconds, "learning_rate": 1e-3,
             "grad_norm": 1.0, "time": 0.01 * step, "phase_seconds": phases}
        )  # fmt: skip
        if step % 6 == 0:
            found.append({"step": step, "validation_loss": 4.0, "phase_seconds": {"evaluation": 0.01}})
    return [*found, {"event": "finish", "step": STEPS, "seconds": 0.15}]


def make_run(folder: Path) -> Path:
    """Write a whole run directory."""
    folder.mkdir(parents=True)
    run = tiny_run()
    ledger = account(run)
    (folder / "run.toml").write_text(to_toml(run))
    write_json(forecast(RunAccount(run, ledger), calibration()), folder / "forecast.json")
    write_ledger(ledger, folder / "predicted-ledger.json.gz")
    write_ledger(ledger, folder / "measured-ledger.json.gz")
    allocator = ledger.peak().nbytes + 4096
    measured = measured_run(
        lines(), ledger, allocator_peak_nbytes=allocator, device="a <b>machine</b>", date="2026-01-03"
    )
    write_json(measured, folder / "measured.json")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines()))
    (folder / "state.json").write_text(json.dumps({"state": "finished", "step": STEPS, "unigram_entropy": 3.9}))
    return folder


if __name__ == "__main__":
    make_run(Path(sys.argv[1]))
