"""The checks that need an accelerator, in one command: ``PYTHONPATH=src python bench gpu [OUT.json]``.

It takes about twenty minutes. ``--parts`` takes some of it, ``--models`` some sizes of speed, reconcile and rows; what
is measured on one day and device joins in one file:

- ``tests``: those that need an accelerator (``pytest -m gpu``, where pytest is installed);
- ``calibration``: `measure machine`, written beside the figures;
- ``speed``: the engine's step beside a bare loop and transformers' model (`gpu_speed`);
- ``reconcile``: runs of the engine from the command line, forecast and measured (`gpu_speed`);
- ``rows``: the closed form for CUDA kernels against real steps in FLOPs, kept bytes and peak, the latter by the
  recorder and by the caching allocator; step time by the calibration against the median of real steps;
- ``profiles``: where the time of steps goes (`gpu_speed`);
- ``metering``: what metering costs a loop (`costs`).
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import gpu_speed
import torch

from trainledger.answers.load import load
from trainledger.engine.nn.transformer import build
from trainledger.engine.train.device import compute_capability
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.engine.train.step import optimizer_step
from trainledger.forecast.predict.step import step_time
from trainledger.ledger.step import account
from trainledger.observe.measure.machine import measure_machine
from trainledger.observe.measure.meter import AllocatorPeak
from trainledger.observe.measure.step import metered_step
from trainledger.spec.calibration import Calibration, read_calibration, write_calibration
from trainledger.spec.device import kernels_of_capability
from trainledger.spec.run import Run

STEPS = 12
OF_MODELS = ("speed", "reconcile", "rows")


def runs() -> Iterator[Run]:
    """Both families, both precisions, with and without checkpointing, at sizes that keep a large device busy."""
    for preset, seq_len, batch in (("gpt2", 1024, 8), ("gpt2-medium", 1024, 4), ("llama-3.2-1b", 2048, 2)):
        for precision in ("fp32", "bf16-mixed"):
            for checkpointing in ("none", "full"):
                recipe = {
                    "seq_len": seq_len, "global_batch": batch, "steps": 1, "precision": precision,
                    "activation_checkpointing": checkpointing,
                }  # fmt: skip
                yield load({"model": {"preset": preset}, "recipe": recipe, "cluster": {"backend": "cuda"}})


def compare(run: Run, calibration: Calibration) -> dict[str, Any]:
    """One run's figures, predicted and measured."""
    device = torch.device("cuda")
    with device:
        model = build(run.model, run.recipe)
        shape = (run.device_batch, run.recipe.seq_len)
        batch = tuple(torch.randint(0, run.model.vocab_size, shape) for _ in range(2))
    optimizer = build_optimizer(model, run.recipe)
    predicted = account(run, backend=kernels_of_capability(compute_capability(device)))
    measured = metered_step(run, model, optimizer, [batch], writer="measure")
    optimizer.zero_grad(set_to_none=True)
    with AllocatorPeak(device) as allocator:
        optimizer_step(model, optimizer, [batch], run.recipe)
    seconds = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer_step(model, optimizer, [batch], run.recipe)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    time_predicted = step_time(predicted, calibration).seconds
    return {
        "model": run.model.name,
        "precision": run.recipe.precision.kind,
        "activation_checkpointing": run.recipe.activation_checkpointing.kind,
        "matmul_flops": [predicted.matmul_flops, measured.matmul_flops],
        "kept_nbytes": [predicted.kept_nbytes, measured.kept_nbytes],
        "peak_nbytes": [predicted.peak().nbytes, measured.peak().nbytes, allocator.nbytes],
        "step_seconds": [time_predicted, median(seconds[2:])],
        "uncounted": dict(measured.uncounted),
    }


def rows(calibration: Path, chosen: list[Run]) -> Iterator[Any]:
    rates = read_calibration(calibration)
    for run in chosen:
        try:
            yield compare(run, rates)
        except torch.OutOfMemoryError as error:
            yield {"model": run.model.name, "precision": run.recipe.precision.kind, "out_of_memory": str(error)}


def tests() -> Iterator[Any]:
    """What ``pytest -m gpu`` says at its end; all of it goes to stdout."""
    there = Path(__file__).parents[1] / "tests"
    files = [str(each) for each in sorted(there.rglob("test_*.py")) if "pytest.mark.gpu" in each.read_text()]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "8", "-o", "addopts=", *files]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        for line in running.stdout or ():
            print(line, end="", flush=True)  # at once: a lease may end
            last = line.strip() or last
    yield last


def metering() -> Iterator[Any]:
    command = [sys.executable, str(Path(__file__).parent), "metering", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    yield json.loads(done.stdout) if done.returncode == 0 else done.stderr.splitlines()[-1:]


def calibrated(calibration: Path) -> Iterator[Any]:
    measured = measure_machine("cuda")
    write_calibration(measured, calibration)
    yield measured.peak_flops_per_second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "out", type=Path, nargs="?", help="where to write the figures (bench/results/gpu-DEVICE-DATE.json)"
    )
    parser.add_argument("--traces", type=Path, help="a folder to keep the traces of the profiles in")
    parser.add_argument("--parts", help="some of the parts, with commas between")
    parser.add_argument("--models", help=f"some of the models of {', '.join(OF_MODELS)}, with commas between")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device here; nothing was measured")
    name = torch.cuda.get_device_name()
    slug = "".join(each if each.isalnum() else "-" for each in name.lower())
    out = args.out or Path(__file__).parent / "results" / f"gpu-{slug}-{date.today()}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    calibration = out.with_suffix(".calibration.toml")
    every_model = [preset for preset, *_ in gpu_speed.SIZES]
    models = args.models.split(",") if args.models else every_model
    if unknown := [each for each in models if each not in every_model]:
        parser.error(f"--models: {unknown[0]} is none of {', '.join(every_model)}")
    parts: dict[str, Callable[[], Iterator[Any]]] = {
        "tests": tests,
        "calibration": lambda: calibrated(calibration),
        "speed": lambda: map(gpu_speed.compare, gpu_speed.runs(models)),
        "reconcile": lambda: gpu_speed.reconciled(calibration, models),
        "rows": lambda: rows(calibration, [each for each in runs() if each.model.name in models]),
        "profiles": lambda: gpu_speed.profiles(args.traces),
        "metering": metering,
    }
    chosen = args.parts.split(",") if args.parts else list(parts)
    if unknown := [each for each in chosen if each not in parts]:
        parser.error(f"--parts: {unknown[0]} is none of {', '.join(parts)}")
    if {"reconcile", "rows"} & {*chosen} and "calibration" not in chosen and not calibration.exists():
        parser.error(f"--parts: reconcile and rows need calibration first, and {calibration} is not there")
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    record: dict[str, Any] = {"device": name, "date": date.today().isoformat(), "versions": versions}
    if out.exists():
        record |= json.loads(out.read_text())
    for part in chosen:
        earlier = record.get(part, ()) if part in OF_MODELS and args.models else ()
        record[part] = [each for each in earlier if each["model"] not in models]
        for each in parts[part]():
            record[part].append(each)
            print(part, json.dumps(each), flush=True)
            out.write_text(json.dumps(record, indent=1) + "\n")  # at once: a lease may end
            gc.collect()
            torch.cuda.empty_cache()
    print(f"written to {out}")


if __name__ == "__main__":
    main()
