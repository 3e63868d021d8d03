"""Optimizers of torch by name, for steps that are traced without the user's own, and those of a step as a list."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from trainledger.spec.problem import InvalidInput, Problem, nearest_text

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {}),
    "adam": ("Adam", {}),
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "adagrad": ("Adagrad", {}),
    "rmsprop": ("RMSprop", {}),
    "adadelta": ("Adadelta", {}),
    "adafactor": ("Adafactor", {}),
    "nadam": ("NAdam", {}),
    "radam": ("RAdam", {}),
    "adamax": ("Adamax", {}),
    "asgd": ("ASGD", {}),
    "rprop": ("Rprop", {}),
    "lbfgs": ("LBFGS", {}),
}
WAYS: dict[str, dict[str, bool]] = {
    "fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False},
}  # fmt: skip


def check_optimizer(name: str) -> tuple[str, dict[str, Any]]:
    """The class of an optimizer and its options by its name; raises InvalidInput where it is none."""
    kind, _, way = name.partition("-")
    if kind not in OPTIMIZERS or (way and way not in WAYS):
        known = ["forward", "backward", *OPTIMIZERS, *(f"{each}-{how}" for each in OPTIMIZERS for how in WAYS)]
        rule = f"must be forward, backward or an optimizer ({', '.join(OPTIMIZERS)}), with -fused, -foreach or -loop"
        raise InvalidInput([Problem("--step", name, rule, nearest_text(name, known))])
    class_name, options = OPTIMIZERS[kind]
    return class_name, {**options, **WAYS.get(way, {})}


def optimizer_named(name: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of the trained parameters by name, with a way of running behind a dash (``adamw-fused``).

    Without one torch's default for the device is taken. Raises InvalidInput.
    """
    class_name, options = check_optimizer(name)
    trained = [each for each in parameters if each.requires_grad]
    if not trained:
        raise InvalidInput([Problem("--step", name, "the model has no parameter to train", "forward")])
    try:
        made: torch.optim.Optimizer = getattr(torch.optim, class_name)(trained, **options)
    except (TypeError, RuntimeError, ValueError) as error:
        raise InvalidInput([Problem("--step", name, f"torch refuses it: {str(error).splitlines()[0]}")]) from error
    return made


def optimizers_in(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> Sequence[torch.optim.Optimizer]:
    """The optimizers of a step as a list: none, one, or several."""
    if optimizer is None:
        return ()
    return (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
