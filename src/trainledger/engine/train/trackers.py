"""The curve of a run in the trackers that people look at: TensorBoard, Weights & Biases, MLflow.

A resumed run goes on in the same place of the tracker. What a tracker cannot do (no network, no room) is said once and
never ends a run: `metrics.jsonl` has everything.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from trainledger.engine.train.checkpoint import Say
from trainledger.engine.train.observer import EvaluationRecord, Observer, StepRecord, TrainingState
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.runfile import resolved


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

        self._writer: Any = SummaryWriter(str(state.run_dir / "tensorboard"), purge_step=state.step + 1)

    def send(self, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def end(self) -> None:
        self._writer.close()


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
            project=self.project, name=state.run_dir.name, id=_identity(state), resume="allow",
            dir=str(state.run_dir), config=resolved(state.run),
        )  # fmt: skip
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
