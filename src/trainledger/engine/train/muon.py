"""Muon where ranks have rows of each matrix: what is orthogonalized is gathered first, in the format of the iteration.

Each rank works out the whole matrix and takes its own rows: the same numbers as in one process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Muon
from torch.optim import _muon as torch_muon

from trainledger.engine.train.parallel.parts import local, offset_of

_torch: Any = torch_muon


class GatheredMuon(Muon):
    """torch's Muon, also of matrices that are DTensors."""

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
