"""The time of one kernel on a device whose efficiency is known, from its shape.

The result of a matmul is cut into tiles that the multiprocessors work on at once, as many in each wave as there are
multiprocessors; a wave takes as long as a whole tile does, however little of it is filled (NVIDIA, Matrix
Multiplication Background User's Guide, tile and wave quantization). What the seconds come to for a large matmul, and
how long a tile takes to start and to end, are constants of `spec.device.Efficiency`.

Sizes may be ints or arrays; arrays give arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainledger.ledger.core.sizes import greater, smaller
from trainledger.ledger.entry import Int
from trainledger.spec.device import Efficiency
from trainledger.spec.frozen import frozen
from trainledger.spec.units import ceil_div, round_up

Real = Any  # float for one run, an array for many at once

# Rows and columns of a tile, and what share of the rate of the largest a kernel with such tiles has. That smaller
# tiles are slower is said in the guide above; the shares are assumed (each element that is loaded is used by fewer
# multiplications: 64 x 64 loads 2.7 times as much for each as 256 x 128 does).
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (64, 64, 0.6))
SPLITS = (1, 2, 4, 8, 16)  # of the inner length over multiprocessors, where the result has too few tiles for all
# Rows that do not begin at multiples of this take other kernels. Assumed: as on A100 where their number is odd
# (`Efficiency.odd_share`), which devices since then feel more.
ALIGNED_NBYTES = 16
UNALIGNED = 0.6
# Batched matmuls run without matrix units then: fp32's rate, about a sixteenth (BigScience's chronicles of 2022:
# heads 108 wide make a step of 182B on A100 a third longer than heads 144 or 216 wide, with a fortieth of its FLOPs).
UNALIGNED_BATCH = 0.0625
EIGHT_BITS = ("e4m3", "e5m2", "mxfp8", "nvfp4")  # of 4 bits no share of the peak is measured: as of 8

# Softmax runs on other units than the matmuls that it overlaps: narrow heads have fewer FLOPs for each exponential.
# Chosen so that heads of 64 have 0.86 of the rate of heads of 128 (Dao 2023, FlashAttention-2, figures 4 and 5).
SOFTMAX_WIDTH = 24
FULL_WIDTH = 128
ATTENTION_BLOCK = 128  # queries and keys of a block in FlashAttention-2
# Other kernels against FlashAttention-2: PyTorch's memory-efficient one (Dao 2023, figures 4 to 6: xformers about half)
# and cuDNN's, which uses what Hopper has (Shah et al. 2024, FlashAttention-3, figures 5 and 6: about 1.5 times).
EFFICIENT_ATTENTION = 0.5
CUDNN_ON_HOPPER = 1.5
HOPPER = 9.0  # compute capability
# On B200 FlashAttention-2, written for older devices, runs at 374 TFLOP/s (egmsft/AI-benchmarking-guide, ND GB200 v6),
# cuDNN's at about 1240 (Zadouri et al. 2026, FlashAttention-4: 1613 are 1.3 times as fast). GeForces lack its units.
CUDNN_ON_BLACKWELL = 3.3
BLACKWELL, BLACKWELL_GEFORCE = 10.0, 12.0  # compute capabilities
# fp32 has no matrix units: matmuls reach 0.77 to 0.79 of its peak on an H200, memory-efficient attention 0.47 to 0.66
# in forward and 0.48 to 0.54 in backward, whatever the length (our measurement of 2026-11-27). Matmuls of other GPUs
# reach 0.66 (RTX 4090) to 0.98 (A100) (zzc0721/torch-performance-test-data, the best square matmul).
FP32_SHARE, FP32_ATTENTION_SHARE = 0.78, 0.5


@frozen
class Tiling:
    """How a matmul is cut: tiles of ``rows`` x ``columns`` of the result, the inner length into ``split`` parts.

    ``tiles`` are those of the whole result, all of them computed, in ``waves`` of ``workers`` multiprocessors (1 where
    their number is not known). Shares of the time at the full rate: ``filled`` of the computed elements are in the
    result, ``busy`` of the multiprocessors work in a mean wave, ``speed`` is that of the tile's kernel, ``aligned`` of
    rows that begin at multiples of `ALIGNED_NBYTES`, ``inside`` of a tile lies between its start and its end. ``rate``
    of the peak is what a large matmul reaches. Their product is the share of the peak.
    """

    rows: int
    columns: int
    split: int
    tiles: int
    waves: int
    workers: int
    rate: float
    aligned: float
    speed: float
    filled: float
    busy: float
    inside: float


def matmul_seconds(
    shape: tuple[Int, ...], dtype: str, peak: float, efficiency: Efficiency, multiprocessors: int | None
) -> Real:
    """Seconds of ``batch`` matmuls [m, k] @ [k, n] with shape (batch, m, n, k), its bytes left out.

    The fastest of `TILES` and `SPLITS` counts, as libraries choose it. Where the number of multiprocessors is not
    known, all waves are full.
    """
    best: Real = None
    for seconds, *_ in _ways(shape, dtype, peak, efficiency, multiprocessors or 1):
        best = seconds if best is None else smaller(best, seconds)
    return best


def tiling(
    shape: tuple[int, ...], dtype: str, peak: float, efficiency: Efficiency, multiprocessors: int | None
) -> Tiling:
    """The tiles and waves of the fastest way, which takes the seconds of `matmul_seconds`."""
    workers = multiprocessors or 1
    ways = _ways(shape, dtype, peak, efficiency, workers)
    _, rows, columns, speed, split, tiles, waves = min(ways, key=lambda way: float(way[0]))
    batch, m, n, k = shape
    return Tiling(
        rows, columns, split, tiles, waves, workers, rate=_share(dtype, efficiency),
        aligned=_alignment(shape, dtype, efficiency), speed=speed, filled=batch * m * n / (tiles * rows * columns),
        busy=tiles * split / (waves * workers), inside=k / (k + split * efficiency.depth),
    )  # fmt: skip


def _share(dtype: str, efficiency: Efficiency) -> float:
    if dtype == "fp32":
        return FP32_SHARE
    return efficiency.float8_share if dtype in EIGHT_BITS else efficiency.matmul_share


def _ways(
    shape: tuple[Int, ...], dtype: str, peak: float, efficiency: Efficiency, workers: int
) -> Iterator[tuple[Any, ...]]:
    """Seconds, rows, columns, speed, split, tiles and waves of each way to cut a matmul."""
    batch, m, n, k = shape
    rate = peak * _share(dtype, efficiency) * _alignment(shape, dtype, efficiency)
    for rows, columns, speed in TILES:
        tiles = batch * ceil_div(m, rows) * ceil_div(n, columns)
        tile_seconds = 2 * rows * columns * workers / (rate * speed)
        for split in SPLITS:
            waves = ceil_div(tiles * split, workers)
            yield waves * (k / split + efficiency.depth) * tile_seconds, rows, columns, speed, split, tiles, waves
            if isinstance(tiles, int) and tiles * split >= workers:
                break  # to split further gives no worker anything to do


def _alignment(shape: tuple[Int, ...], dtype: str, efficiency: Efficiency) -> Real:
    """The share of the rate that is left where a dim does not fill whole pieces of memory."""
    # In a single matmul each dim is the inner one of some matrix, in one of its three passes. The rows of a batch,
    # those of an expert or of a head, are never the inner dim; nor are tokens in forward, which `predict.roofline`
    # fills up.
    if dtype not in ("bf16", "fp16", *EIGHT_BITS):
        return 1.0
    elements = int(ALIGNED_NBYTES / {"bf16": 2, "fp16": 2, "nvfp4": 0.5}.get(dtype, 1))  # other formats: a byte
    batch, m, n, k = shape
    inner = n % elements + k % elements
    rest = inner + m % elements
    odd = m % 2 + n % 2 + k % 2
    if hasattr(rest, "shape") or hasattr(batch, "shape"):
        import numpy as np

        single = np.where(rest == 0, 1.0, np.where(odd == 0, UNALIGNED, efficiency.odd_share))
        return np.where(np.asarray(batch) == 1, single, np.where(inner == 0, 1.0, UNALIGNED_BATCH))
    if batch == 1:
        return efficiency.odd_share if odd else UNALIGNED if rest else 1.0
    return UNALIGNED_BATCH if inner else 1.0


def attention_seconds(
    name: str, dtype: str, shape: tuple[Int, ...], flops: Int, peak: float, efficiency: Efficiency,
    multiprocessors: int | None, compute_capability: float | None = None, matrix_unit: int | None = None,
) -> Real:  # fmt: skip
    """Seconds of a fused attention kernel, forward or backward by its name, its bytes left out.

    ``flops`` are dense; a causal kernel leaves out the blocks above the diagonal (`computed_share`). Heads that are
    narrower than a systolic array leave the rest of it idle: two matmuls of 128 take as long on 256 rows and columns as
    one of 256 (AI-Hypercomputer/maxtext, docs/guides/optimization/custom_model.md, e591f30).
    """
    sequences, queries, keys, width, value_width, causal = shape
    backward = "backward" in name
    if dtype == "fp32":
        share: Real = FP32_ATTENTION_SHARE
    else:
        share = efficiency.attention_backward_share if backward else efficiency.attention_share
        if "efficient_attention" in name:
            share = share * EFFICIENT_ATTENTION
        elif "cudnn_attention" in name:
            share = min(1.0, share * _cudnn(compute_capability or 0.0))
        mean_width = (width + value_width) / 2
        narrow = mean_width / (mean_width + SOFTMAX_WIDTH) * (FULL_WIDTH + SOFTMAX_WIDTH) / FULL_WIDTH
        if matrix_unit is not None:
            filled = round_up(width, matrix_unit) + round_up(value_width, matrix_unit)
            share = share * (width + value_width) / filled
        share = share * smaller(1.0, narrow) * keys / (keys + efficiency.attention_length)
    blocks = sequences * ceil_div(keys if backward else queries, ATTENTION_BLOCK)
    idle = greater(1.0, (multiprocessors or 1) / blocks)  # too few blocks leave multiprocessors without work
    return flops * computed_share(queries, keys, causal) * idle / (peak * share)


def _cudnn(compute_capability: float) -> float:
    """The rate of cuDNN's attention over that of FlashAttention-2."""
    if BLACKWELL <= compute_capability < BLACKWELL_GEFORCE:
        return CUDNN_ON_BLACKWELL
    return CUDNN_ON_HOPPER if HOPPER <= compute_capability < BLACKWELL else 1.0


def computed_share(queries: Int, keys: Int, causal: int) -> Real:
    """The share of all pairs of a query and a key in blocks that a kernel computes.

    Causal, each query has half of the keys where keys are as many as queries or more, nearly all within a narrower
    window, and half a block on the diagonal in vain.

    >>> computed_share(4096, 4096, 0), computed_share(4096, 4096, 1), computed_share(128, 128, 1)
    (1.0, 0.515625, 1.0)
    """
    if not causal:
        return 1.0
    longest = greater(queries, keys)
    return smaller(1.0, 1 - keys / (2 * longest) + ATTENTION_BLOCK / (2 * longest))


def unmasked_share(queries: Int, keys: Int, causal: int) -> Real:
    """The share of all pairs of a query and a key that no causal kernel can leave out.

    >>> unmasked_share(4, 4, 0), unmasked_share(4, 4, 1)
    (1.0, 0.625)
    """
    return 1 - (keys - 1) / (2 * greater(queries, keys)) if causal else 1.0
