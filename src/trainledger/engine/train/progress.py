"""How a run shows itself: a bar on a terminal, a plain line now and then elsewhere, and the curve in trackers.

Trackers: TensorBoard, Weights & Biases, MLflow. A resumed run goes on in the same place of the tracker. What one cannot
do (no network, no room) is said once and never ends a run: ``metrics.jsonl`` has everything.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from trainledger.engine.remarks import unheard
from trainledger.engine.train.device import memory_in_use
from trainledger.engine.train.observer import EvaluationRecord, Finished, Observer, StepRecord, TrainingState
from trainledger.engine.train.run_directory import Say
from trainledger.spec.problem import InvalidInput, Problem, printable
from trainledger.spec.runfile import resolved
from trainledger.spec.units import format_count, format_nbytes, format_percent, format_seconds

SECONDS_BETWEEN_LINES = 10.0
STEPS_AVERAGED = 20


class Progress(Observer):
    """Loss, learning rate, tokens/s, MFU, memory and time left, on stderr.

    ``mfu`` turns seconds per step into a ratio; without it (no peak known) none is shown.
    """

    def __init__(self, *, mfu: Callable[[float], float] | None = None, stream: TextIO | None = None) -> None:
        self._mfu = mfu
        self._stream = unheard(stream or _standard_error())
        self._recent: deque[float] = deque(maxlen=STEPS_AVERAGED)
        self._last_line = 0.0
        self._state: TrainingState | None = None
        self._bar: Any = None
        self._task: Any = None

    def on_start(self, state: TrainingState) -> None:
        self._state = state
        total = state.run.recipe.total_steps
        if not self._stream.isatty():
            self._line(f"{state.run.model.name} on {state.device}: step {state.step} of {total}")
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("training"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}", markup=False),
        )
        self._bar = Bar(*columns, console=Console(file=self._stream))
        self._task = self._bar.add_task("training", total=total, completed=state.step, now="")
        self._bar.start()

    def on_step_end(self, record: StepRecord) -> None:
        self._recent.append(record.seconds)
        if self._bar is not None:
            self._bar.update(self._task, completed=record.step, now=self._now(record))
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._line(f"step {record.step}  {self._now(record)}")

    def on_evaluation(self, record: EvaluationRecord) -> None:
        unigram = "" if record.unigram_entropy is None else f" (unigram entropy {record.unigram_entropy:.3f})"
        by_source = "".join(f"; {name} {loss:.3f}" for name, loss in record.by_source.items())
        self._line(f"step {record.step}  validation loss {record.validation_loss:.3f} nats{unigram}{by_source}")

    def on_checkpoint(self, step: int, path: Path, seconds: float) -> None:
        if self._bar is None:
            self._line(f"step {step}  saved {path} in {format_seconds(seconds)}")

    def on_finish(self, finished: Finished) -> None:
        seconds = format_seconds(finished.seconds)
        self._line(f"finished {finished.step} steps, {format_count(finished.tokens)} tokens in {seconds}")

    def on_stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _now(self, record: StepRecord) -> str:
        """The figures of this moment as one line."""
        assert self._state is not None
        recipe = self._state.run.recipe
        seconds = sum(self._recent) / len(self._recent)
        parts = [
            f"loss {record.loss:.3f}",
            f"lr {record.learning_rate:.2e}",
            f"{format_count(recipe.tokens_per_step / seconds)} tokens/s",
        ]
        if self._mfu is not None:
            parts.append(f"MFU {format_percent(self._mfu(seconds))}")
        nbytes = memory_in_use(self._state.device)
        if nbytes is not None:
            parts.append(format_nbytes(nbytes))
        parts.append(f"{format_seconds((recipe.total_steps - record.step) * seconds)} left")
        return "  ".join(parts)

    def _line(self, text: str) -> None:
        text = printable(text)
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=self._stream, flush=True)
        self._last_line = time.monotonic()


def _standard_error() -> TextIO:
    """Standard error, or nowhere where the process was started with it closed."""
    if sys.stderr is None or sys.stderr.closed:
        return open(os.devnull, "w", encoding="utf-8")
    return sys.stderr


class Tracker(Observer):
    """Scalars of each step and evaluation, sent as long as the tracker takes them."""

    name = ""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.sending = False

    def begin(self, state: TrainingState) -> None:
        """Find the place where the run's scalars go."""
        raise NotImplementedError

    def send(self, scalars: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def end(self) -> None:
        raise NotImplementedError

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # trackers raise classes of their own, and of the network's
            self.sending = False
            self.say(f"{self.name} gets nothing more of this run, which goes on: {error}")

    def on_start(self, state: TrainingState) -> None:
        with self._going_on():
            self.begin(state)
            self.sending = True

    def on_step_end(self, record: StepRecord) -> None:
        scalars = {"loss": record.loss, "learning_rate": record.learning_rate, "step_seconds": record.seconds}
        if record.grad_norm is not None:
            scalars["grad_norm"] = record.grad_norm
        self._send(scalars, record.step)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        by_source = {f"validation_loss/{name}": loss for name, loss in record.by_source.items()}
        self._send({"validation_loss": record.validation_loss, **by_source}, record.step)

    def _send(self, scalars: dict[str, float], step: int) -> None:
        if self.sending:
            with self._going_on():
                self.send(scalars, step)

    def on_stop(self) -> None:
        if self.sending:
            with self._going_on():
                self.end()


class TensorBoard(Tracker):
    """Event files in ``<run_dir>/tensorboard``, where the tensorboard package is installed."""

    name = "TensorBoard"

    def on_start(self, state: TrainingState) -> None:
        if find_spec("tensorboard") is not None:  # nobody asked for it
            super().on_start(state)

    def begin(self, state: TrainingState) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._others = threading.excepthook
        threading.excepthook = self._heard
        self._writer: Any = SummaryWriter(str(state.run_dir / "tensorboard"), purge_step=state.step + 1)

    def send(self, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def end(self) -> None:
        self._writer.close()

    def on_stop(self) -> None:
        super().on_stop()
        if threading.excepthook == self._heard:
            threading.excepthook = self._others

    def _heard(self, args: threading.ExceptHookArgs) -> None:
        """Leave out the traceback of TensorBoard's thread: its next flush raises the same in the loop."""
        if not type(args.thread).__module__.startswith("tensorboard."):
            self._others(args)


class WeightsAndBiases(Tracker):
    """A run of a project of Weights & Biases; its files are in ``<run_dir>/wandb``.

    ``WANDB_MODE=offline`` keeps all of it on this machine.
    """

    name = "Weights & Biases"

    def __init__(self, project: str, say: Say) -> None:
        super().__init__(say)
        _refuse_without("wandb", "--wandb", project)
        self.project = project

    def begin(self, state: TrainingState) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=self.project,
            name=state.run_dir.name,
            id=_identity(state),
            resume="allow",
            dir=str(state.run_dir),
            config=resolved(state.run),
        )
        # Steps after the checkpoint are taken again on resume; wandb's own counter would drop them.
        self._run.define_metric("*", step_metric="step")

    def send(self, scalars: dict[str, float], step: int) -> None:
        self._run.log({"step": step, **scalars})

    def end(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """A run of an experiment of MLflow, at ``MLFLOW_TRACKING_URI``."""

    name = "MLflow"

    def __init__(self, experiment: str, say: Say) -> None:
        super().__init__(say)
        _refuse_without("mlflow", "--mlflow", experiment)
        self.experiment = experiment

    def begin(self, state: TrainingState) -> None:
        from mlflow import MlflowClient

        self._client: Any = MlflowClient()
        found = self._client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(self.experiment)
        tag, own = "trainledger.run", _identity(state)
        runs = self._client.search_runs([experiment], f"tags.`{tag}` = '{own}'")
        if runs:
            self._run_id = runs[0].info.run_id
            return
        run = self._client.create_run(experiment, run_name=state.run_dir.name, tags={tag: own})
        self._run_id = run.info.run_id
        for section, fields in resolved(state.run).items():
            for field, value in fields.items() if isinstance(fields, dict) else ():
                self._client.log_param(self._run_id, f"{section}.{field}", str(value)[:500])

    def send(self, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._client.log_metric(self._run_id, name, value, step=step)

    def end(self) -> None:
        self._client.set_terminated(self._run_id)


def _identity(state: TrainingState) -> str:
    """A name that is this run directory's alone, and the same after a resume."""
    return hashlib.sha256(str(state.run_dir.resolve()).encode()).hexdigest()[:16]


def _refuse_without(package: str, flag: str, value: str) -> None:
    if find_spec(package) is None:
        rule = f"needs the package {package}, which is not installed"
        raise InvalidInput([Problem(flag, value, rule, f"pip install {package}")])
