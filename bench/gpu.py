"""The checks that need an accelerator, in one command: ``PYTHONPATH=src python bench/gpu.py [OUT.json]``.

Needs nothing but Python and torch. For a few models: the closed form for CUDA kernels against a real step in
FLOPs, kept bytes and peak, the latter by the recorder and by the caching allocator; predicted step time, from a
calibration made just before, against the median of real steps. Before that the engine's speed beside other loops
(`gpu_speed`), profiles (`gpu_profiles`) and what metering costs (`metering`). Writes device, date and versions with the
figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import gpu_profiles
import gpu_speed
import torch

from trainledger.api.load import load
from trainledger.ledger.step import account
from trainledger.measure.machine import measure_machine
from trainledger.measure.meter import AllocatorPeak
from trainledger.measure.step import metered_step
from trainledger.nn.transformer import build
from trainledger.predict.step import step_time
from trainledger.spec.calibration import Calibration
from trainledger.spec.run import Run
from trainledger.train.optimizer import build_optimizer
from trainledger.train.step import optimizer_step

STEPS = 12


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
    predicted = account(run, backend="cuda")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "out", type=Path, nargs="?", help="where to write the figures (bench/results/gpu-DEVICE-DATE.json)"
    )
    parser.add_argument("--traces", type=Path, help="a folder to keep the traces of the profiles in")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device here; nothing was measured")
    name = torch.cuda.get_device_name()
    slug = "".join(each if each.isalnum() else "-" for each in name.lower())
    out = args.out or Path(__file__).parent / "results" / f"gpu-{slug}-{date.today()}.json"
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    record: dict[str, Any] = {"device": name, "date": date.today().isoformat(), "versions": versions}
    record |= {"rows": [], "speed": [], "profiles": []}

    def keep() -> None:
        """After each figure, so that a lease that ends loses only what was not measured."""
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()

    for each in gpu_profiles.profiles(args.traces):
        record["profiles"].append(each)
        print(json.dumps(each), flush=True)
        keep()
    metering = [sys.executable, str(Path(__file__).with_name("metering.py")), "cuda"]
    done = subprocess.run(metering, capture_output=True, text=True, check=False)
    record["metering"] = json.loads(done.stdout) if done.returncode == 0 else done.stderr.splitlines()[-1:]
    print(json.dumps(record["metering"]), flush=True)
    for run in gpu_speed.runs():
        record["speed"].append(gpu_speed.compare(run))
        print(json.dumps(record["speed"][-1]), flush=True)
        keep()
    calibration = measure_machine("cuda")
    record["peaks"] = calibration.peak_flops_per_second
    for run in runs():
        try:
            row = compare(run, calibration)
        except torch.OutOfMemoryError as error:
            row = {"model": run.model.name, "precision": run.recipe.precision.kind, "out_of_memory": str(error)}
        record["rows"].append(row)
        print(json.dumps(row), flush=True)
        keep()
    print(f"written to {out}")


if __name__ == "__main__":
    main()
