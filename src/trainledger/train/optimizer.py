"""The optimizer of a recipe, from torch.optim, with every choice that moves memory made explicitly."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainledger.spec.recipe import Recipe

_LOOPS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices (two dims or more) with decay, vectors without, each in the model's own order; empty groups left out.

    A tied weight is one parameter and stands in one group once.
    """
    trained = [each for each in model.parameters() if each.requires_grad]
    matrices = [each for each in trained if each.ndim >= 2]
    vectors = [each for each in trained if each.ndim < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [each for each in groups if each["params"]]


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimizer over a model's parameters.

    ``fused``, ``foreach`` or ``loop`` is passed on explicitly, because torch's own default depends on the device
    and each of them needs different memory. ``momentum`` is SGD with ``beta1`` as its momentum; RMSProp's
    smoothing is ``beta2``; Adam's decay is L2, AdamW's is decoupled (Loshchilov and Hutter 2019).
    """
    groups = parameter_groups(model, recipe.weight_decay)
    loop = _LOOPS[recipe.optimizer_implementation]
    rate, betas = recipe.learning_rate, (recipe.beta1, recipe.beta2)
    match recipe.optimizer:
        case "adamw":
            return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=recipe.epsilon, **loop)
        case "adam":
            return torch.optim.Adam(groups, lr=rate, betas=betas, eps=recipe.epsilon, **loop)
        case "sgd":
            return torch.optim.SGD(groups, lr=rate, **loop)
        case "momentum":
            return torch.optim.SGD(groups, lr=rate, momentum=recipe.beta1, **loop)
        case "adagrad":
            return torch.optim.Adagrad(groups, lr=rate, eps=recipe.epsilon, **loop)
        case "rmsprop":
            return torch.optim.RMSprop(groups, lr=rate, alpha=recipe.beta2, eps=recipe.epsilon, **loop)
    raise AssertionError(f"spec.recipe knows an optimizer that the engine does not: {recipe.optimizer}")


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
