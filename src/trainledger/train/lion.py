"""Lion, which torch does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """The sign of an interpolated momentum, with decoupled decay (Chen et al. 2023, arXiv 2302.06675, program 1).

    c = beta1 m + (1 - beta1) g;  w = w - rate (sign(c) + decay w);  m = beta2 m + (1 - beta2) g. One state of the
    parameter's size and format. ``foreach`` runs each line over all tensors of a group at once.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        foreach: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "foreach": foreach})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [each for each in group["params"] if each.grad is not None]
            gradients = [each.grad for each in weights]
            moments = [self._moment(each) for each in weights]
            rate, (beta1, beta2) = group["lr"], group["betas"]
            if group["foreach"] and weights:
                _update_all(weights, gradients, moments, rate, beta1, beta2, group["weight_decay"])
            else:
                for w, g, m in zip(weights, gradients, moments, strict=True):
                    _update(w, g, m, rate, beta1, beta2, group["weight_decay"])
        return loss

    def _moment(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(weight)
        moment: Tensor = state["exp_avg"]
        return moment


def _update(w: Tensor, g: Tensor, m: Tensor, rate: float, beta1: float, beta2: float, decay: float) -> None:
    if decay:
        w.mul_(1 - rate * decay)
    w.add_(m.lerp(g, 1 - beta1).sign_(), alpha=-rate)
    m.lerp_(g, 1 - beta2)


def _update_all(
    weights: list[Tensor], gradients: list[Tensor], moments: list[Tensor],
    rate: float, beta1: float, beta2: float, decay: float,
) -> None:  # fmt: skip
    if decay:
        torch._foreach_mul_(weights, 1 - rate * decay)
    signs = torch._foreach_lerp(moments, gradients, 1 - beta1)
    torch._foreach_sign_(signs)
    torch._foreach_add_(weights, signs, alpha=-rate)
    del signs
    torch._foreach_lerp_(moments, gradients, 1 - beta2)
