"""How quickly plans and searches answer: layouts per second, time to answer by model and devices, CPU time of `plan`.

    python bench/plan.py                    # some minutes
    python bench/plan.py --beside           # also accelerate and llm-analysis, in temporary environments of their own
    python bench/plan.py --beside --counts  # the commands alone

CPU seconds of this process on one core for the searches, of child processes (user and system) for the commands; the
commands are interleaved, and medians are printed. What accelerate asks a hub is answered on this machine
(bench/estimate_memory.py).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from estimate_memory import loopback_hub, sizes

import trainledger as tl
from trainledger.answers.load import load
from trainledger.forecast.plan.layouts.result import Layouts
from trainledger.spec.units import GIGA

MODELS: dict[str, dict[str, Any]] = {
    "8B": {"preset": "llama-3.1-8b"},
    "70B": {"preset": "llama-3.1-70b"},
    "405B": {"preset": "llama-3.1-405b"},
    "671B, mixture of experts": {"preset": "deepseek-v3", "n_mtp_layers": 0},  # its modules know no pipeline
}
COUNTS = (8, 64, 512, 4096, 16_384, 100_000)
SEQUENCES = {8: 128, 64: 256, 512: 1024, 4096: 2048, 16_384: 2048, 100_000: 12_500}  # a step, of 8,192 tokens
PYTHON = sys.executable
MODEL = "llama-3-8b"
PLAN = [str(Path(PYTHON).with_name("trainledger")), "plan", MODEL, "--set", "cluster.device=h100-sxm"]
DOES_NOT_FIT = 2  # the exit code of a plan whose run does not fit
ESTIMATE = f"accelerate estimate-memory {MODEL}"


def search(model: dict[str, Any], devices: int, limit_seconds: float) -> tuple[Layouts, float]:
    """The best layouts, and the CPU seconds until they were there."""
    run = load(
        {
            "model": model,
            "recipe": {"seq_len": 8192, "global_batch": SEQUENCES[devices], "steps": 1, "precision": "bf16-sharded"},
            "cluster": {"device": "h100-sxm"},
        }
    )
    before = time.process_time()
    found = tl.layouts(run, devices=devices, limit_seconds=limit_seconds)
    return found, time.process_time() - before


def searches(counts: tuple[int, ...], limit_seconds: float) -> list[dict[str, Any]]:
    rows = []
    for name, model in MODELS.items():
        for devices in counts:
            found, seconds = search(model, devices, limit_seconds)
            best = found.best
            rows.append(
                {
                    "model": name, "devices": devices, "searched": found.searched, "allowed": found.allowed,
                    "fitting": found.fitting, "accounted": found.accounted, "certain": found.certain,
                    "preparing_seconds": found.preparing_seconds,
                    "bounding_seconds": found.bounding_seconds, "layouts_per_second": found.layouts_per_second,
                    "seconds_to_answer": seconds, "best": None if best is None else best.title,
                    "step_seconds": None if best is None else best.seconds, "mfu": None if best is None else best.mfu,
                }
            )  # fmt: skip
            _show(rows[-1])
    return rows


def _show(row: dict[str, Any]) -> None:
    best = "none fits" if row["best"] is None else f"{row['step_seconds']:.3g} s, MFU {100 * (row['mfu'] or 0):.1f} %"
    print(
        f"{row['model']:<25}{row['devices']:>8,}{row['searched']:>13,}{row['allowed']:>12,}"
        f"{row['preparing_seconds']:>8.2f}{row['bounding_seconds']:>8.2f}"
        f"{row['layouts_per_second']:>12,.0f}{row['accounted']:>6}{row['seconds_to_answer']:>8.1f}  {best}",
        file=sys.stderr,
    )


def cpu_seconds(command: list[str], environment: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, text=True)
    if done.returncode not in (0, DOES_NOT_FIT):
        done.check_returncode()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def commands(
    others: dict[str, list[str]], samples: int, environment: dict[str, str]
) -> tuple[dict[str, float], dict[str, str]]:
    """Median CPU seconds of each command, interleaved; and why some could not be run."""
    every = {"python -c pass": [PYTHON, "-c", "pass"], f"trainledger plan {MODEL}": PLAN, **others}
    missing = {}
    for name, command in list(every.items()):
        try:
            cpu_seconds(command, environment)
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or "").strip().splitlines() or [f"exit code {error.returncode}"]
            missing[name] = lines[-1][:200]
            del every[name]
    taken: dict[str, list[float]] = {name: [] for name in every}
    for _ in range(samples):
        for name, command in every.items():
            taken[name].append(cpu_seconds(command, environment))
    return {name: median(each) for name, each in taken.items()}, missing


def beside(folder: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """accelerate and llm-analysis, each in an environment of its own; what they do not bring or pin is this one's."""
    forecast = {
        "accelerate": ["-m", "accelerate.commands.accelerate_cli", "estimate-memory", MODEL,
                       "--library_name", "transformers", "--dtypes", "float32", "float16"],
        "llm-analysis": ["-m", "llm_analysis.analysis", "train", "--model_name", "facebook_opt-1.3b", "--gpu_name",
                         "a100-sxm-40gb", "--total_num_tokens", "1000000000", "--total_num_gpus", "8"],
    }  # fmt: skip
    names = {"accelerate": ESTIMATE, "llm-analysis": "llm-analysis train"}
    found, missing = {}, {}
    for package, words in forecast.items():
        python = str(Path(folder) / package / "bin" / "python")
        subprocess.run([PYTHON, "-m", "venv", str(Path(folder) / package)], check=True)
        own = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
                             check=True, capture_output=True, text=True).stdout.strip()  # fmt: skip
        (Path(own) / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        done = subprocess.run([python, "-m", "pip", "install", "--quiet", package], capture_output=True, text=True)
        if done.returncode:
            missing[names[package]] = (done.stderr.strip().splitlines() or ["pip failed"])[-1][:200]
        else:
            found[names[package]] = [python, "-P", *words]  # -P: no module of the directory that this is run in
    return found, missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="*", default=list(COUNTS), choices=COUNTS, help="devices")
    parser.add_argument("--limit", type=float, default=5.0, help="seconds for the accounts of each search (5)")
    parser.add_argument("--samples", type=int, default=21, help="of each command (21)")
    parser.add_argument("--beside", action="store_true", help="install accelerate and llm-analysis and time them too")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    heads = ("model", "devices", "searched", "allowed", "prep s", "bound s", "layouts/s", "exact", "CPU s")
    widths = (-25, 8, 13, 12, 8, 8, 12, 6, 8)
    columns = zip(heads, widths, strict=True)
    if args.counts:
        print("".join(f"{head:{'<' if width < 0 else '>'}{abs(width)}}" for head, width in columns), file=sys.stderr)
    rows = searches(tuple(args.counts), args.limit)
    # Without compiled files on disk every start compiles the source again, which is not what is measured here.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    others: dict[str, list[str]] = {}
    missing: dict[str, str] = {}
    forecast: list[dict[str, Any]] = []
    with ExitStack() as stack:
        if args.beside:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            environment |= stack.enter_context(loopback_hub(MODEL, folder))
            others, missing = beside(folder)
        seconds, failed = commands(others, args.samples, environment)
        if ESTIMATE in seconds:
            done = subprocess.run(others[ESTIMATE], capture_output=True, env=environment, check=True, text=True)
            forecast = sizes(done.stdout, MODEL)
    missing |= failed
    if args.json:
        found = {"searches": rows, "commands": seconds, "not_run": missing, "to_train_nbytes": forecast}
        json.dump({**found, "hub": "a server on this machine"}, sys.stdout, indent=2)
        print()
        return
    bare = seconds["python -c pass"]
    print("\nCPU time of a command from the shell, medians of interleaved runs")
    for name, each in seconds.items():
        print(f"{name:<40}{1000 * each:>10.1f} ms{each / bare:>8.2f} times python -c pass")
    for name, why in missing.items():
        print(f"{name:<40} could not be run: {why}")
    if forecast:
        print("The hub that accelerate asked was a server on this machine, with a config.json of the catalog's sizes.")
        print(f"\nTo train {MODEL} with Adam")
        print(f"{'':<10}{'accelerate':>12}    {'ledger':<12}{'one token':>12}{forecast[0]['tokens']:>11,} tokens")
    for row in forecast:
        names = ("accelerate_nbytes", "one_token_nbytes", "one_sequence_nbytes")
        accelerate, token, sequence = (f"{row[name] / GIGA:.2f} GB" for name in names)
        print(f"{row['dtype']:<10}{accelerate:>12}    {row['precision']:<12}{token:>12}{sequence:>18}")


if __name__ == "__main__":
    main()
