"""The events of a run for its observers, and the clock of its phases."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainledger.engine.train.device import asynchronous, synchronize
from trainledger.engine.train.precision import LossScaler
from trainledger.engine.train.run_directory import checkpoints_dir
from trainledger.engine.train.step import ALONE, Together
from trainledger.spec.recipe import Guard
from trainledger.spec.run import Run

PHASES = ("data", "forward", "backward", "clip", "optimizer", "checkpoint", "evaluation")


@dataclass
class GuardRecord:
    """What a run remembers: steps that were left out (counted from 1) in the window, and totals since its start.

    The batches of step index k are those of index k + ``batches_left_out`` of the data.
    """

    recent: list[int] = field(default_factory=list)
    skipped_steps: int = 0
    roll_backs: int = 0
    batches_left_out: int = 0

    def skip(self, step: int, guard: Guard) -> bool:
        """Count a step that is left out; whether it is one too many."""
        self.skipped_steps += 1
        self.recent = [each for each in self.recent if each > step - guard.window] + [step]
        return len(self.recent) > guard.skips

    def rolled_back(self, step: int, to: GuardRecord, at: int) -> None:
        """Go on as after step ``at``, of which ``to`` is what was known, past the data up to step ``step``."""
        self.recent = to.recent
        self.roll_backs += 1
        self.batches_left_out += step - at

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return asdict(self)


@dataclass
class TrainingState:
    """A run in progress: what a step changes, and where it happens. ``step`` counts optimizer steps done."""

    run: Run
    run_dir: Path
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: LossScaler | None = None
    together: Together = ALONE
    rank: int = 0
    data_rank: int = 0  # among the ranks with different sequences
    data_ranks: int = 1  # which there are so many of
    step: int = 0
    seconds: float = 0.0  # of training so far, over all sessions
    loss: float | None = None
    validation_loss: float | None = None
    unigram_entropy: float | None = None
    validation_sequences: int | None = None  # in one evaluation
    initial_weights: dict[str, str] | None = None  # file and sha256 of what it began with
    guard: GuardRecord = field(default_factory=GuardRecord)


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, counted from 1; ``tokens`` and ``time`` (seconds) since the start of the run.

    ``grad_norm`` is before clipping, None without clipping. ``phase_seconds`` is empty on steps of an
    accelerator that were not waited for phase by phase. Of a ``skipped`` step no update was made.
    """

    step: int
    loss: float
    tokens: int
    seconds: float
    learning_rate: float
    grad_norm: float | None
    time: float
    phase_seconds: dict[str, float] = field(default_factory=dict)
    skipped: bool = False


@dataclass(frozen=True)
class EvaluationRecord:
    """Mean loss over the held-out sequences after ``step`` steps, and the corpus' unigram entropy (both in nats).

    Of a mixture the mean is as its sources are mixed, and ``by_source`` has the loss of each; else it is empty.
    """

    step: int
    validation_loss: float
    unigram_entropy: float | None
    phase_seconds: dict[str, float]
    by_source: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Finished:
    """A run that reached its last step. Losses in nats; ``seconds`` of training over all sessions."""

    step: int
    loss: float | None
    validation_loss: float | None
    unigram_entropy: float | None
    tokens: int
    seconds: float
    run_dir: Path
    checkpoint: Path

    @classmethod
    def of(cls, run_dir: Path, facts: Mapping[str, Any]) -> Finished:
        """The result of a run whose ``state.json`` says finished."""
        path = checkpoints_dir(run_dir) / facts["checkpoint"]
        names = ("step", "loss", "validation_loss", "unigram_entropy", "tokens", "seconds")
        return cls(**{name: facts[name] for name in names}, run_dir=run_dir, checkpoint=path)


class Observer:
    """One who watches a run; every method does nothing unless overridden. Steps are counted from 1."""

    def on_start(self, state: TrainingState) -> None:
        """Before the first step of this session; ``state.step`` steps are done already."""

    def meters(self, step: int) -> bool:
        """True where the phases of this step must be waited for on an accelerator."""
        return False

    def around_step(self, step: int) -> AbstractContextManager[object]:
        """Entered around fetching the batch and the optimizer step."""
        return nullcontext()

    def around_phase(self, phase: str) -> AbstractContextManager[object]:
        """Entered around each of `PHASES`, inside `around_step` for those that belong to a step."""
        return nullcontext()

    def on_step_end(self, record: StepRecord) -> None:
        """After the step was read, outside `around_step`; an accelerator may be at work on the next one by then."""

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """After an evaluation."""

    def on_checkpoint(self, step: int, path: Path, seconds: float) -> None:
        """After a checkpoint is safe on disk."""

    def on_finish(self, finished: Finished) -> None:
        """After the last step, its evaluation and its checkpoint."""

    def on_stop(self) -> None:
        """At the end of the session, however it ended."""


# Waiting on both sides of each phase costs overlap, so that only every tenth step of an accelerator is clocked so.
class PhaseClock:
    """Adds up wall seconds by phase; ``exact`` waits for the accelerator on both sides of each."""

    def __init__(self, device: torch.device, observers: Sequence[Observer] = ()) -> None:
        self.exact = not asynchronous(device)
        self.seconds: dict[str, float] = {}
        self._device = device
        self._observers = observers

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        with ExitStack() as stack:
            for observer in self._observers:
                stack.enter_context(observer.around_phase(phase))
            if self.exact:
                synchronize(self._device)
            started = time.perf_counter()
            yield
            if self.exact:
                synchronize(self._device)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """The seconds since the last call (empty where they would be launch times only)."""
        seconds, self.seconds = self.seconds, {}
        return seconds if self.exact else {}
