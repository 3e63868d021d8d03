"""One optimizer step. What happens here is what the trace follows and what the closed form accounts for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainledger.nn.float8 import weights_cast_once
from trainledger.nn.loss import run_loss, weighing
from trainledger.spec.precision import precision_of
from trainledger.spec.recipe import Recipe
from trainledger.train.loss_scaling import LossScaler
from trainledger.train.master_weights import MasterWeights, stepped
from trainledger.train.precision import autocast

Clock = Callable[[str], AbstractContextManager[None]]
Batch = tuple[Tensor, Tensor]  # inputs_BT and targets_BT, int64


@dataclass(frozen=True)
class StepResult:
    """Mean loss over the micro-batches in nats, and the joint gradient norm before clipping (None = no clipping).

    ``skipped``: scaled gradients overflowed, and the weights were left as they were.
    """

    loss: Tensor
    grad_norm: Tensor | None
    skipped: bool = False


def optimizer_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    recipe: Recipe,
    *,
    clock: Clock | None = None,
    seeds: Sequence[int] | None = None,
    scaler: LossScaler | None = None,
) -> StepResult:
    """Forward and backward of each micro-batch, joint clipping, one step of the optimizer.

    ``clock(phase)`` is entered around ``forward``, ``backward``, ``clip`` and ``optimizer``; ``seeds`` has one
    seed per micro-batch for dropout (None leaves the generator alone); ``scaler`` belongs to fp16. Nothing here waits
    for the device, but for a scaler's look for overflow, and nothing keeps logits or a graph beyond its own backward.
    """
    clock = clock or _no_clock
    loss: Tensor | None = None
    with ExitStack() as stack:
        with clock("optimizer"):
            optimizer.zero_grad(set_to_none=True)
            if recipe.fp8_weight_caching:
                stack.enter_context(weights_cast_once(model))
        for index, batch in enumerate(batches):
            if seeds is not None:
                torch.manual_seed(seeds[index])
            part = _forward_backward(model, batch, len(batches), recipe, clock, scaler)
            loss = part if loss is None else loss + part
    assert loss is not None, "a step needs at least one micro-batch"
    if isinstance(optimizer, MasterWeights) or scaler is not None:
        with clock("optimizer"):
            _ready(model, optimizer, scaler)
    grad_norm: Tensor | None = None
    if recipe.grad_clip is not None:
        with clock("clip"):
            # One kernel for all tensors where launches cost more than arithmetic; on a CPU it would gain nothing.
            grad_norm = torch.nn.utils.clip_grad_norm_(
                stepped(model, optimizer), recipe.grad_clip, foreach=loss.device.type != "cpu"
            )
    with clock("optimizer"):
        skipped = scaler is not None and scaler.overflowed()
        if not skipped:
            optimizer.step()
        if scaler is not None:
            scaler.adapt()
    return StepResult(loss, grad_norm, skipped)


def _ready(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: LossScaler | None) -> None:
    """Bring the gradients to what the optimizer steps: wide, and without the loss scale."""
    if isinstance(optimizer, MasterWeights):
        optimizer.take_gradients()
    if scaler is not None:
        scaler.unscale(each.grad for each in stepped(model, optimizer) if each.grad is not None)


def _forward_backward(
    model: nn.Module, batch: Batch, n_batches: int, recipe: Recipe, clock: Clock, scaler: LossScaler | None
) -> Tensor:
    """One micro-batch: gradients added to the parameters', its share of the mean loss returned without a graph."""
    inputs_BT, targets_BT = batch
    with clock("forward"):
        scale = None if scaler is None else scaler.scale
        with autocast(precision_of(recipe), inputs_BT.device), weighing(scale, n_batches):
            loss = run_loss(model, inputs_BT, targets_BT, recipe)
            if n_batches > 1:
                loss = loss / n_batches
        scaled = loss if scaler is None else scaler.scaled(loss)
    with clock("backward"):
        scaled.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def _no_clock(phase: str) -> AbstractContextManager[None]:
    return nullcontext()
