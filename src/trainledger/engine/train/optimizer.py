"""The optimizer of a recipe, from torch.optim where it has it, with every choice that moves memory made explicitly.

Lion and a Muon that leaves the rest to AdamW are here; torch has neither.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from trainledger.engine.train.precision import MasterWeights, Named
from trainledger.engine.train.update_rules import Adam8bit, Lion, MuonWithAdamW
from trainledger.spec import optimizers
from trainledger.spec.optimizers import ACCOUNTED_ONLY, IMPLEMENTATIONS
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.recipe import Recipe

_LOOPS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
}
RATE_FACTOR = "rate_factor"  # of a parameter group: its learning rate over the recipe's
AVERAGE = "ema"  # the name of the state that holds a weight's average
# Matrices that Muon leaves to AdamW: tables of rows that are looked up or scored one by one.
_TABLES = ("embed_tokens", "embed_positions", "lm_head")


def parameter_groups(
    model: nn.Module | Named,
    weight_decay: float,
    *,
    among: Callable[[str, nn.Parameter], bool] | None = None,
    rate_factor: float | None = None,
) -> list[dict[str, Any]]:
    """Matrices (two dims or more) with decay, vectors and biases without, each in the model's own order.

    Empty groups are left out. A tied weight is one parameter and is in one group once; frozen parameters
    are in none. ``among`` chooses by name and parameter. With a ``rate_factor`` (muP) embeddings, whose rows are looked
    up, are a group of their own, and the learning rate of all other matrices is multiplied by it.
    """
    chosen = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (among is None or among(name, parameter))
    ]
    matrices = [(name, parameter) for name, parameter in chosen if _decays(name, parameter)]
    vectors = [parameter for name, parameter in chosen if not _decays(name, parameter)]
    groups: list[dict[str, Any]]
    if rate_factor is None:
        groups = [{"params": [parameter for _, parameter in matrices], "weight_decay": weight_decay}]
    else:
        others = [parameter for name, parameter in matrices if not _is_looked_up(name)]
        tables = [parameter for name, parameter in matrices if _is_looked_up(name)]
        groups = [{"params": others, "weight_decay": weight_decay, RATE_FACTOR: rate_factor}]
        groups.append({"params": tables, "weight_decay": weight_decay})
    groups.append({"params": vectors, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def _is_looked_up(name: str) -> bool:
    return not {"embed_tokens", "embed_positions"}.isdisjoint(name.split("."))


def _decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: biases of stacked experts have two dims, and are biases all the same."""
    return parameter.ndim >= 2 and not name.endswith("bias")


def for_muon(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon takes a parameter: matrices of two dims, embeddings and the head left out (Jordan et al. 2024)."""
    return parameter.ndim == 2 and _decays(name, parameter) and not any(table in name.split(".") for table in _TABLES)


def build_optimizer(model: nn.Module | Named, recipe: Recipe, *, width_factor: float = 1.0) -> torch.optim.Optimizer:
    """The recipe's optimizer over a model's parameters; ``width_factor`` is the model's width over that of its base
    (muP).

    ``fused``, ``foreach`` or ``loop`` is passed on explicitly, because torch's own default depends on the device
    and each of them needs different memory. RMSProp's smoothing is ``beta2``; the decay of AdamW, Lion, Muon and
    Adafactor is decoupled (Loshchilov and Hutter 2019), that of the others L2. With master weights it steps copies of
    the parameters. Raises `InvalidInput` for what is accounted for and not built.
    """
    kind, way = recipe.optimizer.kind, recipe.optimizer.implementation
    if (kind, way) in ACCOUNTED_ONLY:
        rule = f"the engine has no {way} {kind}, it is accounted for only"
        raise InvalidInput([Problem("recipe.optimizer.implementation", way, rule, IMPLEMENTATIONS[kind][0])])
    if recipe.precision.master is None:
        return _optimizer_of(model, recipe, width_factor)
    buffers = recipe.precision.gradient_buffers
    return MasterWeights(model, lambda masters: _optimizer_of(masters, recipe, width_factor), buffers=buffers)


def leaves_out_on_device(recipe: Recipe) -> bool:
    """Whether the kernel of a recipe's optimizer can be told on the device to leave an update out.

    torch.optim's fused Adam and AdamW can. Their fused SGD could not in its first step, and what follows an update
    (averages, master weights) would not know.
    """
    adam = recipe.optimizer.kind in ("adam", "adamw") and recipe.optimizer.implementation == "fused"
    return adam and recipe.ema is None and recipe.precision.master is None and not recipe.precision.loss_scaling


def _optimizer_of(model: nn.Module | Named, recipe: Recipe, width_factor: float) -> torch.optim.Optimizer:
    """The optimizer, which after each step moves the average of the weights as well, where the recipe has one."""
    optimizer = _without_average(model, recipe, None if recipe.mup is None else 1 / width_factor)
    set_learning_rate(optimizer, recipe.learning_rate)
    if recipe.ema is not None:
        optimizer.register_step_post_hook(partial(_average, 1 - recipe.ema.decay))
    return optimizer


# A post hook and not a wrapper: `torch._foreach_lerp_` is one kernel a dtype, and the state lies with the others in a
# checkpoint.
@torch.no_grad()
def _average(share: float, optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Move the average of what an optimizer updates by a share towards it. It is a state, and begins as a copy."""
    weights = [each for group in optimizer.param_groups for each in group["params"]]
    averages, moved = [], []
    for weight in weights:
        if weight.grad is None:  # the optimizer takes a state with anything in it for one that it has begun
            continue
        state = optimizer.state[weight]
        if AVERAGE in state:
            averages.append(state[AVERAGE])
            moved.append(weight)
        else:
            state[AVERAGE] = weight.detach().clone()
    if averages:
        torch._foreach_lerp_(averages, moved, share)


def _without_average(model: nn.Module | Named, recipe: Recipe, rate_factor: float | None) -> torch.optim.Optimizer:
    chosen, rate = recipe.optimizer, recipe.learning_rate
    loop, decay = _LOOPS[chosen.implementation], chosen.weight_decay
    if isinstance(chosen, optimizers.Muon):
        return MuonWithAdamW(
            parameter_groups(model, decay, among=for_muon),
            parameter_groups(model, decay, among=lambda name, parameter: not for_muon(name, parameter)),
            lr=rate,
            momentum=chosen.momentum,
            betas=(chosen.beta1, chosen.beta2),
            eps=chosen.epsilon,
            **loop,
        )
    groups = parameter_groups(model, decay, rate_factor=rate_factor)
    match chosen:
        case optimizers.Adam(beta1=beta1, beta2=beta2, epsilon=epsilon, amsgrad=amsgrad):
            adam = AdamW if chosen.kind == "adamw" else torch.optim.Adam
            return adam(groups, lr=rate, betas=(beta1, beta2), eps=epsilon, amsgrad=amsgrad, **loop)
        case optimizers.Adam8bit(beta1=beta1, beta2=beta2, epsilon=epsilon):
            decoupled = chosen.kind == "adamw-8bit"
            return Adam8bit(groups, lr=rate, betas=(beta1, beta2), eps=epsilon, decoupled=decoupled)
        case optimizers.SGD():
            return torch.optim.SGD(groups, lr=rate, **loop)
        case optimizers.Momentum(momentum=momentum):
            nesterov = chosen.kind == "nesterov"
            return torch.optim.SGD(groups, lr=rate, momentum=momentum, nesterov=nesterov, **loop)
        case optimizers.Adagrad(epsilon=epsilon):
            return torch.optim.Adagrad(groups, lr=rate, eps=epsilon, **loop)
        case optimizers.RMSProp(beta2=beta2, epsilon=epsilon):
            return torch.optim.RMSprop(
                groups, lr=rate, alpha=beta2, eps=epsilon, momentum=chosen.momentum, centered=chosen.centered, **loop
            )
        case optimizers.Adafactor():
            return torch.optim.Adafactor(groups, lr=rate, foreach=loop["foreach"])
        case optimizers.Lion(beta1=beta1, beta2=beta2):
            return Lion(groups, lr=rate, betas=(beta1, beta2), **loop)
    raise AssertionError(f"spec.optimizers knows an optimizer that the engine does not: {chosen.kind}")


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group this learning rate, times the group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(RATE_FACTOR, 1.0)
