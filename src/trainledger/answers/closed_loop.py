"""The loop that the project is for: forecast a run, train it, meter it, and set the two ledgers side by side.

The engine knows nothing of this: forecast and meter watch it as observers and leave files in its directory.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median

import torch

from trainledger import catalog
from trainledger.answers.machine import THIS_MACHINE
from trainledger.answers.pages.record import read_metrics
from trainledger.engine.train.device import compute_capability, find_device
from trainledger.engine.train.engine import say_on_stderr, train
from trainledger.engine.train.observer import Finished, Observer, StepRecord, TrainingState
from trainledger.engine.train.preflight import Needs
from trainledger.engine.train.ranks import SECONDS_IN_A_COLLECTIVE, Ranks, this_rank
from trainledger.forecast.plan.memory_model import refuse_beyond
from trainledger.forecast.predict.device_memory import memory_of_device
from trainledger.forecast.predict.forecast import Forecast
from trainledger.forecast.predict.predict import checkpoint_nbytes, forecast
from trainledger.forecast.predict.roofline import Machine
from trainledger.ledger.entry import Amounts, in_any_memory
from trainledger.ledger.ledger import Ledger, summary, write_ledger
from trainledger.ledger.measured import Measured, measured_run
from trainledger.ledger.ranks import RankFigures, account_of, account_run, figures, write_rank
from trainledger.ledger.step import account
from trainledger.observe.measure.hardware import memory_nbytes, title
from trainledger.observe.measure.meter import QuietSteps, StepMeter
from trainledger.observe.meter.engine import Watching
from trainledger.spec.calibration import find_calibration
from trainledger.spec.device import Device, kernels_of_capability
from trainledger.spec.layout import Layout
from trainledger.spec.parts import with_fields
from trainledger.spec.plain import read_json, write_json
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run

_OF_A_RANK = ("parameters", "flops", "kept_nbytes", "kept_by_kind", "peak_nbytes", "peak_by_category")


def forecast_on(run: Run, device: torch.device, *, validation_sequences: int | None = None) -> tuple[Forecast, Ledger]:
    """The forecast of a run on the device that will train it, and its closed-form ledger.

    ``validation_sequences`` are those that an evaluation really has, where the text holds fewer than the recipe asks.
    """
    account = account_run(run, backend=_kernels(device))
    ledger, ranks = account.ledger, account.ranks
    machine, notes = machine_on(run, device)
    asked = run.recipe.evaluation.sequences
    if validation_sequences is not None and validation_sequences < asked:
        recipe = with_fields(run.recipe, {"evaluation.sequences": validation_sequences})
        run = replace(run, recipe=recipe)
        notes += (f"an evaluation takes the {validation_sequences:,} held-out sequences there are, not {asked:,}",)
    predicted = forecast(replace(account, run=run), machine)
    if ranks:
        ledger = ranks[0].ledger
        notes += (f"FLOPs and bytes of a step are those of the first of {run.layout.devices} ranks",)
        of_rank = summary(ledger)
        predicted = replace(predicted, **{name: of_rank[name] for name in _OF_A_RANK})
    return replace(predicted, notes=(*notes, *predicted.notes)), ledger


def closed_form(run: Run, device: torch.device) -> Ledger:
    """The closed-form ledger of a step of a run's first rank with the kernels of a device."""
    return account(run, backend=_kernels(device))


def _kernels(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else kernels_of_capability(compute_capability(device))


def machine_on(run: Run, device: torch.device) -> tuple[Machine | None, tuple[str, ...]]:
    """What predicts the times of a run on the device that trains it, and a note where the run file names another."""
    named = run.cluster.device
    if named == THIS_MACHINE:
        return find_calibration(device.type), ()
    sheet, here = catalog.device(named), title(device)
    if device.type == "cuda" and is_it(sheet, here, memory_nbytes(device)):
        return sheet, ()
    return find_calibration(device.type), (f"run.toml names {named}; this ran on {here} and is forecast for it",)


def is_it(sheet: Device, name: str, memory: int | None) -> bool:
    """Whether a torch device of that name and memory is the one of a data sheet.

    Its model word (H100, 4090) must stand in the name, the kind of board must not contradict it, and the memory must
    be that of the box, of which a driver shows a little less or more (GB against GiB).
    """
    words, found = sheet.title.lower().replace("-", " ").split(), name.lower().replace("-", " ").split()
    models = [word for word in words if any(letter.isdigit() for letter in word) and not word.endswith("gb")]
    boards = [{"pcie", "nvl", "sxm", "sxm2", "sxm4", "sxm5"} & set(each) for each in (words, found)]
    kinds = [{each[:3] for each in board} for board in boards]
    if not models or models[0] not in found or (all(kinds) and kinds[0] != kinds[1]):
        return False
    if memory is None or sheet.memory_nbytes is None:
        return True
    return 0.9 < memory / sheet.memory_nbytes < 1.1


def refuse_what_does_not_fit(run: Run, device: torch.device) -> None:
    """Raise `InvalidInput` where the closed form's peak is more than the device's memory."""
    there = memory_nbytes(device)
    if there is not None:
        refuse_beyond(run, there, lambda other: closed_form(other, device).peak().nbytes, title(device))


class Forecasting(Observer):
    """Keeps the forecast in the run's directory before the first step; a resumed run keeps its first one."""

    def on_start(self, state: TrainingState) -> None:
        with suppress(InvalidInput):  # none yet, or a damaged one, is made
            read_json(Forecast, state.run_dir / "forecast.json")
            return
        predicted, ledger = forecast_on(state.run, state.device, validation_sequences=state.validation_sequences)
        write_ledger(ledger, state.run_dir / "predicted-ledger.json.gz")
        write_json(predicted, state.run_dir / "forecast.json")


class Deadline(Observer):
    """Ends a session, saved, before ``at`` (of `time.monotonic`).

    Where the second step of a run shows that all take longer than that, ``fewer`` is as many as there is time for.
    """

    def __init__(self, at: float) -> None:
        self.at, self.passed = at, False
        self.fewer: int | None = None

    def on_start(self, state: TrainingState) -> None:
        self._begun, self._last = state.step, state.run.recipe.total_steps

    def on_step_end(self, record: StepRecord) -> None:
        left = self.at - time.monotonic()
        if record.step == 2 and self._begun == 0 and (self._last - 2) * record.seconds > left:
            self.fewer = max(_FEWEST_STEPS, int(_SHARE_OF_STEPS * left / record.seconds))
        if not self.passed and (self.fewer or left < record.seconds) and record.step < self._last:
            self.passed = True
            os.kill(os.getpid(), signal.SIGTERM)


_FEWEST_STEPS = 4  # the third is metered
_SHARE_OF_STEPS = 0.7  # of the time, beside evaluations and checkpoints


class Measuring(Observer):
    """Meters the run and keeps its measurement in its directory, however the session ends.

    A later session that ends before its metered step keeps the metered ledger of the earlier one.
    """

    def __init__(self) -> None:
        self.meter = StepMeter()
        self.quiet = QuietSteps()

    def observers(self) -> Sequence[Observer]:
        """What must watch the engine, the meter innermost."""
        return self, self.quiet, RankMeasuring(self.meter), self.meter

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
            matmul_sums_nbytes=meter.matmul_sums_nbytes,
            device=title(self._state.device),
            torch_version=str(torch.__version__),
            date=date.today().isoformat(),
            notes=self._notes(),
        )
        if self._state.device.type == "cpu":
            measured = replace(measured, threads=torch.get_num_threads())
        if meter.ledger is None:
            measured = replace(measured, parameters=meter.parameters)
        if not self._state.run.layout.alone:
            measured = replace(measured, model_flops=None)  # MFU is of all ranks, and the metered FLOPs are of one
        if meter.ledger is not None:
            write_ledger(meter.ledger, directory / "measured-ledger.json.gz")
        else:
            measured = _with_earlier(measured, directory / "measured.json")
        write_json(measured, directory / "measured.json")

    def _notes(self) -> tuple[str, ...]:
        notes = []
        if not self.meter.records:
            notes.append(
                "FLOPs, bytes kept for backward and the peak by category are not measured: to record a step operation "
                "by operation would run compiled code eagerly here, with other bits; the allocator's peak is measured"
            )
        slowdowns = self.quiet.slowdowns
        if slowdowns:
            notes.append(
                f"in {len(slowdowns)} of {len(self.quiet.samples)} steps a small matmul took {median(slowdowns):.2f} "
                "times as long as at the processor's full speed: a core shared with another virtual machine, heat, or "
                "a power limit"
            )
        if self.quiet.unknown:
            notes.append("this system does not report how busy other processes were; no step was discarded")
        return tuple(notes)


class RankMeasuring(Observer):
    """Keeps the figures of this rank's metered step in the run's directory, beside those of its account."""

    def __init__(self, meter: StepMeter) -> None:
        self.meter = meter

    def on_start(self, state: TrainingState) -> None:
        self._state = state

    def on_stop(self) -> None:
        ledger, state = self.meter.ledger, self._state
        if ledger is None or state.run.layout.alone:
            return
        own = account_of(state.run, state.rank, kernels=_kernels(state.device))
        before, after = figures(own.ledger, state.run.layout), figures(ledger)
        write_rank(state.run_dir, RankFigures(rank=state.rank, title=own.title, predicted=before, measured=after))


def _with_earlier(measured: Measured, path: Path) -> Measured:
    """The ledger figures of an earlier session under this one's times."""
    try:
        earlier = read_json(Measured, path)
    except (OSError, InvalidInput):
        return measured
    names = ("parameters", "tokens_per_step", "flops", "model_flops", "kept_nbytes", "kept_by_kind", "peak_nbytes",
             "peak_by_category", "allocator_peak_nbytes", "matmul_sums_nbytes", "eager")  # fmt: skip
    return replace(measured, **{name: getattr(measured, name) or getattr(earlier, name) for name in names})


def run_closed_loop(
    run: Run,
    run_dir: Path,
    *,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    rank_timeout: float = SECONDS_IN_A_COLLECTIVE,
    preflight: bool = True,
) -> Finished:
    """Train a run with its forecast written before and its measurement after; raises what `train` raises.

    A run whose closed form does not fit in the device's memory is refused before anything is built. Of several ranks
    the first has the observers, and each meters its step. With ``preflight`` the account is set against what is free
    before the first step, and ranks against each other.
    """
    if run.cluster.count == 1:  # the engine says what is wrong with others
        refuse_what_does_not_fit(run, find_device(run.cluster.backend))
    if this_rank():
        meter = StepMeter()
        watching: list[Observer] = [RankMeasuring(meter), meter]
    else:
        measuring = Measuring()
        watch = Watching(lambda: measuring.meter.metered, say_on_stderr)
        watching = [Forecasting(), *observers, *measuring.observers(), watch]
    return train(
        run,
        run_dir,
        resume=resume,
        observers=watching,
        seconds_in_a_collective=rank_timeout,
        needs_of=needs_of if preflight else None,
    )


def needs_of(run: Run, ranks: Ranks) -> Needs:
    """What the account of a rank says that it needs."""
    kernels = _kernels(ranks.device)
    own = account_of(run, ranks.rank, kernels=kernels).ledger
    whole = account(replace(run, layout=Layout(), cluster=replace(run.cluster, count=1)), backend=kernels)
    state = in_any_memory(own.resident)
    written = checkpoint_nbytes(own)
    peak = own.peak().nbytes  # an evaluation has no gradients and takes its loss as a step does: it needs less
    return Needs(
        peak=peak,
        device=None if ranks.device.type == "cpu" else _of_device(run, peak, ranks.device, own.reserved),
        copies=written if run.recipe.checkpoints.asynchronous else 0,
        checkpoint=checkpoint_nbytes(whole),
        file=max(state.get("parameters", 0), state.get("optimizer state", 0)),
        message=max((entry.payload for entry in own.entries), default=0),
    )


def _of_device(run: Run, peak: int, device: torch.device, reserved: Amounts) -> int:
    """Bytes of an accelerator that the tensors of a peak take, with the allocator and the libraries around them.

    Of a device without a sheet in the catalog that is not known: the largest of all sheets is assumed.
    """
    machine, _ = machine_on(run, device)
    sheet = machine if isinstance(machine, Device) else catalog.device("h100-sxm")
    return int(memory_of_device(run, peak, sheet, reserved).nbytes)
