"""Small models of every kind, each with one training step: what the tracer is held against real runs with.

A `Specimen` builds real tensors; `zoo_compared` traces its step on fake ones and runs it for real.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Phase = Callable[[str], AbstractContextManager[Any]]
"""What a step says of itself: ``with phase("backward"): ...``."""


@dataclass(frozen=True, eq=False)
class Setup:
    """A model with its optimizers, a batch and a loss; ``loss`` None takes the output's own.

    A ``step`` of its own does everything with the batch: forward, backward and the optimizers' steps.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | tuple[torch.optim.Optimizer, ...]
    batch: Any
    loss: Callable[[Any], Tensor] | None = None
    step: Callable[[Any, Phase], None] | None = None

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        return self.optimizer if isinstance(self.optimizer, tuple) else (self.optimizer,)

    def run(self, autocast: torch.dtype | None, phase: Phase) -> None:
        """The step as anybody writes it."""
        if self.step is not None:
            with cast_to(autocast):
                return self.step(self.batch, phase)
        with phase("forward"), cast_to(autocast):
            loss = (self.loss or own_loss)(self._output())
        with phase("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        del loss
        with phase("optimizer"):
            for each in self.optimizers:
                each.step()
        return None

    def _output(self) -> Any:
        if isinstance(self.batch, dict):
            return self.model(**self.batch)
        return self.model(*self.batch) if isinstance(self.batch, tuple) else self.model(self.batch)


def own_loss(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


def cast_to(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


@dataclass(frozen=True)
class Specimen:
    """One model of the zoo: its name, what kind it is, and how it is built."""

    name: str
    kind: str
    build: Callable[[], Setup]


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-4, **options)


def tokens(vocab: int, *shape: int) -> Tensor:
    return torch.randint(1, vocab, shape)
