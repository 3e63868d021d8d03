"""Steps given to the device, which may still work on one while the host launches the next; what judges an update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from trainledger.engine.train.guard import Agreed
from trainledger.engine.train.observer import Observer, PhaseClock, TrainingState
from trainledger.engine.train.optimizer import set_learning_rate
from trainledger.engine.train.ranks import Ranks
from trainledger.engine.train.reading import Reading
from trainledger.engine.train.step import Batch, dropout_seeds, optimizer_step
from trainledger.spec.recipe import learning_rate

AgreeOn = Callable[[float, float | None], Agreed]  # by loss and gradient norm


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


class JudgedByHost:
    """A judge of one step that waits for the device; the update runs while the host writes down what was read."""

    def __init__(self, agree_on: AgreeOn) -> None:
        self._agree_on = agree_on

    def __call__(self, loss: Tensor, grad_norm: Tensor | None) -> bool:
        with _disable_current_modes():  # a meter that records the step does not see this
            norm = None if grad_norm is None else grad_norm.item()
            self._agreed = self._agree_on(loss.item(), norm)
        return not self._agreed.finite

    def read(self) -> Agreed:
        return self._agreed


class JudgedOnDevice:
    """A judge of one step that does not wait: the device finds out whether its update is left out.

    The host reads loss and norm when it has launched the next step: the device would have no work while the host comes
    to that.
    """

    def __init__(self, agree_on: AgreeOn) -> None:
        self._agree_on = agree_on

    def __call__(self, loss: Tensor, grad_norm: Tensor | None) -> Tensor:
        figures = torch.stack([each.detach().float() for each in (loss, grad_norm) if each is not None])
        self._on_host = figures.to("cpu", non_blocking=figures.is_cuda)  # into pinned memory
        self._copied = torch.cuda.current_stream().record_event() if figures.is_cuda else None
        return figures.isfinite().all().logical_not().float()

    def read(self) -> Agreed:
        if self._copied is not None:
            self._copied.synchronize()
        loss, *norm = self._on_host.tolist()
        return self._agree_on(loss, norm[0] if norm else None)


@dataclass(frozen=True)
class Launcher:
    """Takes the steps of one process, in sight of its observers."""

    state: TrainingState
    ranks: Ranks
    reading: Reading
    clock: PhaseClock
    observers: list[Observer]

    def launch(self, number: int, batches: Iterator[Sequence[Batch]], judge: JudgedByHost | JudgedOnDevice) -> Launched:
        """Fetch a batch and take an optimizer step, counted from 1."""
        state, recipe = self.state, self.state.run.recipe
        rate = learning_rate(recipe, number - 1)
        random = recipe.dropout or recipe.attention_dropout or recipe.adapter_dropout
        with ExitStack() as stack:
            for each in self.observers:
                stack.enter_context(each.around_step(number))
            with self.clock("data"):
                whole = self.reading.step(batches)
                micro_batches = [state.together.own(each) for each in self.ranks.dealt(whole)]
            seeds = self.ranks.dealt(self._seeds(number - 1, len(whole))) if random else None
            set_learning_rate(state.optimizer, rate)
            result = optimizer_step(
                state.model, state.optimizer, micro_batches, recipe, clock=self.clock, seeds=seeds, scaler=state.scaler,
                together=state.together, judge=judge, of=len(whole),
            )  # fmt: skip
        return Launched(number, rate, result.skipped, self.clock.take(), judge.read)

    def _seeds(self, step: int, n_batches: int) -> Sequence[int]:
        """Of the micro-batches of this data rank: those that one process has for the same sequences."""
        state = self.state
        first = state.data_rank * n_batches
        return dropout_seeds(state.run.recipe.seed, step, state.data_ranks * n_batches)[first : first + n_batches]
