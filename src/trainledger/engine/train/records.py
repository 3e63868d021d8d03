"""What a run writes down as it goes: its curve, `state.json` and its spikes; by the first rank alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainledger.engine.train.checkpoint import Say
from trainledger.engine.train.handing_over import figures
from trainledger.engine.train.metrics import Metrics, NoMetrics, read
from trainledger.engine.train.observer import StepRecord, TrainingState
from trainledger.engine.train.ranks import Ranks
from trainledger.engine.train.run_directory import write_state
from trainledger.engine.train.step import Feed
from trainledger.engine.train.watch import SpikeWatch


class Records:
    """The records of a run that one process keeps; on other ranks than the first nothing reaches a file."""

    def __init__(self, state: TrainingState, feed: Feed, ranks: Ranks, say: Say) -> None:
        self.metrics: Metrics = NoMetrics(ranks.lines)
        self._state, self._ranks = state, ranks
        self._watch = SpikeWatch(state.run.recipe.watch, feed, say)

    def open(self) -> None:
        """Go on with the file of the curve after the run's step, and know again what was usual by then."""
        self.metrics.close()
        state, kept = self._state, self._ranks.lines
        if not self._ranks.first:
            self.metrics = NoMetrics(kept)
            return
        self.metrics = Metrics(state.run_dir, after=state.step, kept=kept)
        self._watch.remember(each for each in read(self.metrics.path) if "loss" in each)

    def watch(self, record: StepRecord) -> None:
        """Compare a step with what is usual; a spike is a sentence and an event."""
        if self._ranks.first:
            self._watch.see(record, self.metrics, self._batch(record.step))

    def documents(self, step: int) -> Sequence[str]:
        """The documents of the batch of a step (counted from 1); none on other ranks than the first."""
        return self._watch.documents(self._batch(step)) if self._ranks.first else ()

    def write_state(self, how: str, **more: object) -> dict[str, Any]:
        """Replace the run's `state.json` by its figures and ``more``; what it has now."""
        facts = {**figures(self._state), **more}
        if self._ranks.first:
            write_state(self._state.run_dir, how, **facts)
        return facts

    def note_end(self, how: str, why: str, **more: object) -> None:
        """Write how a run ended early, where the disk still has room."""
        try:
            self.metrics.event(how, self._state.step, why=why)
            self.write_state(how, why=why, **more)
        except OSError:
            pass  # the exception has the reason for the end; a full disk must not replace it

    def _batch(self, step: int) -> int:
        return step - 1 + self._state.guard.batches_left_out
