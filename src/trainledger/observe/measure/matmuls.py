"""Matmuls side by side: sizes that suit the machine and sizes that do not, and factors in every layout."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from trainledger.engine.train.device import find_device, keep_freed_memory
from trainledger.observe.measure.hardware import described, memory_nbytes, rounded, worth_timing
from trainledger.observe.measure.kernels import DTYPES, FACTORS, Kernel, cold_pool, large_copy, matmul_kernel
from trainledger.observe.measure.rates import MatmulTimes
from trainledger.observe.measure.rounds import Tell, timed
from trainledger.spec.calibration import STRAIGHT, MatmulTime
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import format_nbytes

Shape = tuple[int, int, int]  # m, n, k

# Each badly shaped size beside the good one: 1001 is odd, 1000 a multiple of 8 and not of 64.
CUBES, LARGE_CUBES = (128, 256, 512, 1000, 1001, 1024, 2048), (4000, 4001, 4096, 8192)
SKINNY: tuple[Shape, ...] = ((2048, 8192, 256), (16, 2048, 2048), (1, 2048, 2048))
BATCHES, LARGE_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048), (4096, 8192, 16384)
WIDTHS, LARGE_WIDTHS = (64, 128, 256, 512, 768, 1000, 1001, 1024, 1536, 2048), (3072, 4096, 4097, 8192)
CPU_WIDTH, LARGE_WIDTH, CPU_ROWS, LARGE_ROWS = 1024, 4096, 1024, 8192
SECONDS_EACH, LEAST_SECONDS, ROUNDS = 0.3, 0.5, 5


def shapes_of(sweep: str | None, *, large: bool) -> tuple[Shape, ...]:
    """The shapes of a sweep: tokens of a batch times a square weight, or widths of that; of none, cubes and thin ones.

    >>> shapes_of("batch", large=False)[:3]
    ((1, 1024, 1024), (2, 1024, 1024), (4, 1024, 1024))
    """
    if sweep == "batch":
        width = LARGE_WIDTH if large else CPU_WIDTH
        return tuple((rows, width, width) for rows in BATCHES + (LARGE_BATCHES if large else ()))
    if sweep == "width":
        rows = LARGE_ROWS if large else CPU_ROWS
        return tuple((rows, width, width) for width in WIDTHS + (LARGE_WIDTHS if large else ()))
    return tuple((cube, cube, cube) for cube in CUBES + (LARGE_CUBES if large else ())) + SKINNY


def measure_matmuls(
    backend: str = "auto",
    *,
    shapes: Sequence[Shape] = (),
    sweep: str | None = None,
    dtypes: Sequence[str] = (),
    seconds_each: float = SECONDS_EACH,
    tell: Tell = lambda share, name: None,
) -> MatmulTimes:
    """Time matmuls of ``shapes`` (or of a sweep) with straight factors, the one nearest 1024 with others as well.

    ``dtypes`` are fp32 and bf16 where none are given, the latter where the machine does not emulate it. Raises
    `InvalidInput` where factors are larger than the memory.
    """
    device = find_device(backend)
    large = device.type != "cpu"
    keep_freed_memory()
    notes = []
    if not dtypes:
        dtypes = [name for name, each in DTYPES.items() if name == "fp32" or worth_timing(device, each)]
        notes += [] if "bf16" in dtypes else ["bf16 matmuls are emulated on this machine and were left out"]
    chosen = list(shapes) or list(shapes_of(sweep, large=large))
    _refuse_beyond(chosen, dtypes, device)
    most = max(max(m * k, n * k) for m, n, k in chosen)
    kernels: list[Kernel] = []
    for dtype in dtypes:
        pool = cold_pool(device, dtype, 2 * most * DTYPES[dtype].itemsize)
        kernels += [matmul_kernel(pool, dtype, shape, STRAIGHT, operation=STRAIGHT) for shape in chosen]
        middle = min(chosen, key=lambda shape: (abs(prod(shape) - 2**30), shape))
        others = (factors for factors in FACTORS if factors != STRAIGHT)
        kernels += [matmul_kernel(pool, dtype, middle, factors, operation=factors) for factors in others]
    copied = large_copy(device)
    seconds = max(LEAST_SECONDS, seconds_each * len(kernels))
    timings, busy = timed([*kernels, copied], device, seconds=seconds, rounds=ROUNDS, tell=tell)
    return MatmulTimes(
        **described(device),
        backend=device.type,
        matmuls=tuple(_time(timing.kernel, *timing.best()) for timing in timings[:-1]),
        memory_bytes_per_second=copied.nbytes / timings[-1].best()[0],
        notes=(*notes, *busy),
    )


def _time(kernel: Kernel, seconds: float, others: float | None) -> MatmulTime:
    return MatmulTime(
        shape=kernel.shape,
        dtype=kernel.dtype,
        factors=kernel.operation,
        flops=kernel.flops,
        nbytes=kernel.nbytes,
        seconds=seconds,
        others=rounded(others),
    )


def _refuse_beyond(shapes: Sequence[Shape], dtypes: Sequence[str], device: torch.device) -> None:
    there = memory_nbytes(device)
    size = max(DTYPES[dtype].itemsize for dtype in dtypes)
    for m, n, k in shapes:
        needed = (2 * max(m * k, n * k) + m * n) * size
        if there is not None and needed > there / 2:
            rule = f"needs {format_nbytes(needed)}, and half of this machine's memory is {format_nbytes(there / 2)}"
            raise InvalidInput([Problem("--shapes", f"{m}x{n}x{k}", rule)])
