"""The machine: name, memory, formats, its pace at a moment, and what disturbed a timed sample."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from trainledger.engine.train.device import host_threads, synchronize
from trainledger.spec.calibration import Calibration, find_calibration
from trainledger.spec.problem import InvalidInput

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


def described(device: torch.device) -> dict[str, Any]:
    """Where, when and with what something is measured: title, date, torch_version, threads."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"title": title(device), "date": now, "torch_version": torch.__version__, "threads": host_threads(device)}


def rounded(others: float | None) -> float | None:
    """Cores that others took, as files have it."""
    return None if others is None else round(others, 3)


def memory_nbytes(device: torch.device) -> int | None:
    """Memory of the device; on a CPU the machine's, or what its control group allows if that is less."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    sizes = []
    with suppress(ValueError, OSError):
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(ValueError, OSError):
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(sizes, default=None)


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


SIZE = 128
SLOWED = 1.15  # times the fastest; steps at the full speed of a processor spread less
_EVERY_SECONDS = 0.05  # the matmul takes 0.03 ms, twice


# A core that another virtual machine shares, heat and power limits slow a processor down by half within seconds,
# matmuls most, and no count of the system shows it: what is timed then is disturbed as if by another process.
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


# Above this share of a core taken from us a sample does not count (PYTORCH.md's trials used the same line).
DISTURBED = 0.12


@dataclass(frozen=True)
class ProcessorUse:
    """A reading of the clocks: seconds since some start, core-seconds busy, core-seconds of this process."""

    wall: float
    busy: float
    own: float


@dataclass
class Sample:
    """One timed stretch; ``others`` is the cores taken from us by other processes, None where unknown.

    ``pace_seconds`` is the pace before or after, the slower of the two; what it is compared with may still come.
    """

    seconds: float = 0.0
    others: float | None = None
    crowded: bool = False
    pace: Pace | None = None
    pace_seconds: float = 0.0

    @property
    def slowdown(self) -> float:
        """How many times as long as at full speed the processor took then; 1.0 where that is unknown."""
        return 1.0 if self.pace is None else self.pace_seconds / self.pace.fastest

    @property
    def disturbed(self) -> bool:
        return self.crowded or self.slowdown > SLOWED


def processor_use() -> ProcessorUse | None:
    """What /proc/stat says of the cores this process may run on; None where there is no such file."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            lines = file.read().splitlines()
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
    allowed = {f"cpu{each}" for each in os.sched_getaffinity(0)}
    busy = 0
    for line in lines:
        name, *fields = line.split()
        if name in allowed:
            user, nice, system, _idle, _wait, irq, softirq, steal = (int(field) for field in fields[:8])
            busy += user + nice + system + irq + softirq + steal
    mine = os.times()
    own = mine.user + mine.system + mine.children_user + mine.children_system
    return ProcessorUse(time.perf_counter(), busy / ticks, own)


def others_between(before: ProcessorUse | None, after: ProcessorUse | None, threads: int) -> float | None:
    """Cores that other processes took from ``threads`` threads of this one (0 where idle cores sufficed).

    >>> busy = ProcessorUse(0.0, 0.0, 0.0), ProcessorUse(2.0, 3.0, 2.0)
    >>> others_between(*busy, threads=os.cpu_count())
    0.5
    """
    if before is None or after is None or after.wall <= before.wall:
        return None
    wall = after.wall - before.wall
    others = ((after.busy - before.busy) - (after.own - before.own)) / wall
    spare = max(0, len(os.sched_getaffinity(0)) - threads)
    return max(0.0, others - spare)


@contextmanager
def watched(threads: int, pace: Pace | None = None) -> Iterator[Sample]:
    """Time what runs inside; the sample is filled in when the block ends.

    ``pace`` is that of the processor that computes; None where another device does, or ranks share its cores.
    """
    sample = Sample(pace=pace)
    pace_before = 0.0 if pace is None else pace.now()
    before = processor_use()
    start = time.perf_counter()
    try:
        yield sample
    finally:
        sample.seconds = time.perf_counter() - start
        sample.others = others_between(before, processor_use(), threads)
        # The system counts in ticks of 10 ms, which a short sample must not mistake for company.
        sample.crowded = sample.others is not None and sample.others > DISTURBED + 0.02 / max(sample.seconds, 1e-3)
        sample.pace_seconds = max(pace_before, 0.0 if pace is None else pace.now())
