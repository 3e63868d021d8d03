"""Speed of the training engine beside other loops: ``python bench engine [--rounds 16] [--compiled] [--write]``.

A GPT-2 of 3.7M parameters, 1,024 tokens in a step, fp32, one thread, is trained by `trainledger train`, by a bare loop
of the same model and by transformers' Trainer. nanoGPT (``--nanogpt DIR``, a checkout) and litgpt (where it is
installed) have GELU by erf, which takes a third of the time of GPT-2's by tanh: with them the engine and the bare loop
have it too. Then the engine and a bare loop on two processes with FSDP2. Each loop is a process of its own.
They take turns of a few steps, round after round, so that a disturbance costs each of them alike; steps in which other
processes took the processor, or in which it ran below its full speed, are thrown away. Printed: the median step, and
the median of its ratio to the engine's in the same round with its 95 % interval. What was found is stored in
bench/results/engine.json; ``--write`` makes docs/training_speed.md of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import IO, Any

import torch

from trainledger.answers.load import load
from trainledger.observe.measure.hardware import SLOWED, title
from trainledger.spec.runfile import to_toml

HOUSE = Path(__file__).resolve().parent.parent
RESULTS = HOUSE / "bench" / "results" / "engine.json"
DOCUMENT = HOUSE / "docs" / "training_speed.md"
LOOPS = Path(__file__).with_name("engine_loops.py")
SECONDS_TO_BEGIN, SECONDS_TO_END = 300, 30
MODEL = {
    "preset": "gpt2", "n_layers": 4, "d_model": 256, "attention.n_heads": 4, "feed_forward.d_ff": 1024,
    "vocab_size": 2048, "max_seq_len": 128,
}  # fmt: skip
# Which loops have the model with which activation.
ACTIVATIONS = {"gelu_tanh": ("trainer",), "gelu": ("nanogpt", "litgpt")}
RECIPE = {
    "seq_len": 128, "global_batch": 8, "steps": 10**6, "learning_rate": 1e-3, "precision": "fp32",
    "evaluation.every": 10**6, "checkpoints.every": 10**6,
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A step that no other process disturbed; ``pace`` are the seconds of a small matmul around it."""

    seconds: float
    pace: float


@dataclass
class Loop:
    """A process that trains when it is its turn, and the steps of its turns by round."""

    name: str
    process: subprocess.Popen[bytes]
    line: IO[str]
    rounds: list[list[Step]] = field(default_factory=list)

    def turn(self) -> None:
        self.line.write("go\n")
        self.line.flush()
        told = json.loads(self.line.readline())
        self.rounds.append([Step(each["seconds"], each["pace"]) for each in told if not each["crowded"]])


@contextmanager
def started(name: str, folder: Path, ranks: int, environment: dict[str, str]) -> Iterator[Loop]:
    """A loop that has taken its first steps, with their compilation."""
    (folder / "turns").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listening, open(folder / f"{name}-{ranks}.log", "wb") as log:
        listening.bind(str(folder / "turns"))
        listening.listen()
        listening.settimeout(SECONDS_TO_BEGIN)
        words = [sys.executable]
        if ranks > 1:
            words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*words, str(LOOPS), name, str(folder)]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder)
        try:
            connection, _ = listening.accept()
            line = connection.makefile("rw")
            if not line.readline():
                raise SystemExit(f"{name} did not begin:\n{Path(log.name).read_text()[-2000:]}")
            yield Loop(name, process, line)
            line.close()
            connection.close()  # a loop that waits for its turn ends then
            process.wait(SECONDS_TO_END)
        finally:
            process.kill()
            process.wait()


def compared(names: Sequence[str], folder: Path, ranks: int, rounds: int, environment: dict[str, str]) -> list[Loop]:
    """The loops with the seconds of their steps; the order of turns is reversed in every other round."""
    with ExitStack() as stack:
        loops = [stack.enter_context(started(each, folder, ranks, environment)) for each in names]
        for number in range(rounds):
            for loop in loops if number % 2 == 0 else reversed(loops):
                loop.turn()
                print(f"\rround {number + 1} of {rounds}", end="", file=sys.stderr, flush=True)
    print("\r\x1b[K", end="", file=sys.stderr)
    return loops


def facts(loop: Loop, engine: Loop, fastest: float) -> dict[str, Any]:
    """The median of steps at the full speed of the processor; the ratio is of rounds in which both loops had some."""
    rounds = [
        [[each.seconds for each in steps if each.pace <= SLOWED * fastest] for steps in one.rounds]
        for one in (loop, engine)
    ]
    seconds = [each for steps in rounds[0] for each in steps]
    ratios = [median(own) / median(other) for own, other in zip(*rounds, strict=True) if own and other]
    return {
        "loop": loop.name,
        "step_seconds": median(seconds) if seconds else None,
        "rounds": len(ratios),
        "step_over_engine": median(ratios) if ratios else None,
        "interval": interval_of_median(ratios),
    }


def interval_of_median(found: Sequence[float]) -> tuple[float, float] | None:
    """Between which of the values their median lies with 95 %: half of them are below it, as coins fall."""
    in_order, n = sorted(found), len(found)
    away = round(0.98 * n**0.5)  # 1.96 standard deviations of n tosses
    return (in_order[n // 2 - away], in_order[(n - 1) // 2 + away]) if n >= 6 else None


def table(loops: Sequence[Loop], heading: str) -> list[dict[str, Any]]:
    tokens = RECIPE["seq_len"] * RECIPE["global_batch"]  # type: ignore[operator]
    print(f"\n{heading}\n\nloop          step       tokens/s   times the engine's step (95 %)   rounds undisturbed")
    fastest = min(each.pace for loop in loops for steps in loop.rounds for each in steps)
    rows = [facts(each, loops[0], fastest) for each in loops]
    for each in rows:
        if each["step_over_engine"] is None:
            print(f"{each['loop']:<12}  every round was disturbed")
            continue
        step = each["step_seconds"]
        ratio = f"{each['step_over_engine']:.3f}"
        if each["interval"] is not None:
            ratio += " ({:.3f} to {:.3f})".format(*each["interval"])
        print(f"{each['loop']:<12} {1000 * step:6.1f} ms  {tokens / step:9,.0f}   {ratio:>30}   {each['rounds']:18}")
    engine, bare = rows[0]["step_seconds"], rows[1]["step_seconds"]
    if engine is not None and bare is not None and rows[1]["step_over_engine"]:
        print(f"the engine's own time in a step: {1000 * engine * (1 - rows[1]['step_over_engine']):+.2f} ms")
    return rows


def here() -> str:
    """When and on what something was found."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "litgpt") if find_spec(name))
    where = f"{title(torch.device('cpu'))}, one thread"
    return f"{date.today().isoformat()}; Python {platform.python_version()}, {versions}; {where}"


def stored() -> dict[str, Any]:
    """What earlier calls have found."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return found


NAMES = {
    "engine": "trainledger train", "bare": "a bare loop of the same model", "trainer": "transformers' Trainer",
    "nanogpt": "nanoGPT", "litgpt": "litgpt", "bare_fsdp2": "a bare loop with FSDP2",
}  # fmt: skip


def page(found: dict[str, Any]) -> str:
    """The whole of docs/training_speed.md, of what is stored."""
    lines = [
        "# Speed of the engine", "", "Written by `python bench engine --write`.", "",
        "The same GPT-2 of 3.7M parameters, 1,024 tokens in a step, fp32, trained by the engine and by other loops,",
        "one process each, which take turns of a few steps. A ratio above 1 says that the engine is faster; it is the",
        "median of the rounds, of steps in which no other process took the processor and it ran at its full speed,",
        "with its 95 % interval. nanoGPT and litgpt have GELU by erf, and so have the engine and the bare loop beside",
        "them. Compiled: the engine compiles its blocks, the others their whole model.",
    ]  # fmt: skip
    for how, tables in found.items():
        for name, one in tables.items():
            lines += [
                "", f"## {name[0].upper()}{name[1:]}, {how}", "", f"{one['here']}.", "",
                "| loop | step | its step / the engine's | rounds |", "|---|---:|---:|---:|",
            ]  # fmt: skip
            lines += [row_of(each) for each in one["rows"]]
    return "\n".join([*lines, ""])


def row_of(each: dict[str, Any]) -> str:
    """One loop as a row of the page."""
    if each["step_over_engine"] is None:
        return f"| {NAMES[each['loop']]} | disturbed | | 0 |"
    between = "" if each["interval"] is None else " ({:.3f} to {:.3f})".format(*each["interval"])
    ratio = "1" if each["loop"] == "engine" else f"{each['step_over_engine']:.3f}{between}"
    return f"| {NAMES[each['loop']]} | {1000 * each['step_seconds']:.1f} ms | {ratio} | {each['rounds']} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4, help="steps in a turn (4)")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--compiled", action="store_true", help="blocks compiled (the others: their whole model)")
    parser.add_argument("--only", choices=("one", "two"), help="one process, or two with FSDP2")
    parser.add_argument("--write", action="store_true", help=f"write docs/{DOCUMENT.name} of what is stored")
    args = parser.parse_args()
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(HOUSE / "src"), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1", "STEPS_IN_A_TURN": str(args.steps),
    }  # fmt: skip
    if args.nanogpt is not None:
        environment["NANOGPT"] = str(args.nanogpt.resolve())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = {"tokenizer": "bytes", "cache": str(folder / "cache")}
        recipe = {**RECIPE, "compile": args.compiled}
        there = {
            "trainer": find_spec("transformers") is not None,
            "nanogpt": args.nanogpt is not None,
            "litgpt": find_spec("litgpt") is not None,
        }
        results = {}
        how = "compiled" if args.compiled else "eager"
        for activation, others in ACTIVATIONS.items():
            within = folder / activation
            within.mkdir()
            for ranks in (1, 2):
                spread = {"layout": {"shard": ranks}, "cluster": {"count": ranks, "backend": "cpu"}}
                model = {**MODEL, "feed_forward.activation": activation}
                run = load({"model": model, "recipe": recipe, "data": data, **spread})
                (within / f"run-{ranks}.toml").write_text(to_toml(run))
            if args.only != "two":
                names = ["engine", "bare", *filter(there.__getitem__, others)]
                loops = compared(names, within, 1, args.rounds, environment)
                results[f"one process, {activation}"] = table(loops, f"One process, {how}, {activation}")
        if args.only != "one":
            rounds = 4 * args.rounds  # a round of two processes spreads by a tenth: they wait for each other
            loops = compared(["engine", "bare_fsdp2"], folder / "gelu_tanh", 2, rounds, environment)
            results["two processes"] = table(loops, f"Two processes, FSDP2, {how}")
    before = stored()
    whole = before | {
        how: before.get(how, {}) | {name: {"here": here(), "rows": rows} for name, rows in results.items()}
    }
    RESULTS.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if args.write:
        DOCUMENT.write_text(page(whole), encoding="utf-8")


if __name__ == "__main__":
    main()
