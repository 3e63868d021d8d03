"""What a process has at a moment: its memory, the processor beside others and its speed. Read a few times a second."""

from __future__ import annotations

import os
import resource
import sys
import time
from typing import Any

import torch

from trainledger.engine.train.device import host_threads
from trainledger.observe.measure.contention import others_between, processor_use
from trainledger.observe.measure.pace import pace_of
from trainledger.spec.units import KIB

_EVERY_SECONDS = 0.2  # a reading takes some 0.2 ms


class Usage:
    """Readings of this process: of a CPU's memory what it holds resident, of an accelerator's what is allocated."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._device = device
        self._threads = host_threads(device)
        self._pace = pace_of(device)
        self._before = processor_use()
        self._last: dict[str, Any] = {}
        self._at = -_EVERY_SECONDS

    def now(self) -> dict[str, Any]:
        """memory_nbytes, peak_memory_nbytes, others (cores that other processes took) and slowdown (of a small matmul
        on a CPU, over its least seconds), as last read.
        """
        if time.perf_counter() - self._at >= _EVERY_SECONDS:
            use = processor_use()
            self._last = {**self._memory(), "others": others_between(self._before, use, self._threads)}
            if self._pace is not None:
                self._last["slowdown"] = self._pace.slowdown()
            self._before, self._at = use, time.perf_counter()
        return self._last

    def _memory(self) -> dict[str, int]:
        if self._on_device:
            statistics = torch.cuda.memory_stats(self._device)
            names = {"memory_nbytes": "allocated_bytes.all.current", "peak_memory_nbytes": "allocated_bytes.all.peak"}
            return {ours: int(statistics.get(theirs, 0)) for ours, theirs in names.items()}
        scale = 1 if sys.platform == "darwin" else KIB
        found = {"peak_memory_nbytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale}
        try:
            with open("/proc/self/statm", encoding="ascii") as file:
                found["memory_nbytes"] = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            pass
        return found
