"""Adam and AdamW with 8-bit moments, which torch does not have.

Each moment is cut into blocks of 256 elements. A block keeps its largest magnitude in fp32 and, for each element,
one byte: the place of the element's share of that magnitude in a table of 256 values. The table is the dynamic
one of Dettmers et al. 2022 (arXiv 2110.02861, section 2.1): values over seven decades, each decade twice as finely
divided as the one below, so that small moments next to large ones are not rounded to zero. Blocks of 256 are those
of bitsandbytes since 0.44 (2,048 in the paper); as there, tensors under 4,096 elements keep fp32 moments.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trainledger.spec.units import ceil_div

BLOCK = 256
SMALLEST = 4096  # elements of a tensor whose moments are stored in 8 bits
_DECADES = 7


@cache
def table(*, signed: bool) -> tuple[float, ...]:
    """The 256 values that a byte encodes, rising: 0, 1 and the middles of equal parts of each decade."""
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        parts = 2 ** (decade if signed else decade + 1)
        width = 0.9 / parts
        middles = [10.0 ** (decade - _DECADES + 1) * (0.1 + width * (each + 0.5)) for each in range(parts)]
        values += middles
        if signed:
            values += [-each for each in middles]
    return tuple(sorted(values))


class Adam8bit(torch.optim.Optimizer):
    """Adam (decay as L2) or AdamW (``decoupled``) whose moments are stored in 8 bits.

    The moments of one tensor at a time are put into fp32, updated, and stored again; the rule is torch's. Storing
    rounds to the nearest value, without randomness: the same steps give the same bits.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled: bool = False,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            tables: list[tuple[Tensor, Tensor]] = []
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    _begin(state, weight)
                state["step"] += 1
                if weight.numel() < SMALLEST:
                    _update(weight, weight.grad, state["exp_avg"], state["exp_avg_sq"], state["step"], group)
                    continue
                tables = tables or _tables(weight.device)
                first, second = (
                    _moment(state[name], state[f"{name}_scale"], values)
                    for name, (values, _) in zip(("exp_avg", "exp_avg_sq"), tables, strict=True)
                )
                _update(weight, weight.grad, _like(first, weight), _like(second, weight), state["step"], group)
                _store(first, state["exp_avg"], state["exp_avg_scale"], tables[0][1])
                del first
                _store(second, state["exp_avg_sq"], state["exp_avg_sq_scale"], tables[1][1])
                del second

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state unchanged: torch would put codes and scales into the parameter's format."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = [weight for group in self.param_groups for weight in group["params"]]
        for number, weight in zip(numbers, own, strict=True):
            given = state_dict["state"].get(number, {})
            self.state[weight] = {
                name: each.detach().clone().to("cpu" if name == "step" else weight.device)
                for name, each in given.items()
            }


def _begin(state: dict[str, Any], weight: Tensor) -> None:
    """Moments of zero."""
    state["step"] = torch.tensor(0.0)
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        if weight.numel() < SMALLEST:
            state[name] = torch.zeros_like(weight, dtype=torch.float32)
        else:
            blocks = ceil_div(weight.numel(), BLOCK)
            zero = table(signed=signed).index(0.0)
            state[name] = torch.full((blocks, BLOCK), zero, dtype=torch.uint8, device=weight.device)
            state[f"{name}_scale"] = torch.zeros(blocks, 1, device=weight.device)


def _tables(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """For either moment the 256 values, and the 255 bounds between them."""
    result = []
    for signed in (True, False):
        values = torch.tensor(table(signed=signed), device=device)
        result.append((values, (values[1:] + values[:-1]).div_(2)))
    return result


def _moment(codes: Tensor, scales: Tensor, values: Tensor) -> Tensor:
    """A stored moment in fp32, by blocks."""
    return values.index_select(0, codes.int().view(-1)).view(-1, BLOCK).mul_(scales)


def _like(blocks: Tensor, weight: Tensor) -> Tensor:
    """The blocks of a moment in the shape of its weight; what fills up the last block is left out."""
    return blocks.view(-1)[: weight.numel()].view_as(weight)


def _store(blocks: Tensor, codes: Tensor, scales: Tensor, bounds: Tensor) -> None:
    """Round a moment to its nearest stored values; ``blocks`` is used up."""
    scales.copy_(torch.linalg.vector_norm(blocks, float("inf"), dim=1, keepdim=True))
    blocks.div_(scales.clamp(min=torch.finfo(torch.float32).tiny))  # a block of zeros stays one
    codes.copy_(torch.bucketize(blocks, bounds, out_int32=True))


def _update(w: Tensor, g: Tensor, first: Tensor, second: Tensor, step: Tensor, group: dict[str, Any]) -> None:
    """Adam's rule on fp32 moments (Kingma and Ba 2015, algorithm 1)."""
    rate, (beta1, beta2), decay, count = group["lr"], group["betas"], group["weight_decay"], step.item()
    g = g.float()
    if decay and group["decoupled"]:
        w.mul_(1 - rate * decay)
    elif decay:
        g = g.add(w, alpha=decay)
    first.lerp_(g, 1 - beta1)
    second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    root = second.sqrt().div_((1 - beta2**count) ** 0.5).add_(group["eps"])
    w.addcdiv_(first, root, value=-rate / (1 - beta1**count))
