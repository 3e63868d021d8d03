"""How fast the processor computes at a moment, by a matmul that its caches hold.

A core that another virtual machine shares, heat and power limits slow a processor down by half within seconds, matmuls
most, and no count of the system's shows that: what was timed then is disturbed as if another process had been there.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from trainledger.spec.calibration import Calibration, find_calibration
from trainledger.spec.problem import InvalidInput

SIZE = 128
SLOWED = 1.15  # times the fastest; steps at the full speed of a processor spread less
_EVERY_SECONDS = 0.05  # the matmul takes 0.03 ms, twice


class Pace:
    """Readings in this process; ``fastest`` are the least seconds of the matmul seen so far, here or before."""

    def __init__(self, fastest: float = math.inf) -> None:
        self.fastest = fastest
        self._matrix: Any = torch.ones(SIZE, SIZE, device="cpu")
        self._product = torch.empty_like(self._matrix)
        self._seconds, self._at = math.inf, -math.inf

    def now(self) -> float:
        """Seconds of the matmul now, or up to 0.05 s ago."""
        if time.perf_counter() - self._at >= _EVERY_SECONDS:
            with _disable_current_modes(), torch.no_grad():  # no recorder sees it
                self._seconds = min(self._once(), self._once())
            self.fastest = min(self.fastest, self._seconds)
            self._at = time.perf_counter()
        return self._seconds

    def slowdown(self) -> float:
        """What the matmul takes now over the least it has taken: 1.0 at full speed."""
        return self.now() / self.fastest

    def _once(self) -> float:
        began = time.perf_counter()
        torch.mm(self._matrix, self._matrix, out=self._product)
        return time.perf_counter() - began


def pace_of(device: torch.device) -> Pace | None:
    """The pace of a CPU whose cores this process alone computes on, against its calibration where there is one."""
    if device.type != "cpu" or (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    with suppress(InvalidInput):  # a damaged one is refused where it is needed
        calibration = find_calibration(device.type)
        if calibration is not None and _comparable(calibration):
            return Pace(calibration.pace_seconds or math.inf)
    return Pace()


def _comparable(calibration: Calibration) -> bool:
    return calibration.torch_version == torch.__version__ and calibration.threads == torch.get_num_threads()
