"""The optimizer of a recipe, from torch.optim where it has it, with every choice that moves memory made explicitly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trainledger.spec.optimizers import ACCOUNTED_ONLY, IMPLEMENTATIONS
from trainledger.spec.precision import precision_of
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.recipe import Recipe
from trainledger.train.adam_8bit import Adam8bit
from trainledger.train.lion import Lion
from trainledger.train.master_weights import MasterWeights, Named
from trainledger.train.muon import MuonWithAdamW

_LOOPS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
}
# Matrices that Muon leaves to AdamW: tables of rows that are looked up or scored one by one.
_TABLES = ("embed_tokens", "embed_positions", "lm_head")


def parameter_groups(
    model: nn.Module | Named, weight_decay: float, *, among: Callable[[str, nn.Parameter], bool] | None = None
) -> list[dict[str, Any]]:
    """Matrices (two dims or more) with decay, vectors and biases without, each in the model's own order.

    Empty groups are left out. A tied weight is one parameter and stands in one group once; frozen parameters
    stand in none. ``among`` chooses by name and parameter.
    """
    chosen = [
        (name, each)
        for name, each in model.named_parameters()
        if each.requires_grad and (among is None or among(name, each))
    ]
    groups: list[dict[str, Any]] = [
        {"params": [each for name, each in chosen if _decays(name, each)], "weight_decay": weight_decay},
        {"params": [each for name, each in chosen if not _decays(name, each)], "weight_decay": 0.0},
    ]
    return [each for each in groups if each["params"]]


def _decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: biases of stacked experts have two dims, and are biases all the same."""
    return parameter.ndim >= 2 and not name.endswith("bias")


def for_muon(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon takes a parameter: matrices of two dims, embeddings and the head left out (Jordan et al. 2024)."""
    return parameter.ndim == 2 and _decays(name, parameter) and not any(each in name.split(".") for each in _TABLES)


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimizer over a model's parameters.

    ``fused``, ``foreach`` or ``loop`` is passed on explicitly, because torch's own default depends on the device
    and each of them needs different memory. ``momentum`` and ``nesterov`` are SGD with ``beta1`` as momentum;
    RMSProp's smoothing is ``beta2``; the decay of AdamW, Lion, Muon and Adafactor is decoupled (Loshchilov and
    Hutter 2019), that of the others L2. Adafactor has its own decay of the second moment and its own epsilons: torch's
    defaults (Shazeer and Stern 2018). With master weights it steps copies of the parameters. Raises `InvalidInput` for
    what is accounted for and not built.
    """
    way = recipe.optimizer_implementation
    if (recipe.optimizer, way) in ACCOUNTED_ONLY:
        rule = f"the engine has no {way} {recipe.optimizer}, it is accounted for only"
        raise InvalidInput([Problem("recipe.optimizer_loop", way, rule, IMPLEMENTATIONS[recipe.optimizer][0])])
    precision = precision_of(recipe)
    if precision.master is None:
        return _optimizer_of(model, recipe)
    return MasterWeights(model, lambda masters: _optimizer_of(masters, recipe), buffers=precision.gradient_buffers)


def _optimizer_of(model: nn.Module | Named, recipe: Recipe) -> torch.optim.Optimizer:
    loop = _LOOPS[recipe.optimizer_implementation]
    rate, betas, epsilon, decay = (
        recipe.learning_rate,
        (recipe.beta1, recipe.beta2),
        recipe.epsilon,
        recipe.weight_decay,
    )
    if recipe.optimizer == "muon":
        return MuonWithAdamW(
            parameter_groups(model, decay, among=for_muon),
            parameter_groups(model, decay, among=lambda name, each: not for_muon(name, each)),
            lr=rate, momentum=recipe.muon_momentum, betas=betas, eps=epsilon, **loop,
        )  # fmt: skip
    groups = parameter_groups(model, decay)
    match recipe.optimizer:
        case "adamw":
            return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=epsilon, amsgrad=recipe.amsgrad, **loop)
        case "adam":
            return torch.optim.Adam(groups, lr=rate, betas=betas, eps=epsilon, amsgrad=recipe.amsgrad, **loop)
        case "adamw-8bit" | "adam-8bit":
            return Adam8bit(groups, lr=rate, betas=betas, eps=epsilon, decoupled=recipe.optimizer == "adamw-8bit")
        case "sgd":
            return torch.optim.SGD(groups, lr=rate, **loop)
        case "momentum" | "nesterov":
            nesterov = recipe.optimizer == "nesterov"
            return torch.optim.SGD(groups, lr=rate, momentum=recipe.beta1, nesterov=nesterov, **loop)
        case "adagrad":
            return torch.optim.Adagrad(groups, lr=rate, eps=epsilon, **loop)
        case "rmsprop":
            return torch.optim.RMSprop(
                groups, lr=rate, alpha=recipe.beta2, eps=epsilon, momentum=recipe.rmsprop_momentum,
                centered=recipe.rmsprop_centred, **loop,
            )  # fmt: skip
        case "adafactor":
            return torch.optim.Adafactor(groups, lr=rate, foreach=loop["foreach"])
        case "lion":
            return Lion(groups, lr=rate, betas=betas, **loop)
    raise AssertionError(f"spec.recipe knows an optimizer that the engine does not: {recipe.optimizer}")


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
