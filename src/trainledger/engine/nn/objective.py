"""The loss of a batch under a recipe's objective: of next tokens, of preferences among answers, of a teacher's logits.

Shapes: B sequences, of pairs two for each of P, the chosen one first; T tokens, N = B T in a row, V rows of
logits. Targets below zero do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainledger.engine.nn.lora import adapters_off
from trainledger.engine.nn.loss import cross_entropy, next_token_loss, run_loss
from trainledger.spec.objective import DPO, ORPO, Distillation, NextToken, Reward
from trainledger.spec.recipe import Recipe


def loss_of_batch(model: nn.Module, batch: Sequence[Tensor], recipe: Recipe) -> Tensor:
    """The mean loss of inputs [B, T] and targets [B, T].

    Of single answers there follow weights [B], below zero for those that are undesirable, and inputs and targets of
    mismatched ones; last the reference's losses [B] of each inputs where they are precomputed.
    """
    inputs_BT, targets_BT, *more = batch
    objective = recipe.objective
    if isinstance(objective, NextToken):
        return run_loss(model, inputs_BT, targets_BT, recipe)
    if isinstance(objective, Reward):
        return ranking(model(inputs_BT), targets_BT)
    if isinstance(objective, ORPO):
        return odds_ratio(sequence_losses(model, inputs_BT, targets_BT, recipe), targets_BT, objective.weight)
    alone = model.module if isinstance(model, DistributedDataParallel) else model  # no gradients are to sum of these
    if isinstance(objective, Distillation):
        # One expression, as in `run_loss`: no name here keeps what `distillation` frees.
        return distillation(
            of_teacher(alone, inputs_BT, recipe, objective),
            model(inputs_BT),
            targets_BT,
            objective,
            upcast=recipe.loss.upcast,
        )
    if isinstance(objective, DPO):
        reference_B = more[0] if more else reference_losses(alone, inputs_BT, targets_BT, recipe)
        return preference(sequence_losses(model, inputs_BT, targets_BT, recipe), reference_B, objective.beta)
    weights_B, others_BT, other_targets_BT, *known = more
    if not known:
        known.append(reference_losses(alone, inputs_BT, targets_BT, recipe))
        known.append(reference_losses(alone, others_BT, other_targets_BT, recipe))
    with _without_graph():
        distance = (known.pop() - sequence_losses(alone, others_BT, other_targets_BT, recipe)).mean().clamp(min=0)
    losses_B = sequence_losses(model, inputs_BT, targets_BT, recipe)
    return desirability(losses_B, known.pop(), distance, weights_B, objective.beta)


def preference(losses_B: Tensor, reference_B: Tensor, beta: float) -> Tensor:
    """The mean of -log sigmoid of beta times the margin (Rafailov et al. 2023, arXiv 2305.18290, equation 7).

    The margin is by how much more than under the reference the chosen answer is likelier than the rejected one.
    """
    # -log sigmoid(x) is softplus(-x), one kernel that keeps its input alone.
    chosen_P, rejected_P = (reference_B - losses_B).view(-1, 2).unbind(1)
    return F.softplus((rejected_P - chosen_P) * beta).mean()


def distillation(
    teacher_NV: Tensor, logits_BTV: Tensor, targets_BT: Tensor, objective: Distillation, *, upcast: bool
) -> Tensor:
    """The mean over tokens of the KL divergence from the teacher, given by log-probabilities, times the square of the
    temperature (Hinton et al. 2015, arXiv 1503.02531, section 2), weighed against the loss of the next token."""
    own_NV, ratio = softened(logits_BTV, objective, upcast=upcast), objective.kd_ratio
    logits = [] if ratio == 1 else [logits_BTV]
    del logits_BTV  # where nothing else reads them they are freed before the divergence is taken
    with torch.autocast(own_NV.device.type, enabled=False):
        value = F.kl_div(own_NV, teacher_NV, reduction="sum", log_target=True)
    del own_NV, teacher_NV
    value = value.float()
    value = value * (ratio * objective.temperature**2 / targets_BT.numel())
    if ratio == 1:
        return value
    return value + next_token_loss(logits.pop(), targets_BT, upcast=upcast) * (1 - ratio)


def softened(logits_BTV: Tensor, objective: Distillation, *, upcast: bool) -> Tensor:
    """The log-probabilities [N, V] of logits over the temperature, without autocast, as in `cross_entropy`."""
    with torch.autocast(logits_BTV.device.type, enabled=False):
        logits_NV = logits_BTV.flatten(0, 1)
        del logits_BTV
        logits_NV = logits_NV.float() if upcast else logits_NV
        logits_NV = logits_NV if objective.temperature == 1 else logits_NV / objective.temperature
        return F.log_softmax(logits_NV, -1)


# The score of an answer is that of the state which has read all of it but its end, the last target.
def ranking(scores_BT1: Tensor, targets_BT: Tensor) -> Tensor:
    """The mean over pairs of -log sigmoid of by how much the chosen answer's score is above the rejected one's (Ouyang
    et al. 2022, arXiv 2203.02155, equation 1)."""
    places_B = ((targets_BT >= 0) * torch.arange(targets_BT.shape[1], device=targets_BT.device)).argmax(1)
    scores_B = scores_BT1.squeeze(-1).gather(1, places_B[:, None]).squeeze(1).float()
    chosen_P, rejected_P = scores_B.view(-1, 2).unbind(1)
    return F.softplus(rejected_P - chosen_P).mean()


def odds_ratio(losses_B: Tensor, targets_BT: Tensor, weight: float) -> Tensor:
    """The mean over pairs of the chosen answer's loss per token, and of ``weight`` times -log sigmoid of the logarithm
    of the ratio of both answers' odds (Hong et al. 2024, arXiv 2403.07691, equations 4, 6 and 7)."""
    means_B = losses_B / (targets_BT >= 0).sum(1)
    # With P = exp(-x) for a mean loss x per token, the logarithm of (1 - P) / P is that of exp(x) - 1.
    chosen_P, rejected_P = means_B.expm1().log().view(-1, 2).unbind(1)
    return (means_B.view(-1, 2)[:, 0] + F.softplus(chosen_P - rejected_P) * weight).mean()


def desirability(losses_B: Tensor, reference_B: Tensor, distance: Tensor, weights_B: Tensor, beta: float) -> Tensor:
    """The mean of |weight| times one less the value of an answer (Ethayarajh et al. 2024, arXiv 2402.01306, eq. 8).

    The value is the sigmoid of beta times by how much likelier than under the reference the answer is, less the
    distance from it, a scalar; times -1 where the weight is below zero.
    """
    worse_B = losses_B - reference_B + distance
    return (torch.sigmoid(worse_B * weights_B.sign() * beta) * weights_B.abs()).mean()


def reference_losses(model: nn.Module, inputs_BT: Tensor, targets_BT: Tensor, recipe: Recipe) -> Tensor:
    """The losses [B] of sequences under the model's frozen reference: a second one, or itself with adapters off."""
    beside = model.reference
    with _without_graph(), adapters_off(model):
        return sequence_losses(beside if isinstance(beside, nn.Module) else model, inputs_BT, targets_BT, recipe)


def of_teacher(model: nn.Module, inputs_BT: Tensor, recipe: Recipe, objective: Distillation) -> Tensor:
    """The log-probabilities [N, V] of the model's frozen teacher, which computes in its own format."""
    teacher = model.reference
    assert isinstance(teacher, nn.Module), "a teacher is beside its student"
    with torch.no_grad(), torch.autocast(inputs_BT.device.type, enabled=False):
        return softened(teacher(inputs_BT), objective, upcast=recipe.loss.upcast)


# Autocast would keep the low-precision copies of trained weights that it makes here for the forward with a graph, to
# which they would not belong: no gradient would come to the weights (torch 2.13).
@contextmanager
def _without_graph() -> Iterator[None]:
    """Inside there are no gradients, and autocast keeps no copies."""
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(kept)


def sequence_losses(model: nn.Module, inputs_BT: Tensor, targets_BT: Tensor, recipe: Recipe) -> Tensor:
    """The summed cross entropy [B] of each sequence's targets: less its log-probability."""
    if recipe.loss.chunks is not None:
        losses_B: Tensor = model(inputs_BT, targets_BT)
        return losses_B
    return _summed(model(inputs_BT), targets_BT, upcast=recipe.loss.upcast)


def _summed(logits_BTV: Tensor, targets_BT: Tensor, *, upcast: bool) -> Tensor:
    losses_N = cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), "none", upcast=upcast)
    return losses_N.view_as(targets_BT).sum(1)
