"""A calibration refitted to the runs that this machine has trained, and taken back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from trainledger.forecast.predict.refit import ENOUGH_RUNS, Refit, RunSample, refit
from trainledger.forecast.predict.step import step_time
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.measured import BUSY, ENOUGH_STEPS, Measured
from trainledger.ledger.model.parameters import leaves_of
from trainledger.ledger.step import account
from trainledger.spec.calibration import (
    WHOLE_STEP,
    Calibration,
    append_fit,
    calibration_path,
    fit_kind,
    read_calibration,
    undo_fit,
)
from trainledger.spec.device import kernels_of_capability
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Run
from trainledger.spec.runfile import read

BACKENDS = ("cuda", "mps", "cpu")
PHASES = ("forward", "backward", "clip", "optimizer")
_MOST_NAMED = 6


@frozen(kw_only=True)
class PastRun:
    """What the directory of a run keeps of it: its measurement, and the ledger of its metered step if there is one."""

    path: Path
    measured: Measured
    ledger: Ledger | None


class _PassedOver(Exception):  # noqa: N818
    """Why a run says nothing of a calibration."""


def update_calibration(runs: Iterable[PastRun], *, calibration: Path | None = None) -> Refit:
    """Fit the calibration of this machine to past runs and keep the fit in its file, where it makes forecasts better.

    Runs of another machine, torch version or number of threads, of several ranks, compiled or disturbed ones are passed
    over, each with its reason. Raises `InvalidInput` where fewer than `ENOUGH_RUNS` are left, or nothing was measured.
    """
    past = list(runs)
    devices = [past_run.measured.device for past_run in past]
    path, machine = max(_calibrations(calibration), key=lambda each: devices.count(each[1].title))
    samples, passed_over = list[RunSample](), list[tuple[str, str]]()
    for past_run in past:
        try:
            samples.append(sample_of(past_run, machine))
        except _PassedOver as reason:
            passed_over.append((str(past_run.path), str(reason)))
        except InvalidInput as error:
            passed_over.append((str(past_run.path), error.problems[0].rule))
    if len(samples) < ENOUGH_RUNS:
        raise InvalidInput([_too_few(len(samples), passed_over, path)])
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    found = refit(samples, title=machine.title, date=date, passed_over=passed_over)
    if not found.better:
        return found
    append_fit(path, found.fit)
    return replace(found, written=str(path))


def undo_update(calibration: Path | None = None) -> tuple[Path, int]:
    """Take the last fit of this machine's calibration back; its file, and how many fits are left in it."""
    path, _ = max(_calibrations(calibration), key=lambda each: [fit.date for fit in each[1].fits[-1:]])
    return path, undo_fit(path)


def _calibrations(path: Path | None) -> list[tuple[Path, Calibration]]:
    """The file that is named, or those of this machine's accelerator and processor; raises InvalidInput for none."""
    kept = list(dict.fromkeys(calibration_path(backend) for backend in BACKENDS)) if path is None else [path]
    there = [each for each in kept if each.exists()] or kept[-1:]
    return [(each, read_calibration(each)) for each in there]


def _too_few(count: int, passed_over: Sequence[tuple[str, str]], path: Path) -> Problem:
    named = [f"{Path(name).name} {why}" for name, why in passed_over[:_MOST_NAMED]]
    if len(passed_over) > _MOST_NAMED:
        named.append(f"and {len(passed_over) - _MOST_NAMED} more")
    others = f" (passed over: {'; '.join(named)})" if named else ""
    rule = f"are too few to fit {path} to, which takes {ENOUGH_RUNS} of this machine and this torch{others}"
    return Problem("runs", count, rule)


def sample_of(past: PastRun, machine: Calibration) -> RunSample:
    """A run's step by phase and kind, measured and as the calibration alone predicts it; raises for what is no use."""
    run = read(past.path / "run.toml")
    _refuse(past.measured, run, machine)
    spread = past.measured.step_seconds
    assert spread is not None
    kernels = "cpu" if machine.backend == "cpu" else kernels_of_capability(machine.compute_capability)
    ledger = account(run, backend=kernels)
    step = step_time(
        ledger,
        replace(machine, fits=()),
        tensors=leaves_of(run.model, run.recipe).trained().tensors,
        blocking=run.recipe.launch_blocking,
    )
    if step.seconds is None:
        raise _PassedOver(f"has no predicted step time: {'; '.join(step.notes)}")
    predicted: dict[str, float] = {}
    for entry in step.entries:
        kind = fit_kind(entry.entry.phase, entry.entry.kind)
        predicted[kind] = predicted.get(kind, 0.0) + float(entry.seconds)
    measured = _measured(past)
    if not measured:  # an accelerator's operations have no separate times: the step is fitted as a whole
        predicted, measured = {WHOLE_STEP: float(step.seconds)}, {WHOLE_STEP: spread.median}
    return RunSample(name=str(past.path), seconds=spread.median, measured=measured, predicted=predicted)


def _refuse(measured: Measured, run: Run, machine: Calibration) -> None:
    """Raise where a run says nothing of this calibration."""
    if measured.step_seconds is None:
        raise _PassedOver("has no measured step time")
    if measured.device != machine.title:
        raise _PassedOver(f"ran on {measured.device or 'an unnamed machine'}, not on {machine.title}")
    if measured.torch_version != machine.torch_version:
        raise _PassedOver(f"ran with torch {measured.torch_version or 'unknown'}, not {machine.torch_version}")
    if measured.threads is not None and machine.backend == "cpu" and measured.threads != machine.threads:
        raise _PassedOver(f"ran with {measured.threads} threads, not {machine.threads}")
    if not run.layout.alone:
        raise _PassedOver("ran on several ranks, whose times overlap")
    if run.recipe.compiles:
        raise _PassedOver("was compiled, and a calibration has no rates of a compiler's kernels")
    if measured.step_seconds.count < ENOUGH_STEPS:
        raise _PassedOver(f"has {measured.step_seconds.count} steady steps, fewer than {ENOUGH_STEPS}")
    if any(BUSY in note for note in measured.notes):
        raise _PassedOver("was disturbed by other processes, or a processor below its full speed")


def _measured(past: PastRun) -> dict[str, float]:
    """Seconds of a step by phase and kind: those of the metered step, scaled phase by phase to steady steps.

    The recorder slows the metered step; what steady steps take is known of whole phases.
    """
    ledger = past.ledger
    if ledger is None or any(entry.seconds is None for entry in ledger):
        return {}
    found: dict[str, float] = {}
    for phase in PHASES:
        steady = past.measured.step_seconds_by_phase.get(phase)
        # Recomputation happens in the backward pass, as clocks around phases have it.
        entries = [
            entry for entry in ledger if entry.phase == phase or (entry.phase, phase) == ("recompute", "backward")
        ]
        recorded = sum((entry.seconds or 0.0) * entry.times for entry in entries)
        if steady is None or not recorded:
            continue
        for entry in entries:
            kind = fit_kind(entry.phase, entry.kind)
            found[kind] = found.get(kind, 0.0) + (entry.seconds or 0.0) * entry.times * steady / recorded
    return found
