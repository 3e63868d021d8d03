"""What disturbed a sample: other processes on the processor, or a processor slower than it can be."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trainledger.observe.measure.pace import SLOWED, Pace

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
            user, nice, system, _idle, _wait, irq, softirq, steal = (int(each) for each in fields[:8])
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
