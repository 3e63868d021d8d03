"""How quickly plans and searches answer: time to answer by model and devices, its phases, CPU time of `plan`.

    python bench plan                    # some minutes
    python bench plan --beside           # also accelerate and llm-analysis, in temporary environments of their own
    python bench plan --beside --counts  # the commands alone

CPU seconds of this process on one core for the searches, of child processes (user and system) for the commands; the
commands are interleaved, and medians are printed. What accelerate asks a hub is answered on this machine
(`loopback_hub`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

from timing import ENVIRONMENT, borrowing, cpu_seconds, interleaved, not_installed

import trainledger as tl
from trainledger.answers.load import load
from trainledger.forecast.plan.layouts.result import Layouts
from trainledger.spec.convert.huggingface import to_config
from trainledger.spec.units import GIGA

STARTS = 31
PYTHON = sys.executable
STARTED = [str(Path(PYTHON).with_name("trainledger")), "plan", "gpt2", "--device", "h100-sxm"]

MODULES = """
import sys
from trainledger.cli import main
main(["plan", "gpt2", "--device", "h100-sxm"])
print(sum(each.startswith("trainledger") for each in sys.modules), "modules of trainledger")
"""


def startup() -> None:
    environment = dict(ENVIRONMENT)
    cpu_seconds(STARTED, environment)
    pairs = [
        (cpu_seconds([PYTHON, "-c", "pass"], environment), cpu_seconds(STARTED, environment)) for _ in range(STARTS)
    ]
    bare, plan = (median(column) for column in zip(*pairs, strict=True))
    print(f"python -c pass   {1000 * bare:6.1f} ms")
    print(f"trainledger plan {1000 * plan:6.1f} ms   {1000 * (plan - bare):.1f} ms more (at most 150)")
    print(subprocess.run([PYTHON, "-c", MODULES], capture_output=True, text=True, check=True).stdout.splitlines()[-1])


UNITS = {"bytes": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}  # accelerate's words for powers of 1,024
PRECISIONS = {"float32": "fp32", "float16": "fp16-mixed"}  # of those it knows, the ones that it trains in


@contextmanager
def loopback_hub(name: str, folder: str) -> Iterator[dict[str, str]]:
    """The environment of a process for which the hub is this one; what it downloads goes into ``folder``."""
    config = to_config(tl.model(name))
    text = json.dumps(config).encode()
    commit = sha1(text).hexdigest()
    told = {"id": name, "sha": commit, "config": config, "siblings": [{"rfilename": "config.json"}]}
    paths = {f"/api/models/{name}": json.dumps(told).encode()}
    paths |= {f"/{name}/resolve/{revision}/config.json": text for revision in ("main", commit)}

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = paths.get(self.path.partition("?")[0])
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or b"")))
            self.send_header("Content-Type", "application/json")
            if body is None:
                self.send_header("X-Error-Code", "EntryNotFound")
            else:
                self.send_header("X-Repo-Commit", commit)
                self.send_header("ETag", f'"{commit}"')
            self.end_headers()
            if body is not None and self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the benchmark's output is its table."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield {
                "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": folder, "NO_PROXY": "127.0.0.1",
                "HF_HUB_OFFLINE": "0", "HF_TOKEN": "", "HF_HUB_DISABLE_TELEMETRY": "1",
            }  # fmt: skip
        finally:
            server.shutdown()


def sizes(printed: str, name: str) -> list[dict[str, Any]]:
    """Bytes to train with Adam: by the table that accelerate printed, and by the ledger of a step."""
    longest = tl.model(name).max_seq_len
    rows = []
    for line in printed.splitlines():
        dtype, *cells = [each.strip() for each in line.strip("│").split("│")]
        if dtype in PRECISIONS:
            number, unit = cells[2].split()
            rows.append(
                {
                    "dtype": dtype,
                    "precision": PRECISIONS[dtype],
                    "accelerate_nbytes": round(float(number) * UNITS[unit]),
                    "one_token_nbytes": _peak_nbytes(name, PRECISIONS[dtype], 1),
                    "tokens": longest,
                    "one_sequence_nbytes": _peak_nbytes(name, PRECISIONS[dtype], longest),
                }
            )
    return rows


def _peak_nbytes(name: str, precision: str, tokens: int) -> int:
    """The most that a step of one sequence of so many tokens holds at once."""
    recipe = {"seq_len": tokens, "global_batch": 1, "steps": 1, "precision": precision, "optimizer": "adam"}
    run = tl.load({"model": {"preset": name}, "recipe": recipe, "cluster": {"device": "h100-sxm"}})
    nbytes: int = tl.account(run).peak().nbytes
    return nbytes


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
CODES = (0, 2)  # 2: a plan whose run does not fit
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


def commands(
    others: dict[str, list[str]], samples: int, environment: dict[str, str]
) -> tuple[dict[str, float], dict[str, str]]:
    """Median CPU seconds of each command, interleaved; and why some could not be run."""
    every = {"python -c pass": [PYTHON, "-c", "pass"], f"trainledger plan {MODEL}": PLAN, **others}
    missing = {}
    for name, command in list(every.items()):
        try:
            cpu_seconds(command, environment, CODES)
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or "").strip().splitlines() or [f"exit code {error.returncode}"]
            missing[name] = lines[-1][:200]
            del every[name]
    works = {name: partial(cpu_seconds, command, environment, CODES) for name, command in every.items()}
    return interleaved(works, samples), missing


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
        python = borrowing(Path(folder) / package)
        why = not_installed(python, package)
        if why:
            missing[names[package]] = why
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
    environment = dict(ENVIRONMENT)
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
