"""The loop: steps, evaluations, checkpoints and records, until the last step or a stop.

The device may still work on one step while the host launches the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from trainledger.engine.train import run_directory
from trainledger.engine.train.device import asynchronous
from trainledger.engine.train.evaluation import Reading, losses_by_source
from trainledger.engine.train.guard import Agreed, JudgedByHost, JudgedOnDevice, NonFiniteSteps, NotFinite, agree
from trainledger.engine.train.observer import (
    EvaluationRecord,
    Finished,
    Observer,
    PhaseClock,
    StepRecord,
    TrainingState,
)
from trainledger.engine.train.optimizer import leaves_out_on_device, set_learning_rate
from trainledger.engine.train.ranks import Ranks, lost_ranks_named
from trainledger.engine.train.records import Records, figures_to_go_on
from trainledger.engine.train.run_directory import Say
from trainledger.engine.train.saving import Saver, cannot_record
from trainledger.engine.train.step import Batch, Feed, dropout_seeds, optimizer_step
from trainledger.engine.train.stop import Interrupted, LostRank, Stopped, StopRequests, memory_told
from trainledger.spec.durable import FORBIDDEN, is_full
from trainledger.spec.problem import InvalidInput
from trainledger.spec.recipe import due, learning_rate
from trainledger.spec.units import format_seconds


# The host reads loss and norm of a step when it has launched the next one, so that the device always has work.
@dataclass(frozen=True)
class Launched:
    """An optimizer step, counted from 1. ``read`` waits for what the device made of it, and gives what ranks agree on.

    ``skipped`` and ``phase_seconds`` are those of `StepRecord`, as far as they are known without waiting.
    """

    number: int
    rate: float
    skipped: bool
    phase_seconds: dict[str, float]
    read: Callable[[], Agreed]


# On an accelerator a step is waited for phase by phase only this often: waiting costs overlap.
# Nine of ten steps are not clocked phase by phase: a metered run on a GPU then had 10.7 of 14.8 s unexplained, until
# each step's own seconds were counted (0.03 of 19.0 s).
STEPS_BETWEEN_CLOCKED = 10


UNSAVED_SECONDS = 600.0  # before the first checkpoint: from here on it is said how long nothing is saved
_STEADY = 3  # the step whose time is that of others


class TrainingLoop:
    """What one process does for a run: from the state it found to the last step or a stop."""

    def __init__(
        self, state: TrainingState, feed: Feed, observers: Sequence[Observer], say: Say, ranks: Ranks, saver: Saver
    ) -> None:
        self.state = state
        self.ranks = ranks
        self.saver = saver
        self.recipe = state.run.recipe
        self.feed, self.reading = feed, Reading(state.run, ranks)
        self.observers = observers
        self.say = say
        self.clock = PhaseClock(state.device, self.observers)
        self.saved_step = state.step if state.step else -1
        self.records = Records(state, feed, ranks, say)
        self.non_finite = NonFiniteSteps(state, ranks, self.records, say)
        self.begun_at = 0.0  # when the checkpoint that is being written was begun
        # Of several ranks each needs what the others say of a step before its update.
        self.runs_ahead = asynchronous(state.device) and ranks.alone and leaves_out_on_device(self.recipe)
        self.launched: Launched | None = None  # the step that is not read yet
        self.began = 0.0  # when the step that is read next did; it may have been tried before
        state.unigram_entropy = feed.unigram_entropy
        state.validation_sequences = sum(feed.validation_sequences.values())

    def run(self, *, resumed: bool) -> Finished:
        """Every remaining step; `state.json` tells how it ended."""
        state, records = self.state, self.records
        started: list[Observer] = []
        records.open()
        try:
            if records.metrics.damaged:
                self.say(f"Damaged lines of {records.metrics.path}, which are left out: {records.metrics.damaged}.")
            records.write_state("running")
            records.metrics.event("resume" if resumed else "start", state.step, device=str(state.device))
            stops = StopRequests(speaks=self.ranks.first, echoes=not self.ranks.alone)
            with stops as requests, memory_told(), lost_ranks_named(self.ranks.seconds):
                for observer in self.observers:
                    observer.on_start(state)
                    started.append(observer)
                self.steps(requests)
                return self.finish()
        except (Interrupted, LostRank) as error:
            asked = {"exit_code": error.exit_code} if isinstance(error, Interrupted) else {}
            self.note_end("interrupted", str(error), **asked)
            raise
        except OSError as error:
            if not is_full(error) and error.errno not in FORBIDDEN:
                self.note_end("failed", str(error))
                raise
            refused = cannot_record(state.run_dir, state.step, error)
            self.note_end("failed", str(refused), exit_code=refused.exit_code)
            raise refused from error
        except BaseException as error:
            code = {"exit_code": error.exit_code} if isinstance(error, Stopped) else {}
            self.note_end("failed", str(error) or type(error).__name__, **code)
            raise
        finally:
            self.saver.close()
            with suppress(OSError):  # what a full disk did not take was said where it was written
                self.records.metrics.close()
            for observer in started:
                try:
                    observer.on_stop()
                except (OSError, InvalidInput) as error:
                    self.say(f"What was measured could not be written: {error}.")

    def steps(self, requests: StopRequests) -> None:
        """Steps, evaluations and checkpoints until the last step or a request to stop."""
        state, recipe = self.state, self.recipe
        batches, self.began = self.batches(), time.perf_counter()
        while state.step < recipe.total_steps:
            try:
                self.step_and_what_is_due(batches, requests)
            except NotFinite as not_finite:
                self.roll_back(str(not_finite))
                batches = self.batches()
            if self.launched is None:
                self.began = time.perf_counter()
        self.keep_saved()

    def batches(self) -> Iterator[Sequence[Batch]]:
        """The batches of the steps from here on."""
        return self.feed.batches(self.state.step + self.state.guard.batches_left_out)

    def step_and_what_is_due(self, batches: Iterator[Sequence[Batch]], requests: StopRequests) -> None:
        """One step, then the evaluation, the checkpoint and the end that are due after it."""
        state, recipe = self.state, self.recipe
        signum = self.one_step(batches, requests)
        if self.ranks.alone:
            signum = requests.signum  # it may have come after the step
        last = state.step == recipe.total_steps
        # Evaluation first: a checkpoint of a step then always comes with the evaluation of that step.
        if last or due(state.step, recipe.evaluation.every):
            self.evaluate()
        if last or due(state.step, recipe.checkpoints.every):
            self.save()
        if signum is not None and not last:
            self.save()
            self.keep_saved()
            done = f"Stopped after step {state.step} of {recipe.total_steps}, which is saved"
            raise Interrupted(signum, f"{done}; --resume goes on from it.")

    def one_step(self, batches: Iterator[Sequence[Batch]], requests: StopRequests) -> int | None:
        """Launch a step, and read it or the one before; the signal that asks some rank to stop, if any."""
        number = self.state.step + 1
        if asynchronous(self.state.device):
            metered = any(observer.meters(number) for observer in self.observers)
            self.clock.exact = metered or number % STEPS_BETWEEN_CLOCKED == 0
        ahead = self.runs_ahead and not self.clock.exact
        if not ahead:
            self.settle()
        judge = (JudgedOnDevice if ahead else JudgedByHost)(partial(self.agree_on, requests))
        launched = self.launch(number, batches, judge)
        self.state.step = number
        earlier, self.launched = self.launched, launched
        if earlier is not None:
            self.tell(earlier)
        return None if ahead else self.settle()

    def launch(self, number: int, batches: Iterator[Sequence[Batch]], judge: JudgedByHost | JudgedOnDevice) -> Launched:
        """Fetch a batch and take an optimizer step, counted from 1, in sight of the observers."""
        state, recipe = self.state, self.recipe
        rate = learning_rate(recipe, number - 1)
        with ExitStack() as stack:
            for observer in self.observers:
                stack.enter_context(observer.around_step(number))
            with self.clock("data"):
                micro_batches = [state.together.own(batch) for batch in self.reading.step(batches)]
            n, seeds = len(micro_batches), None
            if recipe.dropout or recipe.attention_dropout or recipe.adapter_dropout:
                # Those that one process has for the same sequences, so that masks do not depend on the layout.
                of_all = dropout_seeds(recipe.seed, number - 1, state.data_ranks * n)
                seeds = of_all[state.data_rank * n : (state.data_rank + 1) * n]
            set_learning_rate(state.optimizer, rate)
            around: dict[str, Any] = {
                "clock": self.clock,
                "scaler": state.scaler,
                "together": state.together,
                "judge": judge,
            }
            result = optimizer_step(state.model, state.optimizer, micro_batches, recipe, seeds=seeds, **around)
        return Launched(number, rate, result.skipped, self.clock.take(), judge.read)

    def settle(self) -> int | None:
        """Read the step that was launched and not read, if there is one; the signal that asks some rank to stop."""
        launched, self.launched = self.launched, None
        return None if launched is None else self.tell(launched)

    def agree_on(self, requests: StopRequests, loss: float, norm: float | None) -> Agreed:
        """What all ranks know of a step, by what this one knows."""
        own = Agreed(loss, norm, True, requests.signum, self.saver.writing, self.reading.failed)
        return agree(self.ranks, self.state.run.layout, own)

    def tell(self, launched: Launched) -> int | None:
        """Read a step, write its record, and do what its figures ask for; the signal that asks some rank to stop."""
        state, number = self.state, launched.number
        told = launched.read()
        if told.unread:
            state.step = number - 1  # no rank has made its update
            self.reading.refuse()
        now = time.perf_counter()
        seconds, self.began = now - self.began, now
        state.seconds += seconds
        if told.finite:
            state.loss = told.loss
        record = StepRecord(
            number,
            told.loss,
            number * self.recipe.tokens_per_step,
            seconds,
            launched.rate,
            told.grad_norm,
            state.seconds,
            launched.phase_seconds,
            launched.skipped or not told.finite,
        )
        self.records.metrics.step(record)
        for observer in self.observers:
            observer.on_step_end(record)
        self.records.watch(record)
        if number == _STEADY and self.saved_step < 0 and self.ranks.first:
            self.tell_of_first_checkpoint(number, seconds)
        if not told.finite:
            self.non_finite.leave_out(told, number)
        elif launched.skipped and state.scaler is not None:
            self.non_finite.scale_down(number)
        if self.saver.pending and not told.writing:
            self.keep_saved()
        return told.signum

    def tell_of_first_checkpoint(self, number: int, seconds: float) -> None:
        """Say how long nothing is saved, where that is long."""
        first = min(self.recipe.checkpoints.every or self.recipe.total_steps, self.recipe.total_steps)
        if (left := (first - number) * seconds) > UNSAVED_SECONDS:
            every = max(1, round(UNSAVED_SECONDS / seconds))
            self.say(
                f"The first checkpoint is in about {format_seconds(left)} (step {first:,}): a run that is killed "
                f"before begins anew (Ctrl-C and SIGTERM save); recipe.checkpoints.every={every} saves every "
                f"{format_seconds(UNSAVED_SECONDS)}."
            )

    def roll_back(self, why: str) -> None:
        """Go back to a checkpoint from before the steps that were left out, or raise `Diverged`."""
        if self.launched is not None:  # a step that was launched before the last one was read does not count
            self.state.step, self.launched = self.launched.number - 1, None
        self.keep_saved()
        self.non_finite.go_back(why)
        self.saved_step = self.state.step

    def evaluate(self) -> None:
        """The loss on held-out text of each source and, as they are mixed, of all; into the metrics."""
        self.settle()
        state, shares = self.state, self.feed.shares
        self.clock.exact = True
        with self.clock("evaluation"):
            state.optimizer.zero_grad(set_to_none=True)  # nobody reads them any more, and a step's peak has no room
            losses = losses_by_source(state, self.feed, self.reading, self.ranks)
        state.validation_loss = sum(share * losses[source] for source, share in shares.items())
        phases = self.clock.take()
        state.seconds += phases["evaluation"]
        record = EvaluationRecord(
            state.step, state.validation_loss, state.unigram_entropy, phases, losses if len(shares) > 1 else {}
        )
        self.records.metrics.evaluation(record)
        for observer in self.observers:
            observer.on_evaluation(record)

    # Weights that are not finite are never saved: no skip repairs them, and their checkpoint would be the newest valid
    # one.
    def save(self) -> None:
        """Begin a checkpoint of this step, unless there is one; in the foreground it is kept before this returns."""
        self.settle()
        state = self.state
        if self.saved_step == state.step:
            return
        self.keep_saved()
        self.non_finite.require_finite_weights()
        self.begun_at = time.perf_counter()
        self.clock.exact = True
        with self.clock("checkpoint"):
            self.records.metrics.sync()
            self.saver.begin(state.step, state.model, state.optimizer, figures_to_go_on(state, self.feed))
        self.saved_step = state.step
        state.seconds += self.clock.seconds["checkpoint"]
        if not self.saver.background:
            self.keep_saved()

    def keep_saved(self) -> None:
        """Wait for the checkpoint that is being written; then the old ones that need not be kept are deleted."""
        if not self.saver.pending:
            return
        state, checkpoints = self.state, self.recipe.checkpoints
        self.clock.exact = True
        stalled = self.clock.seconds.get("checkpoint", 0.0)
        with self.clock("checkpoint"):
            path = self.saver.finish()
            if self.ranks.first:
                try:
                    run_directory.prune(state.run_dir, checkpoints.keep_last, checkpoints.keep_every, checkpoints.every)
                except OSError as error:
                    self.say(f"An older checkpoint could not be deleted: {error}.")
        phases = self.clock.take()
        state.seconds += phases["checkpoint"] - stalled
        written = {"written_seconds": time.perf_counter() - self.begun_at} if self.saver.background else {}
        step = run_directory.step_of(path)
        self.records.metrics.event("checkpoint", step, path=path.name, phase_seconds=phases, **written)
        self.records.write_state("running")
        for observer in self.observers:
            observer.on_checkpoint(step, path, phases["checkpoint"])

    def finish(self) -> Finished:
        """The last words of a run that reached its last step."""
        state = self.state
        path = run_directory.all_checkpoints(state.run_dir)[-1]
        counted = {"skipped_steps": state.guard.skipped_steps, "roll_backs": state.guard.roll_backs}
        self.records.metrics.event("finish", state.step, seconds=state.seconds, **counted)
        finished = Finished.of(state.run_dir, self.records.write_state("finished", checkpoint=path.name))
        for observer in self.observers:
            observer.on_finish(finished)
        return finished

    def note_end(self, how: str, why: str, **more: object) -> None:
        """Write how a run ended early, where the disk still has room, and the step that was not read yet."""
        with suppress(Exception):  # it must not replace the reason for the end
            self.settle()
        self.records.note_end(how, why, **more)
