"""Losses beside the next-token loss: they enter on the way back, from wherever in the model they arise.

A block may run checkpointed, or on another pipeline stage than the head: its own loss need not travel to the end
of the model. The training loss that is told stays the cross entropy alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

_weight: ContextVar[tuple[Tensor | None, int]] = ContextVar("weight of a loss", default=(None, 1))


@contextmanager
def weighing(scale: Tensor | None, n_batches: int) -> Iterator[None]:
    """Losses that join in a forward inside count 1 / ``n_batches``, times the ``scale`` of an fp16 loss."""
    before = _weight.set((scale, n_batches))
    try:
        yield
    finally:
        _weight.reset(before)


def with_loss(y: Tensor, loss: Tensor) -> Tensor:
    """y as it is; its backward also starts that of ``loss``, a scalar, as a part of the training loss."""
    joined: Tensor = _WithLoss.apply(y, loss)  # type: ignore[no-untyped-call]
    return joined


class _WithLoss(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor) -> Tensor:
        ctx.weight = _weight.get()
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (g,) = gradients
        scale, n_batches = ctx.weight
        if scale is None:
            return g, torch.full((), 1 / n_batches, device=g.device)
        return g, scale / n_batches
