"""Muon for the hidden matrices and AdamW for all the rest, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import AdamW, Muon


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
            self._parts.append(Muon(matrices, lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw"))
        if rest:
            self._parts.append(AdamW(rest, lr=lr, **adamw_options))
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Loading a checkpoint or tracing puts other groups and states in place of those that the parts were made with.
        for part in self._parts:
            part.state = self.state
            part.param_groups = [each for each in self.param_groups if ("ns_steps" in each) == isinstance(part, Muon)]
            part.step()
        return loss
