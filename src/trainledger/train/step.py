"""One optimizer step. What happens here is what the trace follows and what the closed form accounts for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainledger.nn.transformer import next_token_loss
from trainledger.spec.recipe import Recipe
from trainledger.train.precision import autocast

Clock = Callable[[str], AbstractContextManager[None]]
Batch = tuple[Tensor, Tensor]  # inputs_BT and targets_BT, int64


@dataclass(frozen=True)
class StepResult:
    """Mean loss over the micro-batches in nats, and the joint gradient norm before clipping (None = no clipping)."""

    loss: Tensor
    grad_norm: Tensor | None


def optimizer_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    recipe: Recipe,
    *,
    clock: Clock | None = None,
    seeds: Sequence[int] | None = None,
) -> StepResult:
    """Forward and backward of each micro-batch, joint clipping, one step of the optimizer.

    ``clock(phase)`` is entered around ``forward``, ``backward``, ``clip`` and ``optimizer``; ``seeds`` has one
    seed per micro-batch for dropout (None leaves the generator alone). Nothing here waits for the device and
    nothing keeps logits or a graph beyond its own backward.
    """
    clock = clock or _no_clock
    optimizer.zero_grad(set_to_none=True)
    loss: Tensor | None = None
    for index, batch in enumerate(batches):
        if seeds is not None:
            torch.manual_seed(seeds[index])
        part = _forward_backward(model, batch, len(batches), recipe.precision, clock)
        loss = part if loss is None else loss + part
    assert loss is not None, "a step needs at least one micro-batch"
    grad_norm: Tensor | None = None
    if recipe.grad_clip is not None:
        with clock("clip"):
            # One kernel for all tensors where launches cost more than arithmetic; on a CPU it would gain nothing.
            grad_norm = torch.nn.utils.clip_grad_norm_(
                model.parameters(), recipe.grad_clip, foreach=loss.device.type != "cpu"
            )
    with clock("optimizer"):
        optimizer.step()
    return StepResult(loss, grad_norm)


def _forward_backward(model: nn.Module, batch: Batch, n_batches: int, precision: str, clock: Clock) -> Tensor:
    """One micro-batch: gradients added to the parameters', its share of the mean loss returned without a graph."""
    inputs_BT, targets_BT = batch
    with clock("forward"), autocast(precision, inputs_BT.device):
        # One expression, so that no name keeps the logits alive through backward.
        loss = next_token_loss(model(inputs_BT), targets_BT)
        if n_batches > 1:
            loss = loss / n_batches
    with clock("backward"):
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def _no_clock(phase: str) -> AbstractContextManager[None]:
    return nullcontext()
