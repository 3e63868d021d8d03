"""A calibration of this machine in half a minute: matmuls by shape and dtype, memory, attention, overhead.

Every kernel is timed in short blocks, round after round over all kernels, so that a disturbance that lasts a
second costs each kernel one block and no kernel all of its blocks. Blocks in which other processes used the
processor are thrown away; where none is left, the fastest calls count and the calibration says ``busy``.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from trainledger.durable import sha256, sync
from trainledger.measure.contention import Sample, watched
from trainledger.measure.kernels import Kernel, fresh_bytes_per_second, kernels, operation_seconds
from trainledger.measure.overhead import StepOverhead, TinySteps
from trainledger.spec.calibration import Calibration, KernelTime
from trainledger.train.device import compute_capability, keep_freed_memory, synchronize
from trainledger.units import MIB

# A dtype this many times slower than fp32 in the same matmul is emulated, and not worth the wait.
ABSURDLY_SLOW = 8.0
ENOUGH_SAMPLES = 3
BURST_SECONDS = 0.004
_PARTS = (attrgetter("operation"), attrgetter("update"), attrgetter("update_tensor"))

T = TypeVar("T")


@dataclass(frozen=True)
class Block:
    """Calls of one kernel for a fraction of a second: mean seconds of a call, and of the fastest few in a row."""

    seconds: float
    fastest: float
    others: float | None = None
    disturbed: bool = False


@dataclass
class Timing:
    """A kernel, its call, and the blocks timed so far."""

    kernel: Kernel
    call: Callable[[], object]
    blocks: list[Block] = field(default_factory=list)

    @property
    def undisturbed(self) -> list[Block]:
        return [each for each in self.blocks if not each.disturbed]

    def best(self) -> tuple[float, float | None]:
        """Seconds of a call and others' share: the median undisturbed block, or the fastest calls of all."""
        kept = sorted(self.undisturbed, key=lambda each: each.seconds)
        if kept:
            middle = kept[(len(kept) - 1) // 2]
            return middle.seconds, middle.others
        fastest = min(self.blocks, key=lambda each: each.fastest)
        return fastest.fastest, fastest.others


def measure_machine(
    backend: str = "cpu",
    *,
    quick: bool = False,
    progress: Callable[[float, str], None] | None = None,
) -> Calibration:
    """Measure the machine under ``backend`` (cpu, cuda or mps) in about 20 s, or about 6 s if ``quick``.

    ``progress`` is called with the share of the work done and the name of the kernel being timed.
    """
    device = torch.device(backend)
    tell = progress or (lambda share, name: None)
    notes: list[str] = []
    fresh = fresh_bytes_per_second(device)
    keep_freed_memory()  # as the engine does, which is what the rates are for
    threads = torch.get_num_threads() if backend == "cpu" else 1
    dtypes = ["fp32"]
    if _worth_timing(device, torch.bfloat16):
        dtypes.append("bf16")
    else:
        notes.append("bf16 matmuls are emulated on this machine and were left out")
    chosen = kernels(device, dtypes, quick=quick)
    seconds, rounds = (4.0, 3) if quick else (15.0, 5)
    timings = _time_all(chosen, device, threads, seconds, rounds, tell)

    bare = _watched_often(lambda: operation_seconds(device), threads, 5)
    tell(0.96, "overhead of a step")
    tiny_steps = TinySteps(device)
    steps = _watched_often(tiny_steps, threads, 9)
    step = StepOverhead(*(_middle([(sample, part(each)) for sample, each in steps]) for part in _PARTS))
    tell(0.97, "storage")
    saves = _watched_often(lambda: storage_bytes_per_second(16 * MIB if quick else 64 * MIB), threads, 3)
    rates = [(sample, rate) for sample, rate in saves if rate is not None]
    tell(1.0, "done")

    samples = [each for timing in timings for each in timing.blocks] + [each for each, _ in (*bare, *steps)]
    discarded = sum(each.disturbed for each in samples)
    disturbed = [timing for timing in timings if not timing.undisturbed]
    if any(each.others is None for each in samples):
        notes.append("whether other processes disturbed the samples is unknown: this system has no /proc/stat")
    if disturbed:
        notes.append(
            f"other processes kept the machine busy: {len(disturbed)} of {len(timings)} kernels have no undisturbed "
            "sample and are given by their fastest calls; measure again on a quiet machine"
        )
    return Calibration(
        title=title(device),
        backend=backend,
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        torch_version=torch.__version__,
        threads=threads,
        kernels=tuple(_kernel_time(each, _middle(bare)) for each in timings),
        fresh_bytes_per_second=fresh,
        operation_seconds=step.operation,
        update_seconds=step.update,
        update_tensor_seconds=step.update_tensor,
        storage_bytes_per_second=1 / _middle([(sample, 1 / rate) for sample, rate in rates]) if rates else None,
        memory_nbytes=memory_nbytes(device),
        compute_capability=compute_capability(device),
        samples=len(samples),
        discarded=discarded,
        busy=bool(disturbed),
        notes=tuple(notes),
    )


def _time_all(
    chosen: list[Kernel],
    device: torch.device,
    threads: int,
    seconds: float,
    rounds: int,
    tell: Callable[[float, str], None],
) -> list[Timing]:
    """``rounds`` blocks of every kernel in about ``seconds``, and up to as many again for disturbed ones."""
    timings = [Timing(each, each.build()) for each in chosen]
    block = seconds / rounds / len(timings)
    for timing in timings:
        timing.call()
        synchronize(device)
    deadline = time.perf_counter() + 1.3 * seconds
    for round_ in range(2 * rounds):
        wanted = timings if round_ < rounds else [each for each in timings if len(each.undisturbed) < ENOUGH_SAMPLES]
        for at, timing in enumerate(wanted):
            if timing.blocks and time.perf_counter() > deadline:
                return timings
            tell(0.95 * min(1.0, (round_ + at / len(wanted)) / rounds), timing.kernel.name)
            timing.blocks.append(_block(timing.call, device, threads, block))
    return timings


def _block(call: Callable[[], object], device: torch.device, threads: int, seconds: float) -> Block:
    """Run a kernel for about ``seconds``, looking at the clock (and waiting for the device) every few calls."""
    calls, burst, fastest = 0, 1, float("inf")
    synchronize(device)
    with watched(threads) as sample:
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
    return Block((before - start) / calls, fastest, sample.others, sample.disturbed)


def _watched_often(measure: Callable[[], T], threads: int, times: int) -> list[tuple[Sample, T]]:
    samples = []
    for _ in range(times):
        with watched(threads) as sample:
            value = measure()
        samples.append((sample, value))
    return samples


def _middle(samples: list[tuple[Sample, float]]) -> float:
    kept = [value for sample, value in samples if not sample.disturbed]
    return statistics.median(kept) if kept else min(value for _, value in samples)


def _kernel_time(timing: Timing, overhead: float) -> KernelTime:
    """What the kernel itself takes: the cost of calling any operation is a number of its own."""
    kernel, (called, others) = timing.kernel, timing.best()
    seconds = max(called - overhead * kernel.operations, 0.1 * called)
    return KernelTime(
        kind=kernel.kind, dtype=kernel.dtype, shape=kernel.shape, flops=kernel.flops, nbytes=kernel.nbytes,
        seconds=seconds, phase=kernel.phase, operation=kernel.operation,
        others=None if others is None else round(others, 3),
    )  # fmt: skip


def _worth_timing(device: torch.device, dtype: torch.dtype) -> bool:
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


def storage_bytes_per_second(nbytes: int, directory: str | None = None) -> float | None:
    """How fast a checkpoint goes to disk, as the engine saves it: bytes written, synced and hashed per second.

    None where it fails.
    """
    tensors = {str(each): torch.rand(max(1, nbytes // 16)) for each in range(4)}
    written = sum(each.nbytes for each in tensors.values())
    try:
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            path = Path(folder) / "sample"
            start = time.perf_counter()
            save_file(tensors, path)
            sync(path)
            sha256(path)
            return written / (time.perf_counter() - start)
    except (OSError, SafetensorError):
        return None


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
