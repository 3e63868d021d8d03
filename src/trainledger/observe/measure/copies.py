"""Copies of every kind: in memory by layout and size, to and from an accelerator, to and from a disk."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainledger.engine.train.device import find_device, keep_freed_memory, synchronize
from trainledger.observe.measure.hardware import described, watched
from trainledger.observe.measure.kernels import Call, Kernel
from trainledger.observe.measure.rates import CopyTimes
from trainledger.observe.measure.rounds import Tell, timed
from trainledger.spec.calibration import CopyTime
from trainledger.spec.durable import sync
from trainledger.spec.units import MIB, format_percent, format_seconds

# Rows and columns of fp32 matrices: 16 KiB to 64 MiB, on an accelerator 1 GiB.
SIZES, LARGE_SIZES = (64, 256, 1024, 4096), (256, 1024, 4096, 16384)
VIEW, CONTIGUOUS, TRANSPOSED, COLUMNS = "view (x.t())", "copy, contiguous", "copy of x.t()", "copy of x[:,::2]"
PAGEABLE, PINNED, OVERLAPPED = "to device, pageable", "to device, pinned", "to device, pinned, beside matmuls"
BACK_PAGEABLE, BACK_PINNED = "to host, pageable", "to host, pinned"
DEVICE_COPIES = (PAGEABLE, PINNED, OVERLAPPED, BACK_PAGEABLE, BACK_PINNED)
WRITE, READ, READ_AGAIN = "write and sync", "read from disk", "read again, cached"
NO_ACCELERATOR = "no accelerator here"
DEVICE_NBYTES, DISK_NBYTES = 256 * MIB, 64 * MIB
SAMPLES, SECONDS = 5, 3.0


def measure_copies(
    backend: str = "auto",
    *,
    folder: str | None = None,
    disk_nbytes: int = DISK_NBYTES,
    seconds: float = SECONDS,
    tell: Tell = lambda share, name: None,
) -> CopyTimes:
    """Time copies on a device, between it and its host, and to and from the disk of ``folder`` (the temporary one)."""
    device = find_device(backend)
    keep_freed_memory()
    kernels = list(_in_memory(device))
    timings, notes = timed(
        kernels, device, seconds=seconds, rounds=SAMPLES, tell=lambda share, name: tell(0.7 * share, name)
    )
    memory = tuple(
        CopyTime(
            what=timing.kernel.operation,
            nbytes=timing.kernel.nbytes,
            seconds=timing.best()[0],
            note="x".join(map(str, timing.kernel.shape)),
        )
        for timing in timings
    )
    tell(0.7, "host and device")
    on_device = device_copies(device)
    tell(0.85, "disk")
    disk = disk_times(disk_nbytes, folder)
    facts = described(device) | {"backend": device.type, "notes": tuple(notes)}
    return CopyTimes(**facts, memory=memory, device=on_device, disk=disk)


def _in_memory(device: torch.device) -> Iterator[Kernel]:
    """The same tensors over and over: what a cache holds is read from there."""

    for size in SIZES if device.type == "cpu" else LARGE_SIZES:
        for what in (VIEW, CONTIGUOUS, TRANSPOSED, COLUMNS):
            build = partial(_copied, device, size, what)
            nbytes = 0 if what == VIEW else 2 * 4 * size * size  # read and written
            yield Kernel("copy", "fp32", (size, size), 0, nbytes, build, operation=what)


def _copied(device: torch.device, size: int, what: str) -> Call:
    x_NN = torch.rand(size, 2 * size if what == COLUMNS else size, device=device)
    if what == VIEW:
        return x_NN.t
    source = {CONTIGUOUS: x_NN, TRANSPOSED: x_NN.t(), COLUMNS: x_NN[:, ::2]}[what]
    target = torch.empty(size, size, device=device)
    return lambda: target.copy_(source)


# Between a device and its host


def device_copies(device: torch.device, nbytes: int = DEVICE_NBYTES, samples: int = SAMPLES) -> tuple[CopyTime, ...]:
    """Copies between a host and its accelerator, from pageable and from pinned memory, and overlapped."""
    if device.type != "cuda":
        note = "the accelerator shares the host's memory" if device.type == "mps" else NO_ACCELERATOR
        return tuple(CopyTime(what=device_copy, nbytes=nbytes, note=note) for device_copy in DEVICE_COPIES)
    calls = device_copy_calls(device, nbytes, pin=True)
    alone = {what: _median_seconds(call, device, samples) for what, call in calls.items()}
    both, matmuls = _beside_matmuls(device, calls[PINNED], alone[PINNED], samples)
    hidden = (alone[PINNED] + matmuls - both) / alone[PINNED]
    note = f"the matmuls alone take {format_seconds(matmuls)}: {format_percent(max(0.0, hidden))} of the copy is hidden"
    seconds, notes = alone | {OVERLAPPED: both}, {OVERLAPPED: note}
    return tuple(
        CopyTime(what=what, nbytes=nbytes, seconds=seconds[what], note=notes.get(what, "")) for what in DEVICE_COPIES
    )


def device_copy_calls(device: torch.device, nbytes: int, *, pin: bool) -> dict[str, Call]:
    """The copies to and from a device, each as a call; ``pin`` needs an accelerator."""
    pageable = torch.ones(nbytes, dtype=torch.uint8)
    pinned = torch.ones(nbytes, dtype=torch.uint8, pin_memory=pin)
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    return {
        PAGEABLE: lambda: there.copy_(pageable),
        PINNED: lambda: there.copy_(pinned, non_blocking=True),
        BACK_PAGEABLE: lambda: pageable.copy_(there),
        BACK_PINNED: lambda: pinned.copy_(there, non_blocking=True),
    }


def _median_seconds(call: Call, device: torch.device, samples: int) -> float:
    seconds = []
    for _ in range(samples + 1):  # the first one warms up
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _beside_matmuls(device: torch.device, copy: Call, copy_seconds: float, samples: int) -> tuple[float, float]:
    """Seconds of a copy on a stream of its own beside matmuls that take about as long, and of those matmuls alone."""
    x_NN = torch.rand(4096, 4096, dtype=torch.bfloat16, device=device)
    out_NN = torch.empty_like(x_NN)
    one = _median_seconds(lambda: torch.mm(x_NN, x_NN, out=out_NN), device, samples)
    times = max(1, round(copy_seconds / one))
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def matmuls() -> None:
        for _ in range(times):
            torch.mm(x_NN, x_NN, out=out_NN)

    def both() -> None:
        with torch.cuda.stream(stream):
            copy()
        matmuls()

    return _median_seconds(both, device, samples), _median_seconds(matmuls, device, samples)


# To and from a disk


def disk_times(nbytes: int = DISK_NBYTES, folder: str | None = None, samples: int = 3) -> tuple[CopyTime, ...]:
    """A file written and synced, read after the system has dropped it from its cache, and read once more."""
    taken: dict[str, list[tuple[float, bool]]] = {WRITE: [], READ: [], READ_AGAIN: []}
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix="trainledger-disk-") as made:
            path = Path(made) / "sample"
            content = torch.randint(256, (nbytes,), dtype=torch.uint8).numpy().tobytes()
            dropped = True
            for _ in range(samples):
                with watched(1) as sample:
                    path.write_bytes(content)
                    sync(path)
                taken[WRITE].append((sample.seconds, sample.disturbed))
                dropped = _drop_from_cache(path)
                for what in (READ, READ_AGAIN):
                    with watched(1) as sample, open(path, "rb", buffering=0) as file:
                        while file.read(4 * MIB):
                            pass
                    taken[what].append((sample.seconds, sample.disturbed))
    except OSError as error:
        note = f"{folder or tempfile.gettempdir()} cannot be written: {error.strerror}"
        return tuple(CopyTime(what=name, nbytes=nbytes, note=note) for name in taken)
    found = {what: _middle(each) for what, each in taken.items()}
    note = "" if found[READ] > 2 * found[READ_AGAIN] else "hardly slower than from the cache: the disk may have its own"
    note = note if dropped else "this system does not drop a file from its cache when asked"
    return tuple(
        CopyTime(what=what, nbytes=nbytes, seconds=seconds, note=note if what == READ else "")
        for what, seconds in found.items()
    )


def _middle(samples: Sequence[tuple[float, bool]]) -> float:
    """The median of undisturbed samples, or the fastest of all."""
    kept = [seconds for seconds, disturbed in samples if not disturbed]
    return statistics.median(kept) if kept else min(seconds for seconds, _ in samples)


def _drop_from_cache(path: Path) -> bool:
    """Ask the system to drop a file from its page cache; whether it can be asked."""
    with suppress(OSError, AttributeError), open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return True
    return False
