"""The loop that the project is for: forecast a run, train it, meter it, and set the two ledgers side by side.

The engine knows nothing of this: forecast and meter watch it as observers and leave files in its directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

from trainledger.api import machine_of
from trainledger.ledger.entry import Ledger
from trainledger.ledger.measured import Measured, measured_run
from trainledger.ledger.step import account
from trainledger.ledger.store import write_ledger
from trainledger.measure.machine import title
from trainledger.measure.meter import StepMeter
from trainledger.measure.quiet_steps import QuietSteps
from trainledger.predict.forecast import Forecast, forecast
from trainledger.report.record import read_metrics
from trainledger.spec.plain import read_json, write_json
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run
from trainledger.train.engine import train
from trainledger.train.observer import Finished, Observer, TrainingState


def forecast_on(run: Run, device: torch.device) -> tuple[Forecast, Ledger]:
    """The forecast of a run on the device that will train it, and the closed-form ledger behind it."""
    ledger = account(run, backend="cpu" if device.type == "cpu" else "cuda")
    return forecast(run, ledger, machine_of(run)), ledger


class Forecasting(Observer):
    """Keeps the forecast in the run's directory before the first step; a resumed run keeps its first one."""

    def on_start(self, state: TrainingState) -> None:
        if (state.run_dir / "forecast.json").exists():
            return
        told, ledger = forecast_on(state.run, state.device)
        write_ledger(ledger, state.run_dir / "predicted-ledger.json.gz")
        write_json(told, state.run_dir / "forecast.json")


class Measuring(Observer):
    """Meters the run and keeps its measurement in its directory, however the sitting ends.

    A later sitting that ends before its metered step keeps the metered ledger of the earlier one.
    """

    def __init__(self) -> None:
        self.meter = StepMeter()
        self.quiet = QuietSteps()

    def observers(self) -> Sequence[Observer]:
        """What must watch the engine, the meter innermost."""
        return self, self.quiet, self.meter

    def on_start(self, state: TrainingState) -> None:
        self._state = state

    def on_stop(self) -> None:
        directory = self._state.run_dir
        meter = self.meter
        measured = measured_run(
            read_metrics(directory / "metrics.jsonl"),
            meter.ledger,
            metered=meter.metered,
            disturbed=self.quiet.disturbed,
            allocator_peak_nbytes=meter.allocator_peak_nbytes,
            device=title(self._state.device),
            torch_version=str(torch.__version__),
            date=date.today().isoformat(),
            notes=self._notes(),
        )
        if meter.ledger is not None:
            write_ledger(meter.ledger, directory / "measured-ledger.json.gz")
        else:
            measured = _with_earlier(measured, directory / "measured.json")
        write_json(measured, directory / "measured.json")

    def _notes(self) -> tuple[str, ...]:
        notes = []
        if self._state.run.recipe.compile:
            notes.append("the step was metered without torch.compile, which an operation-by-operation record undoes")
        if self.quiet.unknown:
            notes.append("this system does not tell how busy other processes were; no step was discarded")
        return tuple(notes)


def _with_earlier(measured: Measured, path: Path) -> Measured:
    """The ledger figures of an earlier sitting under this one's times."""
    from dataclasses import replace

    try:
        earlier = read_json(Measured, path)
    except (OSError, InvalidInput):
        return measured
    names = ("parameters", "tokens_per_step", "flops", "model_flops", "kept_nbytes", "kept_by_kind", "peak_nbytes",
             "peak_by_category", "allocator_peak_nbytes")  # fmt: skip
    return replace(measured, **{name: getattr(earlier, name) for name in names})


def run_closed_loop(run: Run, run_dir: Path, *, resume: bool = False, observers: Sequence[Observer] = ()) -> Finished:
    """Train a run with its forecast written before and its measurement after; raises what `train` raises."""
    measuring = Measuring()
    return train(run, run_dir, resume=resume, observers=[Forecasting(), *observers, *measuring.observers()])
