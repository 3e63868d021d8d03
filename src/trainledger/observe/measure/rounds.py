"""Kernels timed in rounds: the median of blocks that nothing disturbed.

Every kernel is timed in short blocks, round after round over all kernels, so that a disturbance that lasts a second
costs each kernel one block and no kernel all of its blocks. Blocks in which other processes used the processor, or
it was slower than it can be, are thrown away; where none is left, the fastest calls count. Kernels of a GPU are timed
by its own clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainledger.engine.train.device import host_threads, synchronize
from trainledger.ledger.measured import BUSY
from trainledger.observe.measure.hardware import Pace, Sample, pace_of, watched
from trainledger.observe.measure.kernels import Kernel

ENOUGH_SAMPLES = 3
MOST_SECONDS, MOST_ROUNDS = 3, 4  # times what was asked for, while kernels lack undisturbed samples
BURST_SECONDS = 0.004
_WAIT_CYCLES_PER_SECOND = 2e9  # of a kernel that waits; at another clock it is made to wait longer
_MOST_QUEUED = 256  # kernels that a driver takes before it lets the program wait

Tell = Callable[[float, str], None]  # the share of the work that is done, and the name of what is timed


@dataclass(frozen=True)
class Block:
    """Calls of one kernel for a fraction of a second: mean seconds of a call, and of the fastest few in a row."""

    seconds: float
    fastest: float
    sample: Sample
    late: bool = False  # the device did not wait for the program

    @property
    def others(self) -> float | None:
        return self.sample.others

    @property
    def disturbed(self) -> bool:
        return self.late or self.sample.disturbed


@dataclass
class Timing:
    """A kernel, its call, and the blocks timed so far."""

    kernel: Kernel
    call: Callable[[], object]
    blocks: list[Block] = field(default_factory=list)

    @property
    def undisturbed(self) -> list[Block]:
        return [block for block in self.blocks if not block.disturbed]

    def best(self) -> tuple[float, float | None]:
        """Seconds of a call and others' share: the median undisturbed block, or the fastest calls of all."""
        kept = sorted(self.undisturbed, key=lambda block: block.seconds)
        if kept:
            middle = kept[(len(kept) - 1) // 2]
            return middle.seconds, middle.others
        fastest = min(self.blocks, key=lambda block: block.fastest)
        return fastest.fastest, fastest.others


def busy_sentence(timings: Sequence[Timing], whole: Sample) -> str | None:
    """What to say where something disturbed the timing of kernels; None where nothing did.

    ``whole`` is the time of all blocks together: the system counts in ticks of 10 ms, so that company which takes half
    of each short block shows only there.
    """
    blocks = [block for timing in timings for block in timing.blocks]
    without, disturbed = sum(not timing.undisturbed for timing in timings), sum(block.disturbed for block in blocks)
    slow = f"{BUSY}, or it ran below its full speed"
    if without:
        what = f"{without} of {len(timings)} kernels have no undisturbed sample"
        why = f"{slow}: {what} and are given by their fastest calls"
    elif whole.disturbed:
        why = f"{BUSY}: they took {whole.others:.1f} cores from it while kernels were timed"
    elif 2 * disturbed > len(blocks):
        why = f"{slow}: {disturbed} of {len(blocks)} samples were disturbed, and the others may be slowed too"
    else:
        return None
    return f"{why}; measure again on a quiet machine"


def timed(
    chosen: Sequence[Kernel], device: torch.device, *, seconds: float, rounds: int, tell: Tell, pace: Pace | None = None
) -> tuple[list[Timing], list[str]]:
    """Kernels timed on a device, and a sentence where something disturbed that (`time_all`, `busy_sentence`)."""
    threads, pace = host_threads(device), pace or pace_of(device)
    with watched(threads) as whole:
        timings = time_all(chosen, device, threads, seconds=seconds, rounds=rounds, tell=tell, pace=pace)
    busy = busy_sentence(timings, whole)
    return timings, [] if busy is None else [busy]


def has_a_clock(device: torch.device) -> bool:
    """Whether kernels are timed by a clock of the device, which leaves out what the program needs to call them."""
    return device.type == "cuda"


def time_all(
    chosen: Sequence[Kernel],
    device: torch.device,
    threads: int,
    *,
    seconds: float,
    rounds: int,
    tell: Tell,
    pace: Pace | None = None,
) -> list[Timing]:
    """``rounds`` blocks of every kernel in about ``seconds``, and up to twice as long again for disturbed ones.

    ``pace`` is that of the processor where it is the device.
    """
    timings = [Timing(kernel, kernel.build()) for kernel in chosen]
    block = seconds / rounds / len(timings)
    for timing in timings:
        timing.call()
        synchronize(device)
    deadline = time.perf_counter() + MOST_SECONDS * seconds
    for round_ in range(MOST_ROUNDS * rounds):
        wanted = timings if round_ < rounds else [each for each in timings if len(each.undisturbed) < ENOUGH_SAMPLES]
        for at, timing in enumerate(wanted):
            if timing.blocks and time.perf_counter() > deadline:
                return timings
            tell(min(1.0, (round_ + at / len(wanted)) / rounds), timing.kernel.name)
            if has_a_clock(device):
                timing.blocks.append(_block_of_device(timing.call, device, threads, block))
            else:
                timing.blocks.append(_block(timing.call, device, threads, block, pace))
    return timings


def _block(call: Callable[[], object], device: torch.device, threads: int, seconds: float, pace: Pace | None) -> Block:
    """Run a kernel for about ``seconds``, looking at the clock (and waiting for the device) every few calls."""
    calls, burst, fastest = 0, 1, float("inf")
    synchronize(device)
    with watched(threads, pace) as sample:
        start = before = time.perf_counter()
        while before - start < seconds:
            for _ in range(burst):
                call()
            synchronize(device)
            now = time.perf_counter()
            calls += burst
            fastest = min(fastest, (now - before) / burst)
            burst = max(1, int(BURST_SECONDS / fastest))
            before = now
    return Block((before - start) / calls, fastest, sample)


def _block_of_device(call: Callable[[], object], device: torch.device, threads: int, seconds: float) -> Block:
    """Mean seconds of calls that queue up behind a kernel that waits: the device's own time, without the program's.

    A program calls small kernels more slowly than a device runs them; timed by its clock they would all look alike.
    """
    cuda: Any = torch.cuda  # whose events have no types
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    start = time.perf_counter()
    call()
    called = time.perf_counter() - start
    synchronize(device)
    took = time.perf_counter() - start
    calls = max(1, min(_MOST_QUEUED, int(seconds / took)))
    waits = 2 * calls * called + 1e-4
    with watched(threads) as sample:
        for _ in range(4):
            cuda._sleep(int(waits * _WAIT_CYCLES_PER_SECOND))
            begin.record()
            for _ in range(calls):
                call()
            end.record()
            late = begin.query()  # the device began before the program was through
            synchronize(device)
            if not late:
                break
            waits *= 2
    each = begin.elapsed_time(end) / 1e3 / calls
    return Block(each, each, sample, late)
