"""Losses beside the next-token loss: they enter on the way back, from wherever in the model they arise.

A block may run checkpointed, or on another pipeline stage than the head: its own loss need not travel to the end
of the model. The training loss that is told stays the cross entropy alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

# Of this process: torch.compile follows a module's variable, but no context variable.
_scale: Tensor | None = None
_n_batches = 1


@contextmanager
def weighing(scale: Tensor | None, n_batches: int) -> Iterator[None]:
    """Losses that join in a forward inside count 1 / ``n_batches``, times the ``scale`` of an fp16 loss."""
    global _scale, _n_batches
    before = _scale, _n_batches
    _scale, _n_batches = scale, n_batches
    try:
        yield
    finally:
        _scale, _n_batches = before


def with_loss(y: Tensor, loss: Tensor) -> Tensor:
    """y as it is; its backward also starts that of ``loss``, a scalar, as a part of the training loss."""
    joined: Tensor = _WithLoss.apply(y, loss, _scale, _n_batches)  # type: ignore[no-untyped-call]
    return joined


class _WithLoss(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, scale: Tensor | None, n_batches: int) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.n_batches = n_batches
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (scale,) = gradients, ctx.saved_tensors
        if scale is None:
            return g, torch.full((), 1 / ctx.n_batches, device=g.device), None, None
        return g, scale / ctx.n_batches, None, None
