"""The loop: steps, evaluations, checkpoints and records, until the last step or a stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainledger.durable import FORBIDDEN, is_full
from trainledger.nn.loss import next_token_loss
from trainledger.spec.precision import Precision
from trainledger.spec.runfile import digest
from trainledger.spec.schedule import learning_rate
from trainledger.train import checkpoint
from trainledger.train.metrics import Metrics, NoMetrics
from trainledger.train.observer import EvaluationRecord, Finished, Observer, PhaseClock, StepRecord, TrainingState
from trainledger.train.optimizer import set_learning_rate
from trainledger.train.precision import autocast
from trainledger.train.ranks import Ranks, lost_ranks_named
from trainledger.train.run_directory import write_state
from trainledger.train.saving import Saver
from trainledger.train.step import ALONE, Batch, Feed, Together, dropout_seeds, optimizer_step
from trainledger.train.stop import (
    STOP_SIGNALS,
    CannotSave,
    Diverged,
    Interrupted,
    LostRank,
    Stopped,
    StopRequests,
    memory_told,
)

# On an accelerator a step is waited for phase by phase only this often: waiting costs overlap.
STEPS_BETWEEN_CLOCKED = 10
# Gradients that overflow at this loss scale overflow without one.
SMALLEST_SCALE = 2.0**-10

Say = Callable[[str], None]


class TrainingLoop:
    """What one process does for a run: from the state it found to the last step or a stop."""

    def __init__(
        self, state: TrainingState, feed: Feed, observers: Sequence[Observer], say: Say, ranks: Ranks, saver: Saver
    ) -> None:
        self.state = state
        self.ranks = ranks
        self.saver = saver
        self.recipe = state.run.recipe
        self.feed = feed
        self.observers = observers
        self.say = say
        self.clock = PhaseClock(state.device, observers)
        self.saved_step = state.step if state.step else -1
        self.begun_at = 0.0  # when the checkpoint that is being written was begun
        state.unigram_entropy = feed.unigram_entropy
        state.validation_sequences = feed.validation_sequences

    def run(self, *, resumed: bool) -> Finished:
        """Every remaining step; `state.json` tells how it ended."""
        state = self.state
        self.metrics = Metrics(state.run_dir, after=state.step) if self.ranks.first else NoMetrics()
        try:
            if self.metrics.damaged:
                self.say(f"Damaged lines of {self.metrics.path}, which are left out: {self.metrics.damaged}.")
            self.write_state("running", **self.facts())
            self.metrics.event("resume" if resumed else "start", state.step, device=str(state.device))
            stops = StopRequests(speaks=self.ranks.first, echoes=self.ranks.size > 1)
            with stops as requests, memory_told(), lost_ranks_named(self.ranks.seconds):
                for each in self.observers:
                    each.on_start(state)
                self.steps(requests)
                return self.finish()
        except Interrupted as error:
            self.note_end("interrupted", str(error), exit_code=error.exit_code)
            raise
        except LostRank as error:
            self.note_end("interrupted", str(error))
            raise
        except OSError as error:
            if not is_full(error) and error.errno not in FORBIDDEN:
                self.note_end("failed", str(error))
                raise
            newest = checkpoint.all_checkpoints(state.run_dir)
            where = f"the newest checkpoint is {newest[-1]}" if newest else "there is no checkpoint yet"
            what = "No space for the records" if is_full(error) else "The records cannot be written"
            refused = CannotSave(f"{what} of step {state.step} ({error}); {where}.")
            self.note_end("failed", str(refused), exit_code=refused.exit_code)
            raise refused from error
        except BaseException as error:
            code = {"exit_code": error.exit_code} if isinstance(error, Stopped) else {}
            self.note_end("failed", str(error) or type(error).__name__, **code)
            raise
        finally:
            self.saver.close()
            with suppress(OSError):  # what a full disk did not take was said where it was written
                self.metrics.close()
            for each in self.observers:
                try:
                    each.on_stop()
                except OSError as error:
                    self.say(f"What was measured could not be written: {error}.")

    def steps(self, requests: StopRequests) -> None:
        """Steps, evaluations and checkpoints until the last step or a request to stop."""
        state, recipe = self.state, self.recipe
        batches = self.feed.batches(state.step)
        while state.step < recipe.total_steps:
            signum = self.one_step(batches, requests)
            if self.ranks.size == 1:
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
        self.keep_saved()

    def one_step(self, batches: Iterator[Sequence[Batch]], requests: StopRequests) -> int | None:
        """Fetch a batch, take one optimizer step, write its record; the signal that asks some rank to stop, if any."""
        state, recipe = self.state, self.recipe
        index, number = state.step, state.step + 1
        if state.device.type != "cpu":
            self.clock.exact = number % STEPS_BETWEEN_CLOCKED == 0 or any(
                each.meters(number) for each in self.observers
            )
        rate = learning_rate(recipe, index)
        random = recipe.dropout or recipe.attention_dropout or recipe.adapter_dropout
        seeds = dropout_seeds(recipe.seed, index, state.run.grad_accum) if random else None
        started = time.perf_counter()
        with ExitStack() as stack:
            for each in self.observers:
                stack.enter_context(each.around_step(number))
            with self.clock("data"):
                micro_batches = next(batches)
            set_learning_rate(state.optimizer, rate)
            result = optimizer_step(
                state.model, state.optimizer, micro_batches, recipe, clock=self.clock, seeds=seeds, scaler=state.scaler,
                together=state.together,
            )  # fmt: skip
        loss, signum, writing = self.agree(result.loss.item(), requests.signum)
        # A step that was left out has no norm but that of its overflow; the scale has fallen and the run goes on.
        grad_norm = None if result.grad_norm is None or result.skipped else result.grad_norm.item()
        seconds = time.perf_counter() - started
        state.step, state.loss, state.seconds = number, loss, state.seconds + seconds
        tokens = number * recipe.tokens_per_step
        record = StepRecord(number, loss, tokens, seconds, rate, grad_norm, state.seconds, self.clock.take())
        self.metrics.step(record)
        for each in self.observers:
            each.on_step_end(record)
        if not math.isfinite(loss) or not math.isfinite(grad_norm or 0.0):
            raise self.diverged(f"loss {loss}, gradient norm {grad_norm}")
        if result.skipped and state.scaler is not None and state.scaler.scale.item() < SMALLEST_SCALE:
            raise self.diverged(f"a loss scale below {SMALLEST_SCALE}: every step overflows")
        if self.saver.pending and not writing:
            self.keep_saved()
        return signum

    def agree(self, loss: float, signum: int | None) -> tuple[float, int | None, bool]:
        """Of all ranks: the mean loss, a signal that asks for the end, whether one still writes a checkpoint."""
        if self.ranks.size == 1:
            return loss, signum, self.saver.writing
        asked = [float(signum == each) for each in STOP_SIGNALS]
        total, writing, *asked = self.ranks.summed(loss, float(self.saver.writing), *asked)
        signals = (each for each, n_ranks in zip(STOP_SIGNALS, asked, strict=True) if n_ranks)
        layout = self.state.run.layout
        return total * layout.pipeline / layout.devices, next(signals, None), writing > 0

    def evaluate(self) -> None:
        """The loss on held-out text, into the metrics."""
        state = self.state
        self.clock.exact = True
        with self.clock("evaluation"):
            state.validation_loss = evaluate(
                state.model, self.feed.validation(), self.recipe.precision, together=state.together, ranks=self.ranks,
                part=state.data_rank, parts=state.run.layout.data_ranks,
            )  # fmt: skip
        phases = self.clock.take()
        state.seconds += phases["evaluation"]
        record = EvaluationRecord(state.step, state.validation_loss, state.unigram_entropy, phases)
        self.metrics.evaluation(record)
        for each in self.observers:
            each.on_evaluation(record)

    def save(self) -> None:
        """Begin a checkpoint of this step, unless there is one; in the foreground it is kept before this returns."""
        state = self.state
        if self.saved_step == state.step:
            return
        self.keep_saved()
        if any(self.ranks.summed(float(not all_finite(state.model)))):
            raise self.diverged("weights that are not finite")
        self.begun_at = time.perf_counter()
        self.clock.exact = True
        with self.clock("checkpoint"):
            facts = {**self.facts(), "digest": digest(state.run), "data": self.feed.fingerprint}
            facts["threads"] = torch.get_num_threads()
            if state.scaler is not None:
                facts["loss_scale"] = state.scaler.facts()
            self.metrics.sync()
            self.saver.begin(state.step, state.model, state.optimizer, facts)
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
                    checkpoint.prune(state.run_dir, checkpoints.keep_last, checkpoints.keep_every)
                except OSError as error:
                    self.say(f"An older checkpoint could not be deleted: {error}.")
        phases = self.clock.take()
        state.seconds += phases["checkpoint"] - stalled
        written = {"written_seconds": time.perf_counter() - self.begun_at} if self.saver.background else {}
        step = checkpoint.step_of(path)
        self.metrics.event("checkpoint", step, path=path.name, phase_seconds=phases, **written)
        self.write_state("running", **self.facts())
        for each in self.observers:
            each.on_checkpoint(step, path, phases["checkpoint"])

    def finish(self) -> Finished:
        """The last words of a run that reached its last step."""
        state = self.state
        path = checkpoint.all_checkpoints(state.run_dir)[-1]
        self.metrics.event("finish", state.step, seconds=state.seconds)
        facts = self.facts() | {"checkpoint": path.name}
        self.write_state("finished", **facts)
        finished = finished_from(state.run_dir, facts)
        for each in self.observers:
            each.on_finish(finished)
        return finished

    def facts(self) -> dict[str, Any]:
        """The state of the run, as JSON stores it."""
        state = self.state
        names = ("step", "loss", "validation_loss", "unigram_entropy", "seconds", "initial_weights")
        return {**{name: getattr(state, name) for name in names}, "tokens": state.step * self.recipe.tokens_per_step}

    def diverged(self, what: str) -> Diverged:
        """The sentence with the step that diverged and the checkpoint that is still good."""
        state = self.state
        good = self.ranks.of_first(lambda: _text(checkpoint.latest_valid(state.run_dir, self.say)))
        kept = f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
        rate = learning_rate(self.recipe, state.step - 1)
        other = "The same run does so again; a smaller recipe.learning_rate or another recipe.seed makes another run"
        return Diverged(f"Step {state.step} gave {what} at learning rate {rate:.3g}; {kept}. {other}.")

    def write_state(self, how: str, **facts: object) -> None:
        """Replace the run's state.json, on the first rank."""
        if self.ranks.first:
            write_state(self.state.run_dir, how, **facts)

    def note_end(self, how: str, why: str, **more: object) -> None:
        """Write how a run ended early, where the disk still has room."""
        try:
            facts = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in self.facts().items()}
            self.metrics.event(how, self.state.step, why=why)
            self.write_state(how, **facts, why=why, **more)
        except OSError:
            pass  # the exception has the reason for the end; a full disk must not replace it


def due(step: int, every: int | None) -> bool:
    """Whether something that happens every so many steps happens after this one."""
    return every is not None and step % every == 0


def all_finite(model: nn.Module) -> bool:
    """Whether no parameter holds a NaN or an infinity."""
    with torch.no_grad():
        return all(math.isfinite(each.sum(dtype=torch.float64).item()) for each in model.parameters())


def finished_from(run_dir: Path, facts: dict[str, Any]) -> Finished:
    """The result of a run whose ``state.json`` says finished."""
    path = checkpoint.checkpoints_dir(run_dir) / facts["checkpoint"]
    names = ("step", "loss", "validation_loss", "unigram_entropy", "tokens", "seconds")
    return Finished(**{name: facts[name] for name in names}, run_dir=run_dir, checkpoint=path)


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    precision: Precision,
    *,
    together: Together = ALONE,
    ranks: Ranks | None = None,
    part: int = 0,
    parts: int = 1,
) -> float:
    """Mean loss in nats per token over all batches, weighted by their tokens; dropout off, no gradients.

    The ``parts`` data ranks take batches in turn, of which this process is ``part``. Sums are kept in fp64, so that the
    loss does not depend on how the sequences are cut into batches, or on how many ranks there are, beyond rounding.
    """
    was_training = model.training
    model.eval()
    total, n_tokens = 0.0, 0
    try:
        with torch.no_grad(), together.around():
            for (inputs_BT, targets_BT), counts in _in_turn(batches, parts, part):
                loss: Tensor | None
                if together.pipeline is not None:
                    loss = together.pipeline.evaluate(inputs_BT, targets_BT)
                else:
                    with autocast(precision, inputs_BT.device):
                        loss = next_token_loss(model(inputs_BT), targets_BT)
                if counts and loss is not None:
                    total += loss.item() * targets_BT.numel()
                    n_tokens += targets_BT.numel()
    finally:
        model.train(was_training)
    total, n_all = (ranks or Ranks()).summed(total, n_tokens)
    assert n_all > 0, "an evaluation needs at least one held-out sequence"
    return total / n_all


def _in_turn(batches: Iterable[Batch], parts: int, part: int) -> Iterator[tuple[Batch, bool]]:
    """This part's batches, and whether each counts: all parts run equally many, the last one perhaps another's."""
    remaining = iter(batches)
    while round_of_all := list(islice(remaining, parts)):
        counts = part < len(round_of_all)
        yield round_of_all[part if counts else 0], counts


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
