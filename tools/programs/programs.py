"""Programs of others as they are, under ``annotate --fake`` and as one rank of 8: ``make programs``.

``python tools/programs/programs.py [--sources FOLDER] [--write] [--only NAME]`` runs each with the Python that runs
this. Those of PyPI are installed; nanoGPT, modded-nanogpt and nanochat are looked for in ``--sources`` (a folder where
they are cloned) and left out where they are not. ``--write`` replaces docs/programs.md. No program is changed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "programs.md"
RANKS, STEPS = 8, 2
_SMALL = "--depth 4 --max-seq-len 512 --device-batch-size 4 --total-batch-size 16384 --num-iterations 4"
_NO_EVALUATION = "--eval-every -1 --core-metric-every -1 --sample-every -1"
_TITAN = "--module llama3 --config llama3_debugmodel --training.steps 4"
_PARALLEL = (
    "--parallelism.tensor_parallel_degree 2 --parallelism.pipeline_parallel_degree 2 --training.disable_cuda_graphs"
)


@dataclass(frozen=True)
class Program:
    """A script and its arguments: ``source`` is the folder it is looked for in (or a package), ``data`` what it reads.

    ``ways`` are arguments besides, by what they are called, as a rank; the first is also annotated.
    """

    name: str
    source: str
    script: str
    arguments: str = ""
    data: str = ""
    ways: dict[str, str] = field(default_factory=lambda: {"": ""})
    annotated: str = ""  # arguments besides for one process
    ends: bool = True  # or a rank ends with a sentence on what is not followed


PROGRAMS = (
    Program(
        "nanoGPT `train.py`", "nanoGPT", "train.py", "--dataset=small --batch_size=4 --eval_iters=2", "nanogpt",
        {"DDP, compiled": "", "DDP": "--compile=False"}, "--gradient_accumulation_steps=2",
    ),
    Program("modded-nanogpt `train_gpt.py`", "modded-nanogpt", "train_gpt.py", data="modded-nanogpt",
            ways={"an optimizer of its own, compiled": ""}, ends=False),
    Program("nanochat `base_train`", "nanochat", "scripts/base_train.py", f"{_SMALL} {_NO_EVALUATION}", "nanochat",
            {"its own ZeRO-2, compiled": ""}),
    Program(
        "torchtitan `Trainer`", "torchtitan", "train.py", _TITAN, "torchtitan",
        {"FSDP2": "", "FSDP2 x tensor 2 x pipeline 2": _PARALLEL, "FSDP2, compiled": "--compile.enable"},
    ),
    Program("transformers `Trainer`", "transformers", "hf_trainer.py", ways={"DDP": ""}),
    Program("Lightning `Trainer`", "lightning", "lightning_trainer.py", ways={"DDP": ""}),
    Program("accelerate, with EMA", "accelerate", "accelerate_ema.py", ways={"DDP": ""}),
)  # fmt: skip


CLONED = ("nanogpt", "modded-nanogpt", "nanochat")


def place(program: Program, sources: Path | None) -> tuple[Path | None, str]:
    """The script of a program, and which version of it; no script where it is not here."""
    if program.data in CLONED:
        found = sources / program.source if sources is not None else None
        if found is None or not (found / program.script).is_file():
            return None, f"no {program.source} in {sources}" if sources else "no --sources (PROGRAMS_DIR)"
        head = subprocess.run(["git", "-C", found, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        return found / program.script, head.stdout.strip() or "a copy"
    try:
        number = version(program.source)
    except PackageNotFoundError:
        return None, f"{program.source} is not installed"
    if program.data:
        spec = importlib.util.find_spec(program.source)
        assert spec is not None
        assert spec.origin is not None
        return Path(spec.origin).parent / program.script, number
    return HERE / "scripts" / program.script, number


def environment(program: Program, script: Path, work: Path) -> dict[str, str]:
    """What the program is started with, and the files that it reads, made."""
    given = {**os.environ, "HF_HUB_OFFLINE": "1", "NANOCHAT_BASE_DIR": str(work), "COLUMNS": "120"}
    given["DATA_PATH"] = str(work)  # of modded-nanogpt
    if program.data == "nanochat":
        path = [str(script.parents[1]), given.get("PYTHONPATH", "")]
        given["PYTHONPATH"] = os.pathsep.join(each for each in path if each)
    if program.data:
        folder = script.parent if program.data == "nanogpt" else work
        making = [sys.executable, str(HERE / "data.py"), program.data, str(folder)]
        subprocess.run(making, env=given, check=True, capture_output=True)
    return given


def runs(program: Program, script: Path) -> Iterator[tuple[str, list[str], bool]]:
    """What each run is called, its command line, and whether it is that of one process."""
    one = f"{program.arguments} {program.annotated}".split()
    fake = ["annotate", "--fake", "--device", "cuda", "--steps", str(STEPS), "--json", str(script), *one]
    yield f"`annotate --fake`, {STEPS} steps", fake, True
    for name, more in program.ways.items():
        arguments = f"{program.arguments} {more}".strip()
        rank = ["trace", str(script), "--world-size", str(RANKS), "--json"]
        yield f"a rank of {RANKS}: {name}", [*rank, "--args", arguments] if arguments else rank, False


def run(command: list[str], given: dict[str, str], cwd: Path, alone: bool) -> dict[str, Any]:
    """What trainledger says of a program, with the seconds that it took; ``error`` where it says nothing."""
    if alone:  # of the variables that torchrun sets, for those that cannot do without
        given = {**given, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        given |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "trainledger", *command], env=given, cwd=cwd, capture_output=True, text=True
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        found = {"error": [{"sentence": (done.stderr.strip().splitlines() or ["no output"])[-1]}]}
    return found | {"took": time.perf_counter() - began}


def row(program: Program, number: str, name: str, found: dict[str, Any], alone: bool) -> str:
    """One line of the table."""
    if "error" in found:
        said = found["error"][0]["sentence"]
        return f"| {program.name} {number} | {name} | | | | | {said} |"
    flops = found["total"]["flops"] if alone else found["flops"]
    operations = found["total"]["operations"] if alone else found["operations"]
    sent = "" if alone else f"{sum(each['payload'] for each in found['collectives']) / 1e6:,.2f}"
    ended = found["ended"] if alone else found["partial"]
    wanted = f"stopped after {STEPS} optimizer steps, as asked"
    said = "to its end" if ended in ("", wanted) else ended
    more = f"; {len(found['notes'])} notes" if found["notes"] else ""
    return (
        f"| {program.name} {number} | {name} | {operations:,} | {flops / 1e9:,.2f} | {found['peak_nbytes'] / 1e6:,.2f} "
        f"| {sent} | {said}{more} |"
    )


def page(rows: list[str], skipped: list[str]) -> str:
    """docs/programs.md."""
    import torch

    left_out = "".join(f"\n- {each}" for each in skipped)
    left_out = f"\n\nLeft out:\n{left_out}" if skipped else ""
    return f"""# Programs of others, as they are

Written by `make programs PROGRAMS_DIR=...` on {date.today()} with torch {torch.__version__.partition("+")[0]} on a CPU:
each program runs unpatched, as its own files on PyPI or GitHub have it, on fake tensors as if on a GPU of 80 GB. Small
files that it reads are made; models are of the sizes that the arguments in
[programs.py](../tools/programs/programs.py) name. *annotate* rows are of {STEPS} optimizer steps with what comes before
and between them, in one process; the others are of one step of rank 0 of {RANKS}, as torchrun starts it. *sent* are the
bytes of all messages of collectives, counted whole. *To its end*: the recorded step or the {STEPS} steps ran whole;
notes say what was assumed, such as values that a program reads off its loss.

| program | run | operations | GFLOP | peak MB | sent MB | what is said |
|---|---|---|---|---|---|---|
{chr(10).join(rows)}

The scripts of transformers, Lightning and accelerate are in [tools/programs/scripts](../tools/programs/scripts),
written as their examples are. torchtitan's configuration for debugging has flex attention, which is counted dense, and
CUDA graphs, of which the first capture is what is recorded. Its blocks with flex attention cannot be compiled for fake
tensors: a note says that they are accounted for as eager, so the compiled row is that of the eager one. modded-nanogpt
brings kernels of Triton and CUDA, and attention from a hub (nanochat too): none is run; of its own kernels memory is
counted and no FLOPs (they are listed as uncounted), of attention the FLOPs of the longest sequence or window. Its
script fetches the vocabulary of GPT-2 (`TIKTOKEN_CACHE_DIR` where there is no network). Operations are those before
fusion, so its peak, that of a validation of 262,144 tokens in one process, is above what the
compiled program has.{left_out}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sources", type=Path, help="a folder with nanoGPT, modded-nanogpt and nanochat cloned into it"
    )
    parser.add_argument("--write", action="store_true", help="replace docs/programs.md")
    parser.add_argument("--only", default="", help="programs whose name has this in it")
    asked = parser.parse_args()
    sources = asked.sources.resolve() if asked.sources is not None else None
    rows, skipped, failed = [], [], 0
    for program in PROGRAMS:
        if asked.only.lower() not in program.name.lower():
            continue
        script, number = place(program, sources)
        if script is None:
            skipped.append(f"{program.name}: {number}")
            print(f"skipped {program.name}: {number}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            given = environment(program, script, Path(folder))
            cwd = script.parent if program.data == "nanogpt" else Path(folder)
            for name, command, alone in runs(program, script):
                found = run(command, given, cwd, alone)
                rows.append(row(program, number, name, found, alone).replace(f"{script.parent}{os.sep}", ""))
                failed += (program.ends or alone) and not rows[-1].rpartition("| ")[2].startswith("to its end")
                print(rows[-1], f"({found['took']:.0f} s)", flush=True)
    if asked.write:
        PAGE.write_text(page(rows, skipped))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
