"""How a run shows itself to the person who started it: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from trainledger.engine.remarks import unheard
from trainledger.engine.train.device import memory_in_use
from trainledger.engine.train.observer import EvaluationRecord, Finished, Observer, StepRecord, TrainingState
from trainledger.spec.problem import printable
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
