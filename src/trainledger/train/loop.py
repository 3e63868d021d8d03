"""The loop: steps, evaluations, checkpoints and records, until the last step or a stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainledger.durable import is_full
from trainledger.nn.loss import next_token_loss
from trainledger.spec.precision import Precision
from trainledger.spec.runfile import digest
from trainledger.spec.schedule import learning_rate
from trainledger.train import checkpoint
from trainledger.train.metrics import Metrics
from trainledger.train.observer import EvaluationRecord, Finished, Observer, PhaseClock, StepRecord, TrainingState
from trainledger.train.optimizer import set_learning_rate
from trainledger.train.precision import autocast
from trainledger.train.run_directory import write_state
from trainledger.train.step import Batch, Feed, dropout_seeds, optimizer_step
from trainledger.train.stop import CannotSave, Diverged, Interrupted, StopRequests, memory_told

# On an accelerator a step is waited for phase by phase only this often: waiting costs overlap.
STEPS_BETWEEN_CLOCKED = 10
# Gradients that overflow at this loss scale overflow without one.
SMALLEST_SCALE = 2.0**-10

Say = Callable[[str], None]


class TrainingLoop:
    """What one process does for a run: from the state it found to the last step or a stop."""

    def __init__(self, state: TrainingState, feed: Feed, observers: Sequence[Observer], say: Say) -> None:
        self.state = state
        self.recipe = state.run.recipe
        self.feed = feed
        self.observers = observers
        self.say = say
        self.clock = PhaseClock(state.device, observers)
        self.saved_step = state.step if state.step else -1
        state.unigram_entropy = feed.unigram_entropy
        state.validation_sequences = feed.validation_sequences

    def run(self, *, resumed: bool) -> Finished:
        """Every remaining step; `state.json` tells how it ended."""
        state = self.state
        self.metrics = Metrics(state.run_dir, after=state.step)
        try:
            write_state(state.run_dir, "running", **self.facts())
            self.metrics.event("resume" if resumed else "start", state.step, device=str(state.device))
            with StopRequests() as requests, memory_told():
                for each in self.observers:
                    each.on_start(state)
                self.steps(requests)
                return self.finish()
        except Interrupted as error:
            self.note_end("interrupted", str(error))
            raise
        except OSError as error:
            if not is_full(error):
                self.note_end("failed", str(error))
                raise
            self.note_end("failed", str(error))
            newest = checkpoint.all_checkpoints(state.run_dir)
            where = f"the newest checkpoint is {newest[-1]}" if newest else "there is no checkpoint yet"
            raise CannotSave(f"No space for the metrics of step {state.step} ({error}); {where}.") from error
        except BaseException as error:
            self.note_end("failed", str(error) or type(error).__name__)
            raise
        finally:
            self.metrics.close()
            for each in self.observers:
                each.on_stop()

    def steps(self, requests: StopRequests) -> None:
        """Steps, evaluations and checkpoints until the last step or a request to stop."""
        state, recipe = self.state, self.recipe
        batches = self.feed.batches(state.step)
        while state.step < recipe.total_steps:
            self.one_step(batches)
            last = state.step == recipe.total_steps
            # Evaluation first: a checkpoint of a step then always comes with the evaluation of that step.
            if last or due(state.step, recipe.evaluation.every):
                self.evaluate()
            if last or due(state.step, recipe.checkpoints.every):
                self.save()
            if requests.signum is not None and not last:
                self.save()
                done = f"Stopped after step {state.step} of {recipe.total_steps}, which is saved"
                raise Interrupted(requests.signum, f"{done}; --resume goes on from it.")

    def one_step(self, batches: Iterator[Sequence[Batch]]) -> None:
        """Fetch a batch, take one optimizer step, write its record."""
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
                state.model, state.optimizer, micro_batches, recipe, clock=self.clock, seeds=seeds, scaler=state.scaler
            )
        loss = result.loss.item()
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

    def evaluate(self) -> None:
        """The loss on held-out text, into the metrics."""
        state = self.state
        self.clock.exact = True
        with self.clock("evaluation"):
            state.validation_loss = evaluate(state.model, self.feed.validation(), self.recipe.precision)
        phases = self.clock.take()
        state.seconds += phases["evaluation"]
        record = EvaluationRecord(state.step, state.validation_loss, state.unigram_entropy, phases)
        self.metrics.evaluation(record)
        for each in self.observers:
            each.on_evaluation(record)

    def save(self) -> None:
        """A checkpoint of this step, unless there is one; then the old ones that need not be kept are deleted."""
        state, recipe = self.state, self.recipe
        if self.saved_step == state.step:
            return
        if not all_finite(state.model):
            raise self.diverged("weights that are not finite")
        self.clock.exact = True
        with self.clock("checkpoint"):
            facts = {**self.facts(), "digest": digest(state.run), "data": self.feed.fingerprint}
            facts["threads"] = torch.get_num_threads()
            if state.scaler is not None:
                facts["loss_scale"] = state.scaler.facts()
            self.metrics.sync()
            path = checkpoint.save(state.run_dir, state.step, state.model, state.optimizer, facts)
            checkpoint.prune(state.run_dir, recipe.checkpoints.keep_last, recipe.checkpoints.keep_every)
        self.saved_step = state.step
        phases = self.clock.take()
        state.seconds += phases["checkpoint"]
        self.metrics.event("checkpoint", state.step, path=path.name, phase_seconds=phases)
        write_state(state.run_dir, "running", **self.facts())
        for each in self.observers:
            each.on_checkpoint(state.step, path, phases["checkpoint"])

    def finish(self) -> Finished:
        """The last words of a run that reached its last step."""
        state = self.state
        path = checkpoint.all_checkpoints(state.run_dir)[-1]
        self.metrics.event("finish", state.step, seconds=state.seconds)
        facts = self.facts() | {"checkpoint": path.name}
        write_state(state.run_dir, "finished", **facts)
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
        good = checkpoint.latest_valid(state.run_dir, self.say)
        kept = f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
        rate = learning_rate(self.recipe, state.step - 1)
        other = "The same run does so again; a smaller recipe.learning_rate or another recipe.seed makes another run"
        return Diverged(f"Step {state.step} gave {what} at learning rate {rate:.3g}; {kept}. {other}.")

    def note_end(self, how: str, why: str) -> None:
        """Write how a run ended early, where the disk still has room."""
        try:
            facts = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in self.facts().items()}
            self.metrics.event(how, self.state.step, why=why)
            write_state(self.state.run_dir, how, **facts, why=why)
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


def evaluate(model: nn.Module, batches: Iterable[Batch], precision: Precision) -> float:
    """Mean loss in nats per token over all batches, weighted by their tokens; dropout off, no gradients.

    The sum is kept in fp64, so that it does not depend on how the sequences are cut into batches beyond rounding.
    """
    was_training = model.training
    model.eval()
    total, n_tokens = 0.0, 0
    try:
        with torch.no_grad():
            for inputs_BT, targets_BT in batches:
                with autocast(precision, inputs_BT.device):
                    loss = next_token_loss(model(inputs_BT), targets_BT)
                total += loss.item() * targets_BT.numel()
                n_tokens += targets_BT.numel()
    finally:
        model.train(was_training)
    assert n_tokens > 0, "an evaluation needs at least one held-out sequence"
    return total / n_tokens
