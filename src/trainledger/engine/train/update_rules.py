"""Optimizers that torch lacks: Adam with 8-bit moments, Lion, and a Muon that leaves the rest to AdamW."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon
from torch.optim import _muon as torch_muon

from trainledger.engine.train.parallel.mesh import local, offset_of
from trainledger.spec.units import ceil_div

# Adam with 8-bit moments: each moment is cut into blocks of 256 elements. A block keeps its largest magnitude in fp32
# and, for each element, one byte: the place of the element's share of that magnitude in a table of 256 values. The
# table is the dynamic one of Dettmers et al. 2022 (arXiv 2110.02861, section 2.1): values over seven decades, each
# decade twice as finely divided as the one below, so that small moments next to large ones are not rounded to zero.
# Blocks of 256 are those of bitsandbytes since 0.44 (2,048 in the paper); as there, tensors under 4,096 elements keep
# fp32 moments.
# Not torchao's AdamW8bit (0.18 with torch 2.13, measured on a CPU): its step is torch.compile with fullgraph, which
# ends with an error under a dispatch mode, so that neither `trace` nor a meter sees it; the first one took 74 s on two
# shared cores. A tensor whose elements are no multiple of 256 keeps fp32 moments (4,100 elements: 32,804 bytes of
# state, and 8,844 here), and each moment has a table of 256 values of its own (1,024 bytes), which no account has.
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
        middles = [10.0 ** (decade - _DECADES + 1) * (0.1 + width * (part + 0.5)) for part in range(parts)]
        values += middles
        if signed:
            values += [-middle for middle in middles]
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
                    _adam(weight, weight.grad, state["exp_avg"], state["exp_avg_sq"], state["step"], group)
                    continue
                tables = tables or _tables(weight.device)
                first, second = (
                    _moment(state[name], state[f"{name}_scale"], values)
                    for name, (values, _) in zip(("exp_avg", "exp_avg_sq"), tables, strict=True)
                )
                _adam(weight, weight.grad, _like(first, weight), _like(second, weight), state["step"], group)
                _store(first, state["exp_avg"], state["exp_avg_scale"], tables[0][1])
                del first
                _store(second, state["exp_avg_sq"], state["exp_avg_sq_scale"], tables[1][1])
                del second

    # `Optimizer.load_state_dict` casts every state but `step` to its parameter's dtype (torch 2.13,
    # `_process_value_according_to_param_policy`): codes would become floats.
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


def _adam(w: Tensor, g: Tensor, first: Tensor, second: Tensor, step: Tensor, group: dict[str, Any]) -> None:
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


_torch: Any = torch_muon


class GatheredMuon(Muon):
    """torch's Muon, also of matrices that are DTensors: what is orthogonalized is gathered first, in the format of the
    iteration; each rank works out the whole matrix and takes its own rows, the same numbers as in one process.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        if not any(isinstance(each, DTensor) for group in self.param_groups for each in group["params"]):
            super().step()  # type: ignore[no-untyped-call]
            return
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self._update(each, group)

    # The iteration needs the whole matrix: it begins by dividing by the norm and goes on with X X^T. torch 2.13 keeps
    # it private (`torch.optim._muon`).
    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        state, rate = self.state[weight], group["lr"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight.grad)  # type: ignore[arg-type]
        w, g, m = (local(each) for each in (weight, weight.grad, state["momentum_buffer"]))  # type: ignore[arg-type]
        m.lerp_(g, 1 - group["momentum"])
        update = g.lerp(m, group["momentum"]) if group["nesterov"] else m
        whole = _gathered(update.bfloat16(), weight)
        whole = _torch._zeropower_via_newtonschulz(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
        w.mul_(1 - rate * group["weight_decay"])
        w.add_(_own(whole, weight), alpha=-_torch._adjust_lr(rate, group["adjust_lr_fn"], weight.shape))


def _gathered(part: Tensor, weight: Tensor) -> Tensor:
    """A tensor of a weight's shape, of which this rank has ``part``."""
    if not isinstance(weight, DTensor):
        return part
    made = DTensor.from_local(
        part, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
    whole: Tensor = made.full_tensor()
    return whole


def _own(whole: Tensor, weight: Tensor) -> Tensor:
    """This rank's part of it."""
    if not isinstance(weight, DTensor):
        return whole
    shape = local(weight).shape
    if 0 in shape:
        return whole.new_empty(shape)
    return whole[tuple(slice(at, at + size) for at, size in zip(offset_of(weight), shape, strict=True))]


# torch.optim.Muon takes matrices of two dims only and has no AdamW beside it for the rest.
class MuonWithAdamW(torch.optim.Optimizer):
    """torch.optim's Muon and AdamW side by side (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982).

    The update of a matrix is scaled to the root mean square that AdamW's has (Liu et al., section 2.2), so that one
    learning rate and one decay serve both. ``muon`` groups hold matrices only; the others go to AdamW.
    """

    def __init__(
        self,
        muon: Iterable[dict[str, Any]],
        adamw: Iterable[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        **adamw_options: Any,
    ) -> None:
        matrices, rest = list(muon), list(adamw)
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            self._parts.append(GatheredMuon(matrices, lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw"))
        if rest:
            self._parts.append(AdamW(rest, lr=lr, **adamw_options))
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        # Loading a checkpoint or tracing puts other groups and states in place of those that the parts were made with.
        for part in self._parts:
            part.state = self.state
            part.param_groups = [
                param_group
                for param_group in self.param_groups
                if ("ns_steps" in param_group) == isinstance(part, Muon)
            ]
            part.step()


# beta1 interpolates for the sign and beta2 for the momentum, which comes after it; in Adam's order (momentum first) it
# would be another optimizer.
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
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            weights = [each for each in group["params"] if each.grad is not None]
            gradients = [weight.grad for weight in weights]
            moments = [self._moment(weight) for weight in weights]
            rate, (beta1, beta2) = group["lr"], group["betas"]
            if group["foreach"] and weights:
                _lion_at_once(weights, gradients, moments, rate, beta1, beta2, group["weight_decay"])
            else:
                for w, g, m in zip(weights, gradients, moments, strict=True):
                    _lion(w, g, m, rate, beta1, beta2, group["weight_decay"])

    def _moment(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(weight)
        moment: Tensor = state["exp_avg"]
        return moment


def _lion(w: Tensor, g: Tensor, m: Tensor, rate: float, beta1: float, beta2: float, decay: float) -> None:
    if decay:
        w.mul_(1 - rate * decay)
    w.add_(m.lerp(g, 1 - beta1).sign_(), alpha=-rate)
    m.lerp_(g, 1 - beta2)


def _lion_at_once(
    weights: list[Tensor],
    gradients: list[Tensor],
    moments: list[Tensor],
    rate: float,
    beta1: float,
    beta2: float,
    decay: float,
) -> None:
    if decay:
        torch._foreach_mul_(weights, 1 - rate * decay)
    signs = torch._foreach_lerp(moments, gradients, 1 - beta1)
    torch._foreach_sign_(signs)
    torch._foreach_add_(weights, signs, alpha=-rate)
    del signs
    torch._foreach_lerp_(moments, gradients, 1 - beta2)
