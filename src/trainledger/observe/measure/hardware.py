"""What a device is called, how much memory it has, and which formats it multiplies in."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from trainledger.engine.train.device import synchronize

# A dtype this many times slower than fp32 in the same matmul is emulated, and not worth the wait.
ABSURDLY_SLOW = 8.0


def title(device: torch.device) -> str:
    """What the device is called: the name of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def memory_nbytes(device: torch.device) -> int | None:
    """Memory of the device; on a CPU the machine's, or what its control group allows if that is less."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    sizes = list(_limits())
    return min(sizes) if sizes else None


def _limits() -> Iterator[int]:
    with suppress(ValueError, OSError):
        yield os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(ValueError, OSError):
        yield int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))


def worth_timing(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matmuls in a dtype run at some speed here, and are not emulated."""

    def seconds(kind: torch.dtype) -> float:
        x_MK = torch.ones(256, 256, dtype=kind, device=device)
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            x_MK @ x_MK
            synchronize(device)
            best = min(best, time.perf_counter() - start)
        return best

    try:
        return seconds(dtype) < ABSURDLY_SLOW * seconds(torch.float32)
    except RuntimeError:
        return False
