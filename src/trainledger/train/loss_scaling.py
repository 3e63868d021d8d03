"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, Mixed Precision Training, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

FIRST_SCALE = 2.0**16
GROWTH, BACKOFF, STEPS_TO_GROW = 2.0, 0.5, 2000


class LossScaler:
    """Scales the loss so that small gradients do not vanish in fp16; a step whose gradients overflow is left out.

    The same passes and numbers as `torch.amp.GradScaler`: the scale halves after an overflow and doubles after 2000
    good steps. ``read`` brings the overflow flag to the host.
    """

    def __init__(self, device: torch.device, *, read: Callable[[Tensor], float] = Tensor.item) -> None:
        self.scale = torch.full((), FIRST_SCALE, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._read = read
        self._found: Tensor | None = None

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss that backward starts from."""
        return loss * self.scale

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Take the scale off all gradients in place, and note whether one of them is not finite."""
        inverse = self.scale.double().reciprocal().float()
        self._found = torch.full((), 0.0, dtype=torch.float32, device=self.scale.device)
        torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), self._found, inverse)

    def overflowed(self) -> bool:
        """Whether the step must be left out; waits for the device."""
        assert self._found is not None, "unscale comes first"
        return bool(self._read(self._found))

    def adapt(self) -> None:
        """Let the scale fall after an overflow, or grow after enough good steps."""
        assert self._found is not None, "unscale comes first"
        torch._amp_update_scale_(self.scale, self.good_steps, self._found, GROWTH, BACKOFF, STEPS_TO_GROW)
        self._found = None

    def facts(self) -> dict[str, Any]:
        """What a checkpoint keeps of it; JSON holds both numbers exactly."""
        return {"scale": self.scale.item(), "good_steps": self.good_steps.item()}

    def restore(self, facts: dict[str, Any]) -> None:
        """Go on from what `facts` gave."""
        self.scale.fill_(facts["scale"])
        self.good_steps.fill_(facts["good_steps"])
