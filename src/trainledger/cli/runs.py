"""The runs so far: how each ended, measured over predicted for its step time and its peak, and what goes on with it."""

from __future__ import annotations

import argparse
from textwrap import fill
from typing import TYPE_CHECKING, Any

from trainledger.cli.arguments import add_json, print_json
from trainledger.report.record import is_run, read_run
from trainledger.report.table import table
from trainledger.spec.problem import InvalidInput, Problem, printable
from trainledger.spec.runfile import read, run_name
from trainledger.units import format_nbytes, format_percent, format_seconds

if TYPE_CHECKING:
    from trainledger.report.record import RunRecord

DEFAULT = "runs"
_BROKEN_OFF = {"killed": "was killed", "interrupted": "was interrupted", "failed": "failed"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", default=DEFAULT, metavar="DIR", help="where the run directories are")
    add_json(parser)


def execute(args: argparse.Namespace) -> int:
    from pathlib import Path

    folder = Path(args.dir)
    if not args.dir or (not folder.is_dir() and (args.dir != DEFAULT or folder.exists())):
        rule = "is not a directory" if folder.exists() else "does not exist"
        raise InvalidInput([Problem("--dir", args.dir, rule if args.dir else "must not be empty")])
    found = sorted((each for each in folder.iterdir() if is_run(each)) if folder.is_dir() else [])
    facts = [_facts(read_run(each, ledgers=False)) for each in found]
    if args.json:
        print_json({"dir": str(folder), "runs": facts})
    elif not facts:
        print(printable(f"No runs in {folder}.\ntrainledger train RUN.toml makes one."))
    else:
        columns = ["run", "state", "steps", "step time", "ratio", "peak", "ratio", "MFU"]
        print(table(columns, [_cells(each) for each in facts], align="llrrrrrr"))
        for each in facts:
            if each["missing"]:
                print(printable(fill(f"{each['run']}: {', '.join(each['missing'])}", 80, subsequent_indent="  ")))
        for each in facts:
            if each["resume"] is not None:
                print(
                    printable(f"\n{each['run']} {_BROKEN_OFF[each['state']]}; this goes on with it:\n{each['resume']}")
                )
    return 0


def _facts(record: RunRecord) -> dict[str, Any]:
    rows = record.reconciliation
    steps = record.steps
    step = steps[-1]["step"] if steps else 0
    return {
        "run": record.path.name,
        "state": record.state.get("state", "unknown"),
        "step": step,
        "step_seconds": rows["step_seconds"].measured,
        "step_seconds_ratio": rows["step_seconds"].ratio,
        "peak_nbytes": rows["peak_nbytes"].measured,
        "peak_nbytes_ratio": rows["peak_nbytes"].ratio,
        "tokens_per_second": rows["tokens_per_second"].measured,
        "tokens_per_second_ratio": rows["tokens_per_second"].ratio,
        "mfu": rows["mfu"].measured,
        "mfu_ratio": rows["mfu"].ratio,
        "validation_loss": record.evaluations[-1]["validation_loss"] if record.evaluations else None,
        "missing": list(record.missing),
        "resume": _resume(record),
    }


def _resume(record: RunRecord) -> str | None:
    """The command that goes on with a run that broke off; None where its directory is not what training would take."""
    from pathlib import Path
    from shlex import join

    file, folder = record.path / "run.toml", record.path.parent
    if record.state.get("state") not in _BROKEN_OFF or not file.is_file():
        return None
    try:
        if run_name(read(file)) != record.path.name:
            return None
    except InvalidInput:
        return None
    elsewhere = [] if folder == Path(DEFAULT) else ["--dir", str(folder)]
    return join(["trainledger", "train", str(file), "--resume", *elsewhere])


def _cells(facts: dict[str, Any]) -> list[str]:
    def shown(name: str, show: Any) -> str:
        return show(facts[name]) if facts[name] is not None else "-"

    def ratio(value: float) -> str:
        return f"{value:.3f}"

    return [
        facts["run"],
        str(facts["state"]),
        str(facts["step"]),
        shown("step_seconds", format_seconds),
        shown("step_seconds_ratio", ratio),
        shown("peak_nbytes", format_nbytes),
        shown("peak_nbytes_ratio", ratio),
        shown("mfu", format_percent),
    ]
