"""The directory of a metered loop, with the files of an engine's run but no run file; and the loop's own trackers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import date, datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from trainledger.engine.train.records import Metrics, read_lines
from trainledger.engine.train.run_directory import read_state, taken, write_state
from trainledger.forecast.predict.forecast import Forecast
from trainledger.ledger.ledger import Ledger, write_ledger
from trainledger.ledger.measured import measured_run
from trainledger.observe.measure.hardware import DISTURBED, SLOWED, title
from trainledger.spec.plain import write_json
from trainledger.spec.problem import InvalidInput
from trainledger.spec.units import counted


def main_script() -> str | None:
    """Its whole path; None where there is none, as in an interactive session."""
    found = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if found is None else os.path.abspath(found)


_PREFIX = "trainledger/"
_REFUSED: set[str] = set()  # trackers that failed once get nothing more


def send(scalars: dict[str, float], step: int) -> None:
    """Send numbers to the run of W&B, of MLflow that is active in this process. A tracker's failure ends nothing."""
    named = {f"{_PREFIX}{name}": value for name, value in scalars.items()}
    for name, tracker in (("wandb", _wandb), ("mlflow", _mlflow)):
        module = sys.modules.get(name)
        if module is None or name in _REFUSED:
            continue
        try:
            tracker(module, named, step)
        except Exception:  # trackers raise classes of their own, and of the network's
            _REFUSED.add(name)


def _wandb(wandb: Any, scalars: dict[str, float], step: int) -> None:
    if getattr(wandb, "run", None) is not None:  # wandb's own step counter is the loop's
        wandb.run.log({f"{_PREFIX}step": step, **scalars}, commit=False)


def _mlflow(mlflow: Any, scalars: dict[str, float], step: int) -> None:
    if mlflow.active_run() is not None:
        mlflow.log_metrics(scalars, step=step)


METERED = "metered"  # in the state of a run that is of no run file


class RunDirectory:
    """Lines of steps, findings and the state, as they come; ``end`` writes the measurement."""

    def __init__(self, path: Path, device: torch.device, after: int) -> None:
        self.path = path
        self._device = device
        self._metrics = Metrics(path, after=after)
        self._slowed: set[int] = set()
        self._disturbed: set[int] = set()
        write_state(path, "running", step=after, loop=METERED)
        self.event("resume" if after else "start", after)

    def write(self, line: dict[str, Any], outside: dict[str, float], *, metered: bool) -> None:
        """The line of a step, and of what happened before it outside of all steps."""
        if outside:
            self._metrics.write({"event": "outside", "step": line["step"], "phase_seconds": outside})
        self._metrics.write(line)
        if metered:
            self._slowed.add(line["step"])
        if (line.get("others") or 0.0) > DISTURBED or (line.get("slowdown") or 1.0) > SLOWED:
            self._disturbed.add(line["step"])

    def forecast(self, told: Forecast) -> None:
        """Keep a forecast, where the loop brought none."""
        if not (self.path / "forecast.json").exists():
            write_json(told, self.path / "forecast.json")

    def event(self, event: str, step: int, **facts: object) -> None:
        self._metrics.event(event, step, **facts)

    def end(self, state: str, step: int, seconds: float, parameters: int, ledger: Ledger | None) -> None:
        """Close the files; the measurement is made of all lines. ``state`` is finished, interrupted or failed."""
        self.event("finish" if state == "finished" else state, step, seconds=seconds)
        self._metrics.close()
        lines, today, version = list(read_lines(self._metrics.path)), date.today().isoformat(), str(torch.__version__)
        facts: dict[str, Any] = {"device": title(self._device), "torch_version": version, "date": today}
        if self._device.type == "cuda":  # elsewhere it is what the process holds resident
            peaks = [line["peak_memory_nbytes"] for line in lines if line.get("peak_memory_nbytes")]
            facts["allocator_peak_nbytes"] = max(peaks, default=None)
        measured = measured_run(lines, ledger, metered=self._slowed, disturbed=self._disturbed, **facts)
        write_json(replace(measured, parameters=parameters), self.path / "measured.json")
        if ledger is not None:
            write_ledger(ledger, self.path / "measured-ledger.json.gz")
        write_state(self.path, state, step=step, loop=METERED)


@contextmanager
def begin(
    run_dir: str | Path | None, device: torch.device, after: int, forecast: Forecast | None, say: Callable[[str], None]
) -> Iterator[RunDirectory]:
    """Hold a directory for a loop that goes on after so many steps; a free one beside it where it has another run."""
    named = Path(run_dir) if run_dir is not None else _named()
    with ExitStack() as stack:
        path, why = _free(named, after, stack)
        if why:
            say(f"{named} {why}: this run is in {path}.")
        if forecast is not None:
            write_json(forecast, path / "forecast.json")
        yield RunDirectory(path, device, after)


def _free(named: Path, after: int, stack: ExitStack) -> tuple[Path, str]:
    """The directory, or the first free NAME-2, NAME-3 ... and why it is not the one; held until ``stack`` ends.

    A loop that goes on does so in the one of them with the most of its steps, of equal ones in the last.
    """
    numbered = (named if number == 1 else named.with_name(f"{named.name}-{number}") for number in count(1))
    begun = []
    for path in numbered:
        if not path.is_dir():
            break
        begun.append(path)
    free = chain([path], numbered)
    first = ""
    for path in chain(sorted(begun, key=lambda each: min(after, _steps(each)))[-1:] if after else begun, free):
        inside = ExitStack()
        why = _taken(path, after, inside)
        if not why:
            stack.push(inside)
            return path, first
        inside.close()
        first = first or why
    raise AssertionError


def _steps(path: Path) -> int:
    """The last step in the lines of a directory; its state.json has it only of a loop that ended."""
    return max((line["step"] for line in read_lines(path / "metrics.jsonl") if "seconds" in line), default=0)


def _taken(path: Path, after: int, stack: ExitStack) -> str:
    """Why a loop cannot write into a directory, which is held; "" where it can."""
    if not taken(path, stack):
        return "is being written by another run"
    try:
        state = read_state(path)
    except InvalidInput:
        return "holds a run with a damaged state.json"
    if state is not None and state.get("loop") != METERED:
        return "holds a run of a run file"
    steps = _steps(path)
    if steps and not after:
        return f"holds a metered loop of {counted(steps, 'step')} (first_step={steps + 1} continues it)"
    if 0 < steps < after // 2:  # the last lines of a loop that was killed are not written
        return f"holds a metered loop of {counted(steps, 'step')}, which first_step={after + 1} does not continue"
    return ""


def _named() -> Path:
    """runs/SCRIPT-DATE-TIME"""
    script = main_script()
    stem = Path(script).stem if script else "loop"
    return Path("runs") / f"{stem}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
