"""Kills at random moments: ``python bench faults [--kills 300] [--seconds 3600] [--write]``.

Each kind of run is trained once undisturbed; then again and again, one rank or all of them killed (SIGKILL) at a moment
drawn uniformly over a run's time, and resumed to the end, in a third of the cases over a second kill. Counted are
resumes that failed, damaged checkpoints that a kill left under their name, and runs that end with other weights than
the undisturbed one. Then the tests of single faults are run. What was found is stored in bench/results/faults.json;
``--write`` makes docs/faults.md of it.

Processes are forked from one that has imported torch, so that a start takes a tenth of a second and not seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from trainledger.engine.train.engine import train
from trainledger.engine.train.run_directory import all_checkpoints, damage, model_files
from trainledger.engine.train.stop import Stopped
from trainledger.spec.cluster import Cluster
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields, with_fields
from trainledger.spec.problem import InvalidInput
from trainledger.spec.recipe import Checkpoints, Evaluation, Recipe
from trainledger.spec.run import DataSpec, Run
from trainledger.spec.schedule import Cosine

SECONDS_TO_END = 120.0  # of ranks whose peer was killed, and of a whole resumed run; longer is a failed resume
SECONDS_IN_A_COLLECTIVE = 30.0

MODEL = from_fields(
    ModelSpec,
    {
        "vocab_size": 257,
        "d_model": 128,
        "n_layers": 4,
        "attention.n_heads": 4,
        "feed_forward.d_ff": 256,
        "max_seq_len": 32,
    },
)
RECIPE = Recipe(
    seq_len=32, global_batch=8, micro_batch=2, steps=16, learning_rate=1e-3, dropout=0.1,
    schedule=Cosine(warmup_steps=4), checkpoints=Checkpoints(every=2, keep_last=2),
    evaluation=Evaluation(every=5, sequences=8),
)  # fmt: skip
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: fields of the layout, fields of the recipe
    "one process": ({}, {"micro_batch": 8}),
    "gradient accumulation": ({}, {"micro_batch": 1}),
    "asynchronous saves": ({}, {"checkpoints.asynchronous": True, "checkpoints.every": 1}),
    "FSDP2 on 2": ({"shard": 2}, {}),
    "FSDP2 on 2, asynchronous saves": ({"shard": 2}, {"checkpoints.asynchronous": True, "checkpoints.every": 1}),
    "FSDP2 on 4": ({"shard": 4}, {}),
    "2 tensor ranks": ({"tensor": 2}, {"dropout": 0.0}),
    "2 pipeline stages": ({"pipeline": 2, "schedule": "1f1b"}, {"dropout": 0.0}),
}


@dataclass
class Met:
    """What the kills of one kind of run have met."""

    kills: int = 0
    while_saving: int = 0
    runs: int = 0
    failed_resumes: int = 0
    damaged: int = 0
    other_weights: int = 0
    notes: list[str] = field(default_factory=list)


def run_of(kind: str, folder: Path) -> Run:
    """The run of a kind; its text and tokens are those of all kinds."""
    layout_fields, recipe_fields = KINDS[kind]
    layout = Layout(**layout_fields)
    data = DataSpec(path=(str(folder / "text.txt"),), cache=str(folder / "cache"))
    run = Run(model=MODEL, recipe=with_fields(RECIPE, recipe_fields), data=data)
    return replace(run, layout=layout, cluster=Cluster(count=layout.devices))


def started(run: Run, run_dir: Path, log: Path) -> list[int]:
    """The processes of a run, forked from this one; each trains or resumes it, and writes its words into ``log``."""
    ranks = run.layout.devices
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os._exit(_rank(run, run_dir, log, rank, ranks, port))
        found.append(pid)
    return found


def _rank(run: Run, run_dir: Path, log: Path, rank: int, ranks: int, port: int) -> int:
    """One rank, from its fork to its exit code."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    if ranks > 1:
        there = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in there.items()})
    try:
        train(run, run_dir, resume=True, seconds_in_a_collective=SECONDS_IN_A_COLLECTIVE)
    except Stopped as end:
        print(f"rank {rank}: {end}", file=sys.stderr, flush=True)
        return end.exit_code
    except InvalidInput as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        return 2
    except BaseException as error:  # what no rank should end with
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def ended(pids: Sequence[int], seconds: float) -> list[int | None]:
    """The exit code of each process (that of a signal negative); None for one that had to be killed at last."""
    deadline = time.monotonic() + seconds
    codes: dict[int, int] = {}
    while len(codes) < len(pids) and time.monotonic() < deadline:
        for pid in pids:
            if pid not in codes and (told := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(told[1])
        time.sleep(0.002)
    for pid in set(pids) - codes.keys():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [codes.get(pid) for pid in pids]


def weights(run_dir: Path) -> str:
    """The SHA-256 of the last checkpoint's weights and optimizer states."""
    last = all_checkpoints(run_dir)[-1]
    found = hashlib.sha256(last.name.encode())
    for each in [*model_files(last), *sorted(last.glob("optimizer*.safetensors"))]:
        found.update(each.read_bytes())
    return found.hexdigest()


def campaign(kind: str, folder: Path, kills: int, chance: random.Random, until: float) -> Met:
    """So many kills of one kind of run, or as many as there is time for."""
    run, met = run_of(kind, folder), Met()
    whole, log = folder / f"{kind} whole", folder / f"{kind}.log"
    began = time.monotonic()
    codes = ended(started(run, whole, log), 10 * SECONDS_TO_END)
    assert codes == [0] * len(codes), (codes, log.read_text())
    wall, expected = time.monotonic() - began, weights(whole)
    while met.kills < kills and time.monotonic() < until:
        run_dir = folder / f"{kind} {met.runs}"
        met.runs += 1
        before = met.kills
        for _ in range(1 + (chance.random() < 1 / 3)):
            _kill_once(run, run_dir, log, chance, wall, met)
        log.write_text("")
        codes = ended(started(run, run_dir, log), SECONDS_TO_END)
        said = log.read_text()
        problem = ""
        if codes != [0] * len(codes):
            met.failed_resumes, problem = met.failed_resumes + 1, f"resume ended with {codes}"
        elif "skipped" in said:
            met.damaged, problem = met.damaged + 1, "a checkpoint was skipped as damaged"
        elif weights(run_dir) != expected:
            met.other_weights, problem = met.other_weights + 1, "other weights"
        if problem:
            met.notes.append(f"{kind}, run {met.runs}, kill {before + 1}: {problem}: {said[-1500:]}")
            print(met.notes[-1], flush=True)
        else:
            shutil.rmtree(run_dir)
    return met


def _kill_once(run: Run, run_dir: Path, log: Path, chance: random.Random, wall: float, met: Met) -> None:
    """Start or resume a run and kill one rank, or all, at a random moment; the others must end by themselves."""
    pids = started(run, run_dir, log)
    moment = time.monotonic() + chance.uniform(0, wall)
    while (left := moment - time.monotonic()) > 0:
        time.sleep(min(left, 0.01))
    killed = pids if chance.random() < 0.5 else [chance.choice(pids)]
    alive = [pid for pid in killed if not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)]
    met.while_saving += any((run_dir / "checkpoints").glob(".tmp-step-*"))
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    met.kills += bool(alive)
    codes = ended(pids, SECONDS_TO_END)
    if not set(codes) <= {-signal.SIGKILL, 0, 5}:
        met.notes.append(f"ranks ended with {codes} after a kill: {log.read_text()[-1500:]}")
        print(met.notes[-1], flush=True)
    met.damaged += sum(damage(each) is not None for each in all_checkpoints(run_dir))


def row(kind: str, met: Met) -> str:
    """One line of the campaign's table."""
    counts = (met.kills, met.while_saving, met.runs, met.failed_resumes, met.damaged, met.other_weights)
    return f"| {kind} | {' | '.join(f'{each:,}' for each in counts)} |"


def total(by_kind: dict[str, Met]) -> Met:
    """The sum over all kinds."""
    names = ("kills", "while_saving", "runs", "failed_resumes", "damaged", "other_weights")
    return Met(**{name: sum(getattr(each, name) for each in by_kind.values()) for name in names})


def run_campaign(
    folder: Path, kinds: Sequence[str], kills: int, *, seed: int, seconds: float, tell: Callable[[str, Met], object]
) -> dict[str, Met]:
    """Kills divided among kinds of run, one kind after another; the time left is divided among those that remain.

    ``tell`` gets each kind as it is done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(
        "\n\n".join(f"sentence {each} of a text that is trained on" for each in range(4000))
    )
    torch.set_num_threads(1)
    by_kind: dict[str, Met] = {}
    end = time.monotonic() + seconds
    for number, kind in enumerate(kinds):
        share = (end - time.monotonic()) / (len(kinds) - number)
        wanted = kills // len(kinds) + (number < kills % len(kinds))
        by_kind[kind] = campaign(kind, folder, wanted, random.Random(f"{seed} {kind}"), time.monotonic() + share)
        tell(kind, by_kind[kind])
    return by_kind


ROOT = Path(__file__).resolve().parent.parent


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
        "Written by `python bench faults --write`.",
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
