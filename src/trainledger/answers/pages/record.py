"""What a run directory holds, read tolerantly: a run that broke off is still a run."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainledger.engine.train.facts import steps_without_line
from trainledger.engine.train.run_directory import all_checkpoints, step_of
from trainledger.forecast.predict.forecast import Forecast
from trainledger.ledger.ledger import Ledger, read_ledger
from trainledger.ledger.measured import Measured, measured_run
from trainledger.ledger.ranks import RankFigures, read_ranks
from trainledger.observe.reconcile import Reconciliation, reconcile
from trainledger.spec.durable import content_of, opened
from trainledger.spec.plain import is_amount, read_json
from trainledger.spec.problem import InvalidInput

FILES = (
    "run.toml",
    "forecast.json",
    "predicted-ledger.json.gz",
    "metrics.jsonl",
    "measured.json",
    "measured-ledger.json.gz",
)


@dataclass(frozen=True)
class RunRecord:
    """A run directory in memory; ``missing`` has a sentence for each file that is not there or not whole."""

    path: Path
    state: dict[str, Any]
    forecast: Forecast | None
    measured: Measured
    predicted_ledger: Ledger | None
    measured_ledger: Ledger | None
    lines: tuple[dict[str, Any], ...]
    missing: tuple[str, ...]
    ranks: tuple[RankFigures, ...] = ()

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The lines of optimizer steps."""
        return [line for line in self.lines if "loss" in line and "step" in line]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The lines of evaluations."""
        return [line for line in self.lines if "validation_loss" in line and "step" in line]

    @property
    def findings(self) -> list[dict[str, Any]]:
        """What the watch found out of the ordinary while it ran."""
        found = [line for line in self.lines if line.get("event") == "finding"]
        return [each for each in found if isinstance(each.get("sentence"), str) and isinstance(each.get("name"), str)]

    @property
    def reconciliation(self) -> Reconciliation:
        """Forecast and measurement; what the directory lacks is empty there."""
        return reconcile(self.forecast or Forecast(), self.measured)


def read_run(path: str | os.PathLike[str], *, ledgers: bool = True) -> RunRecord:
    """Everything that a run directory holds; nothing missing or damaged in it is an error.

    Without ``ledgers`` the two big files are left alone.
    """
    folder = Path(path)
    missing: list[str] = []

    def attempt(name: str, read: Callable[[Path], Any]) -> Any:
        if not os.path.isfile(folder / name):
            missing.append(f"{name} is not there" if not os.path.lexists(folder / name) else f"{name} is not a file")
            return None
        try:
            return read(folder / name)
        except InvalidInput as error:
            missing.append(f"{name}: {error.problems[0].rule}")
        except RecursionError:
            missing.append(f"{name}: is nested too deeply")
        except OSError as error:
            missing.append(f"{name}: {error.strerror or error}")
        return None

    state = _state(folder)
    if not (folder / "run.toml").is_file() and "loop" not in state:  # a metered loop has none
        missing.append("run.toml is not there")
    lines = tuple(attempt("metrics.jsonl", read_metrics) or ())
    if "loop" not in state and (
        lacking := steps_without_line((line for line in lines if "loss" in line), _done(folder, state))
    ):
        missing.append(f"metrics.jsonl {lacking}")
    measured = attempt("measured.json", lambda file: read_json(Measured, file))
    return RunRecord(
        path=folder,
        state=state,
        forecast=attempt("forecast.json", lambda file: read_json(Forecast, file)),
        measured=measured or measured_run(lines),
        predicted_ledger=attempt("predicted-ledger.json.gz", read_ledger) if ledgers else None,
        measured_ledger=attempt("measured-ledger.json.gz", read_ledger) if ledgers else None,
        lines=lines,
        missing=tuple(missing),
        ranks=read_ranks(folder),
    )


def _done(folder: Path, state: dict[str, Any]) -> int:
    """The steps that a run has done for certain."""
    steps = [step_of(all_checkpoint) for all_checkpoint in all_checkpoints(folder)]
    return max([*steps, step if isinstance(step := state.get("step"), int) else 0])


def is_run(path: Path) -> bool:
    """Whether a path is the directory of a run, whole or not."""
    return os.path.isdir(path) and any(os.path.lexists(path / name) for name in ("state.json", *FILES))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; a line torn by a crash is passed over."""
    lines = []
    with io.TextIOWrapper(opened(path), encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict) and _is_sound(line):
                lines.append(line)
    return lines


def _is_sound(line: dict[str, Any]) -> bool:
    """Whether the numbers of a line are numbers, as everything that reads them expects."""
    numbers = [line.get(name) for name in ("step", "tokens", "seconds", "time")]
    phases = line.get("phase_seconds")
    if phases is not None and not (isinstance(phases, dict) and all(map(is_amount, phases.values()))):
        return False
    if "loss" in line and not (line.get("step") and line.get("tokens") is not None):
        return False
    losses = [line.get(name) for name in ("loss", "validation_loss")]  # not a number where a run diverged
    return all(number is None or is_amount(number) for number in numbers) and all(
        loss is None or isinstance(loss, float) or is_amount(loss) for loss in losses
    )


def _state(folder: Path) -> dict[str, Any]:
    """The texts and numbers of the state file; a run that says it goes on, but that no process holds, was killed."""
    path = folder / "state.json"
    try:
        state = json.loads(content_of(path)) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(state, dict):
        return {}
    state = {name: each for name, each in state.items() if isinstance(each, str | bool) or is_amount(each)}
    if state.get("state") == "running" and not _is_locked(folder / "lock"):
        state["state"] = "killed"
    return state


def _is_locked(lock: Path) -> bool:
    """Whether a process trains there: it holds the lock as long as it lives, however it ends."""
    import fcntl

    if not lock.is_file():
        return False
    try:
        with open(lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two who look do not see each other
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
