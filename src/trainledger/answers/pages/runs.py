"""The document of the runs of a directory: how each ended, measured over predicted, and how to resume it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import join
from typing import Any

from trainledger.answers.pages.record import RunRecord
from trainledger.report.document import Code, Document, Table, section, sections, shown
from trainledger.spec.problem import InvalidInput
from trainledger.spec.runfile import read, run_name

DEFAULT = "runs"
_BROKEN_OFF = {"killed": "was killed", "interrupted": "was interrupted", "failed": "failed"}
_FACTS = ("step_seconds", "peak_nbytes", "tokens_per_second", "mfu")
_COLUMNS = ("run", "state", "steps", "step time", "ratio", "peak", "ratio", "MFU")


def page(folder: Path, records: Sequence[RunRecord]) -> Document:
    """A row of each run, what its directory lacks, and the command that resumes it."""
    facts = [_facts(record) for record in records]
    none = f"No runs in {folder}.\ntrainledger train RUN.toml makes one."
    table = Table("runs", _COLUMNS, tuple(_cells(fact) for fact in facts), align="llrrrrrr")
    lacking = tuple(f"{fact['run']}: {', '.join(fact['missing'])}" for fact in facts if fact["missing"])
    return Document(
        f"The runs in {folder}",
        sections(
            section("", table, lacking) if facts else Code(none),
            *(
                section(f"{fact['run']} {_BROKEN_OFF[fact['state']]}; this resumes it:", Code(fact["resume"]))
                for fact in facts
                if fact["resume"] is not None
            ),
        ),
        data=lambda: {"dir": str(folder), "runs": facts},
    )


def _facts(record: RunRecord) -> dict[str, Any]:
    rows, steps = record.reconciliation, record.steps
    unended = record.state.get("state") != "finished"  # which alone writes what was measured
    facts: dict[str, Any] = {
        "run": record.path.name,
        "state": record.state.get("state", "unknown"),
        "step": steps[-1]["step"] if steps else 0,
    }
    for name in _FACTS:
        facts |= {name: rows[name].measured, f"{name}_ratio": rows[name].ratio}
    return facts | {
        "validation_loss": record.evaluations[-1]["validation_loss"] if record.evaluations else None,
        "missing": [lack for lack in record.missing if not (unended and lack == "measured.json is not there")],
        "resume": _resume(record),
    }


def _resume(record: RunRecord) -> str | None:
    """The command that resumes a run that broke off; None where its directory is not what training would take."""
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


def _cells(facts: dict[str, Any]) -> tuple[str, ...]:
    def text(name: str, unit: str) -> str:
        return shown(facts[name], unit) or "-"

    def ratio(name: str) -> str:
        return "-" if facts[name] is None else f"{facts[name]:.3f}"

    return (
        facts["run"],
        str(facts["state"]),
        str(facts["step"]),
        text("step_seconds", "seconds"),
        ratio("step_seconds_ratio"),
        text("peak_nbytes", "nbytes"),
        ratio("peak_nbytes_ratio"),
        text("mfu", "share"),
    )
