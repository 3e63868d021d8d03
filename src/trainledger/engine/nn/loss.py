"""The loss of next-token prediction, with all logits at once, compiled or not, or chunk by chunk; and extra losses.

Extra losses enter on the way back, from anywhere in the model: a block may run checkpointed, or on another
pipeline stage than the head. The training loss that is reported stays the cross entropy alone.

Shapes: B sequences, T tokens, N = B T tokens in a row, D d_model, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from trainledger.spec.recipe import Recipe
from trainledger.spec.savings import ChunkedLoss


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor, *, upcast: bool = True) -> Tensor:
    """Mean cross entropy in nats over all tokens, in fp32; without ``upcast`` in the logits' own format.

    The loss itself is fp32 either way.
    """
    return cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), "mean", upcast=upcast)


def cross_entropy(logits_NV: Tensor, targets_N: Tensor, reduction: str, *, upcast: bool) -> Tensor:
    """Cross entropy of rows of logits; autocast would widen them whether asked to or not, so it is off here."""
    with torch.autocast(logits_NV.device.type, enabled=False):
        wide = logits_NV.float() if upcast else logits_NV
        return F.cross_entropy(wide, targets_N, reduction=reduction).float()


def run_loss(model: Callable[..., Tensor], inputs_BT: Tensor, targets_BT: Tensor, recipe: Recipe) -> Tensor:
    """The mean loss of a batch in the way that the recipe asks for."""
    if recipe.loss.chunks is None:
        of_logits = compiled_loss() if recipe.loss.kind == "compiled" else next_token_loss
        # One expression, so that no name keeps the logits alive through backward.
        return of_logits(model(inputs_BT), targets_BT, upcast=recipe.loss.upcast)
    loss: Tensor = model(inputs_BT, targets_BT)
    return loss


# GPT-2 124M on an H200: 43.8 ms and 16.9 GB a step with a padded vocabulary, 37.1 ms and 10.4 GB with this loss. 4
# bytes of each logit are alive at most, eagerly 12.
@cache
def compiled_loss() -> Callable[..., Tensor]:
    """`next_token_loss` by torch.compile: the steps between logits and loss are never written to memory."""
    compiled: Callable[..., Tensor] = torch.compile(next_token_loss)
    return compiled


class HeadLoss(nn.Module):
    """Head and cross entropy together, over ``chunks`` of the tokens one after the other.

    ``chunked`` keeps the hidden states and makes a chunk's logits again in backward; ``fused`` takes the gradients
    of hidden states and head in forward already (Hsu et al. 2024, Liger Kernel, section 3.2), so nothing is recomputed.
    """

    def __init__(self, loss: ChunkedLoss, *, by_sequence: bool = False) -> None:
        super().__init__()
        self.kind, self.chunks, self.upcast = loss.kind, loss.chunks, loss.upcast
        self.reduction = "none" if by_sequence else "sum"

    def whole(self, x_BTD: Tensor, targets_BT: Tensor, head: nn.Module) -> Tensor:
        """The mean loss of hidden states [B, T, D] that ``head`` turns into logits, or by sequence its sums [B]."""
        x_ND, targets_N = x_BTD.flatten(0, 1), targets_BT.flatten()
        chunks = list(zip(x_ND.chunk(self.chunks), targets_N.chunk(self.chunks), strict=True))
        if self.kind == "fused" and torch.is_grad_enabled():
            trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
            loss: Tensor = _Fused.apply(self, head, x_ND, targets_N, *trained)  # type: ignore[no-untyped-call]
            return loss
        again = torch.is_grad_enabled()
        losses = [
            checkpoint(self, x, targets, head, use_reentrant=False, preserve_rng_state=False)
            if again
            else self(x, targets, head)
            for x, targets in chunks
        ]
        if self.reduction == "none":
            return torch.cat(losses).view_as(targets_BT).sum(1)
        return torch.stack(losses).sum() / targets_N.numel()

    def forward(self, x_ND: Tensor, targets_N: Tensor, head: nn.Module) -> Tensor:
        """The summed loss of some tokens, or by sequence the loss of each."""
        return cross_entropy(head(x_ND), targets_N, self.reduction, upcast=self.upcast)


class _Fused(torch.autograd.Function):
    """Loss and gradients in one pass over the chunks; backward only multiplies by what comes in."""

    @staticmethod
    def forward(ctx: Any, loss: HeadLoss, head: nn.Module, x_ND: Tensor, targets_N: Tensor, *trained: Tensor) -> Tensor:
        dx_ND = torch.empty_like(x_ND)
        sums: list[Tensor] = []
        losses: list[Tensor] = []
        split = (tensor.chunk(loss.chunks) for tensor in (x_ND, targets_N, dx_ND))
        for x, targets, dx in zip(*split, strict=True):
            with torch.enable_grad():
                own = x.detach().requires_grad_()
                # A view, as autocast would hold on to the low-precision copy of a leaf.
                part = loss(own.view_as(own), targets, head) / targets_N.numel()
            gradient, *others = torch.autograd.grad(part, (own, *trained))
            dx.copy_(gradient)
            losses.append(part.detach())
            sums = [a.add_(b) for a, b in zip(sums, others, strict=True)] if sums else others
            del part, gradient, others
        ctx.gradients = [dx_ND, *sums]
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        of_hidden, *of_head = (gradient.mul_(scale) for gradient in gradients)
        return None, None, of_hidden, None, *of_head


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
    """y unchanged; its backward also starts that of ``loss``, a scalar, as a part of the training loss."""
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
