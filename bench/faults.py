"""Kills at random moments: ``python bench/faults.py [--kills 300] [--seconds 3600] [--write]``.

Each kind of run is trained once undisturbed; then again and again, one rank or all of them killed (SIGKILL) at a moment
drawn uniformly over a run's time, and resumed to the end, in a third of the cases over a second kill. Counted are
resumes that failed, damaged checkpoints that a kill left under their name, and runs that end with other weights than
the undisturbed one. Then the tests of single faults are run. What was found is stored in bench/results/faults.json;
``--write`` makes docs/faults.md of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))

from fault_kills import KINDS, RECIPE, Met, row, run_campaign, total  # noqa: E402

DOCUMENT = ROOT / "docs" / "faults.md"
RESULTS = ROOT / "bench" / "results" / "faults.json"

SINGLE: tuple[tuple[str, str, str], ...] = (
    # what happens, what follows, the tests of it
    ("SIGHUP, SIGUSR1, SIGUSR2, SIGTERM or SIGINT, to one process, to all, to one rank of two",
     "the step is finished and saved by all ranks; 128 + the signal's number; not started again",
     "tests/engine/train/test_stop_signals.py"),
    ("standard output and standard error full, closed, or without a reader", "the run continues; code 0",
     "tests/engine/train/test_unheard.py"),
    ("a checkpoint's model, optimizer, training.json or manifest cut short, a bit flipped, emptied, missing, of "
     "another run, nested deeply", "set aside with a sentence; the checkpoint before it; the same bits in the end",
     "tests/engine/train/test_checkpoint_files.py"),
    ("the same of the files of one rank of two", "all ranks take the same decision",
     "tests/engine/train/test_damaged_ranks.py"),
    ("damaged lines of metrics.jsonl", "left out and counted", "tests/engine/train/test_metrics_file.py"),
    ("a token shard cut short, a bit flipped, a token outside the vocabulary; a damaged index, tokenizer, memory",
     "refused with file and bytes; rebuilt from the shards", "tests/engine/data/test_store.py"),
    ("a batch, or held-out text, that one rank of two cannot read", "all end with code 2 before that step's update",
     "tests/engine/train/test_reading.py"),
    ("a full disk at a random byte of a save, a directory that turns read-only, a clock that runs backwards",
     "code 4, earlier checkpoints whole; nothing changes", "tests/engine/train/test_saving_faults.py"),
    ("one of two ranks killed in a save, stopped for less and for longer than the time-out in a step and in a save, "
     "with a full disk", "all end in time, with 5 or 4; earlier checkpoints whole; the same bits after a resume",
     "tests/engine/train/test_rank_faults.py"),
)  # fmt: skip


def run_single_faults() -> None:
    """The tests of `SINGLE`; the row of each is printed and stored as it is done."""
    for what, follows, tests in SINGLE:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = [sys.executable, "-m", "pytest", tests, "-n", "0", f"--junitxml={report}"]
            subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
            suite = ElementTree.parse(report).getroot().find("testsuite")
        assert suite is not None
        count, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
        passed = count - skipped - int(suite.attrib["failures"]) - int(suite.attrib["errors"])
        result = f"{passed} of {count}" + (f", {skipped} skipped" if skipped else "")
        line = f"| {what} | {follows} | `{tests}` | {result} |"
        print(line, flush=True)
        store("single", {"rows": stored().get("single", {}).get("rows", {}) | {tests: line}})


def here() -> str:
    """When and on what something was found."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, gloo"
    system = f"{platform.system()} {platform.release()} {platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    return f"{date.today().isoformat()}; {versions}; {system}"


def page(found: dict[str, Any]) -> str:
    """The whole of docs/faults.md, of what is stored."""
    kills, singles = found.get("kills", {}), found.get("single", {})
    by_kind = {kind: Met(**kills["by_kind"][kind]) for kind in KINDS if kind in kills.get("by_kind", {})}
    table = [*(row(kind, met) for kind, met in by_kind.items()), row("**all**", total(by_kind))]
    return "\n".join([
        "# What was done to runs",
        "",
        "Written by `python bench/faults.py --write`.",
        "",
        "## Kills",
        "",
        "One rank or all of them killed (SIGKILL) at a moment drawn uniformly over a run's time, a start without",
        "imports and the end included; then the run is resumed to its last step, in a third of the cases over a second",
        f"kill. A run has {RECIPE.steps} steps, a checkpoint every other step (asynchronous: every step), dropout (but",
        "on tensor ranks and stages) and evaluations. Weights and optimizer states are compared bit for bit with those",
        "of a run left alone.",
        "",
        f"{kills.get('here', '')}.",
        "",
        "| kind of run | kills | while saving | runs | failed resumes | damaged checkpoints | other weights |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *table,
        "",
        "## Single faults",
        "",
        "Real files are cut, flipped, deleted and exchanged, real processes signalled, stopped and killed.",
        "",
        f"{singles.get('here', '')}.",
        "",
        "| fault | what follows | tests | passed |",
        "|---|---|---|---|",
        *(singles["rows"][tests] for _, _, tests in SINGLE if tests in singles.get("rows", {})),
        "",
    ])  # fmt: skip


def stored() -> dict[str, Any]:
    """What earlier calls have found."""
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return found


def store(part: str, found: dict[str, Any]) -> None:
    """Keep a part of what was found, beside the others and the earlier kinds of run."""
    before = stored()
    whole = before | {part: before.get(part, {}) | found | {"here": here()}}
    RESULTS.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def kill_and_count(options: argparse.Namespace) -> None:
    """The campaign; each kind of run is printed and stored as it is done."""
    folder = Path(tempfile.mkdtemp(prefix="trainledger-faults-"))

    def tell(kind: str, met: Met) -> None:
        print(row(kind, met), flush=True)
        store("kills", {"by_kind": stored().get("kills", {}).get("by_kind", {}) | {kind: asdict(met)}})

    by_kind = run_campaign(
        folder, options.kinds, options.kills, seed=options.seed, seconds=options.seconds, tell=tell
    )  # fmt: skip
    whole = total(by_kind)
    print(row("all", whole), flush=True)
    if whole.failed_resumes or whole.damaged or whole.other_weights:
        print(f"runs that went wrong are kept in {folder}", file=sys.stderr)
    else:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=24 * 3600.0, help="at most so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--only", choices=("kills", "single"), help="one of the two parts")
    parser.add_argument("--write", action="store_true", help=f"write docs/{DOCUMENT.name} of what is stored")
    options = parser.parse_args()
    if options.only != "single":
        kill_and_count(options)
    if options.only != "kills":
        run_single_faults()
    if options.write:
        DOCUMENT.write_text(page(stored()), encoding="utf-8")


if __name__ == "__main__":
    main()
