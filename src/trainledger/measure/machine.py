"""A calibration of this machine in half a minute: matmuls by shape and dtype, memory, attention, overhead.

Kernels are timed in rounds (`measure.rounds`). Where no undisturbed block of a kernel is left, its fastest calls count
and the calibration says ``busy``.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from trainledger.durable import sha256, sync
from trainledger.measure.contention import Sample, watched
from trainledger.measure.kernels import fresh_bytes_per_second, kernels, operation_seconds
from trainledger.measure.overhead import StepOverhead, TinySteps
from trainledger.measure.rounds import Timing, time_all
from trainledger.spec.calibration import Calibration, KernelTime
from trainledger.train.device import compute_capability, keep_freed_memory, synchronize
from trainledger.units import MIB

# A dtype this many times slower than fp32 in the same matmul is emulated, and not worth the wait.
ABSURDLY_SLOW = 8.0
_PARTS = (attrgetter("operation"), attrgetter("update"), attrgetter("update_tensor"))

T = TypeVar("T")


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
    if worth_timing(device, torch.bfloat16):
        dtypes.append("bf16")
    else:
        notes.append("bf16 matmuls are emulated on this machine and were left out")
    chosen = kernels(device, dtypes, quick=quick)
    seconds, rounds = (4.0, 3) if quick else (15.0, 5)
    timings = time_all(
        chosen, device, threads, seconds=seconds, rounds=rounds, tell=lambda share, name: tell(0.95 * share, name)
    )

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
