"""The loss of a batch under a recipe's objective: of next tokens, or of preferences against a frozen reference.

Shapes: B sequences, of preferences two for each of P pairs, the chosen one first; T tokens, N = B T in a row, V rows of
logits. Targets below zero do not count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainledger.engine.nn.lora import adapters_off
from trainledger.engine.nn.loss import cross_entropy, run_loss
from trainledger.spec.objective import DPO
from trainledger.spec.recipe import Recipe


def loss_of_batch(model: nn.Module, batch: Sequence[Tensor], recipe: Recipe) -> Tensor:
    """The mean loss of inputs [B, T] and targets [B, T]; of preferences of pairs, the reference's losses [B] third
    where they are precomputed."""
    inputs_BT, targets_BT, *known = batch
    if not isinstance(recipe.objective, DPO):
        return run_loss(model, inputs_BT, targets_BT, recipe)
    alone = model.module if isinstance(model, DistributedDataParallel) else model  # a reference has no gradients to sum
    reference_B = known[0] if known else reference_losses(alone, inputs_BT, targets_BT, recipe)
    return preference(sequence_losses(model, inputs_BT, targets_BT, recipe), reference_B, recipe.objective.beta)


def preference(losses_B: Tensor, reference_B: Tensor, beta: float) -> Tensor:
    """The mean of -log sigmoid of beta times the margin (Rafailov et al. 2023, arXiv 2305.18290, equation 7).

    The margin is by how much more than under the reference the chosen answer is likelier than the rejected one.
    """
    # -log sigmoid(x) is softplus(-x), one kernel that keeps its input alone.
    chosen_P, rejected_P = (reference_B - losses_B).view(-1, 2).unbind(1)
    return F.softplus((rejected_P - chosen_P) * beta).mean()


def reference_losses(model: nn.Module, inputs_BT: Tensor, targets_BT: Tensor, recipe: Recipe) -> Tensor:
    """The losses [B] of sequences under the model's frozen reference: a second one, or itself with adapters off."""
    beside = model.reference
    with torch.no_grad(), adapters_off(model):
        return sequence_losses(beside if isinstance(beside, nn.Module) else model, inputs_BT, targets_BT, recipe)


def sequence_losses(model: nn.Module, inputs_BT: Tensor, targets_BT: Tensor, recipe: Recipe) -> Tensor:
    """The summed cross entropy [B] of each sequence's targets: less its log-probability."""
    if recipe.loss.chunks is not None:
        losses_B: Tensor = model(inputs_BT, targets_BT)
        return losses_B
    return _summed(model(inputs_BT), targets_BT, upcast=recipe.loss.upcast)


def _summed(logits_BTV: Tensor, targets_BT: Tensor, *, upcast: bool) -> Tensor:
    losses_N = cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), "none", upcast=upcast)
    return losses_N.view_as(targets_BT).sum(1)
