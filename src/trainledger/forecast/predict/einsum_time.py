"""The time of matmuls alone on a device: the bound of its data sheet, the prediction, and what tiles and waves cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from trainledger.forecast.predict.forecast import Bar, nanoseconds
from trainledger.forecast.predict.kernel import Tiling, tiling
from trainledger.forecast.predict.roofline import NoRate, Roofline, peak_rate
from trainledger.ledger.core.sizes import added
from trainledger.ledger.entry import Entry
from trainledger.ledger.rules import matmul_flops
from trainledger.spec.device import Device
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.frozen import frozen
from trainledger.spec.units import ceil_div

AT_THE_PEAK = "FLOPs at the peak"
DIMS = ("batch", "m", "n", "k")
_ROUNDING = 1e-9  # relative
STEPS, ALIGNED = 96, 8  # sizes of a sweep, each a multiple of the second
Shape = tuple[int, int, int, int]


@frozen
class Matmul:
    """``batch`` matmuls [m, k] @ [k, n] of ``shape`` (batch, m, n, k) in a dtype, with the bytes that they move.

    An operation that is no matmul, such as a sum, has no shape, and no time is predicted for it.
    """

    shape: Shape | None
    dtype: str
    flops: int
    read_nbytes: int
    written_nbytes: int

    @property
    def entry(self) -> Entry:
        """The matmul as the ledger writes one."""
        return Entry(
            name="mm", path="", phase="other", kind="matmul", flops=self.flops, read=self.read_nbytes,
            written=self.written_nbytes, dtype=self.dtype, shape=self.shape or (),
        )  # fmt: skip


@frozen
class EinsumTime:
    """Matmuls one after the other on a device: at least ``compute_seconds`` and at least ``memory_seconds``.

    ``ridge`` is FLOPs for each byte above which they are compute-bound. ``seconds`` are predicted, with
    ``flops_per_second`` reached; None where the device's efficiency is not known, or an operation is no matmul.
    ``tilings`` has the tiles of each matmul, ``bars`` what leads from the FLOPs at the peak to ``seconds``. Where a
    rate is not known, ``note`` says which and all numbers are None.
    """

    device: str
    title: str
    peak_flops_per_second: float | None = None
    memory_bytes_per_second: float | None = None
    ridge: float | None = None
    compute_seconds: float | None = None
    memory_seconds: float | None = None
    bound: str = ""
    seconds: float | None = None
    flops_per_second: float | None = None
    tilings: tuple[Tiling, ...] = ()
    bars: tuple[Bar, ...] = ()
    note: str = ""

    @property
    def bound_seconds(self) -> float | None:
        """The longer of computing and moving, which no run can beat (Williams et al. 2009, Roofline)."""
        if self.compute_seconds is None or self.memory_seconds is None:
            return None
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def peak_share(self) -> float | None:
        """The share of the peak that is predicted to be reached."""
        return self.flops_per_second and self.flops_per_second / (self.peak_flops_per_second or 0)


def einsum_time(matmuls: Sequence[Matmul], device: Device) -> EinsumTime:
    """The time of matmuls of one dtype on a device of the catalog.

    >>> from trainledger import catalog
    >>> found = einsum_time([matmul((1, 4096, 4096, 4096), "bf16")], catalog.device("h100-sxm"))
    >>> found.bound, round(found.compute_seconds * 1e6), found.tilings[0].waves
    ('compute', 139, 4)
    """
    try:
        peak = peak_rate(device, matmuls[0].dtype)
    except NoRate as reason:
        return EinsumTime(device.name, device.title, note=str(reason))
    bandwidth = device.memory_bytes_per_second
    if bandwidth is None:
        note = f"{device.title} has no memory bandwidth on record"
        return EinsumTime(device.name, device.title, peak_flops_per_second=peak, note=note)
    flops = sum(each.flops for each in matmuls)
    compute, memory = flops / peak, sum(each.read_nbytes + each.written_nbytes for each in matmuls) / bandwidth
    seconds, tilings, bars = _predicted(matmuls, device, peak)
    return EinsumTime(
        device=device.name, title=device.title, peak_flops_per_second=peak, memory_bytes_per_second=bandwidth,
        ridge=peak / bandwidth, compute_seconds=compute, memory_seconds=memory,
        bound="memory" if memory > compute else "compute", seconds=seconds,
        flops_per_second=flops / seconds if seconds else None, tilings=tilings, bars=bars,
    )  # fmt: skip


def _predicted(
    matmuls: Sequence[Matmul], device: Device, peak: float
) -> tuple[float | None, tuple[Tiling, ...], tuple[Bar, ...]]:
    """Predicted seconds with the tiles and causes of them; nothing where they are not known."""
    efficiency = device.efficiency
    shapes = [each.shape for each in matmuls if each.shape is not None]
    if efficiency is None or len(shapes) < len(matmuls):
        return None, (), ()
    times = [Roofline(device).time(each.entry).seconds for each in matmuls]
    dtype, workers = matmuls[0].dtype, device.multiprocessors
    tilings = [tiling(shape, dtype, peak, efficiency, workers) for shape in shapes]
    causes = added(
        cause
        for each, cut, seconds in zip(matmuls, tilings, times, strict=True)
        for cause in _causes(each.flops / peak, cut, seconds, efficiency.kernel_seconds)
    )
    return float(sum(times)), tuple(tilings), tuple(Bar(name, nanoseconds(more)) for name, more in causes.items())


def _causes(ideal: float, cut: Tiling, seconds: float, least: float) -> Iterator[tuple[str, float]]:
    """What each cause adds to the seconds at the peak, one after the other; of a memory-bound matmul only its bytes."""
    shares = {
        "the rate of a large matmul": cut.rate,
        "rows that are not aligned": cut.aligned,
        "smaller tiles": cut.speed,
        "tiles that are not full": cut.filled,
        "waves that are not full": cut.busy,
        "start and end of tiles": cut.inside,
    }
    yield AT_THE_PEAK, ideal
    compute, without = ideal / prod(shares.values()), seconds - least
    if without > compute * (1 + _ROUNDING):
        yield "bytes, which take longer to move", without - ideal
    else:
        at = ideal
        for name, share in shares.items():
            yield name, at / share - at
            at /= share
    yield "least time of a kernel", least


def matmul(shape: Shape, dtype: str) -> Matmul:
    """A matmul whose operands are read once and whose result is written once.

    >>> matmul((1, 4096, 4096, 4096), "bf16").flops
    137438953472
    """
    batch, m, n, k = shape
    read, written = nbytes_in(batch * k * (m + n), dtype), nbytes_in(batch * m * n, dtype)
    return Matmul(shape, dtype, matmul_flops(m, n, k, batch), read, written)


def swept(shape: Shape, dim: str, dtype: str, device: Device) -> list[tuple[int, float]]:
    """Predicted FLOP/s of a matmul over the size of its dim m, n or k, up to twice that of ``shape``.

    Sizes are multiples of `ALIGNED`, so that only tiles and waves make steps. Empty where nothing is predicted.
    """
    if device.efficiency is None:
        return []
    at, clock = DIMS.index(dim), Roofline(device)
    step = ceil_div(2 * shape[at], STEPS * ALIGNED) * ALIGNED
    found = []
    try:
        for size in range(step, 2 * shape[at] + 1, step):
            sizes = list(shape)
            sizes[at] = size
            batch, m, n, k = sizes
            one = matmul((batch, m, n, k), dtype)
            found.append((size, one.flops / clock.time(one.entry).seconds))
    except NoRate:
        return []
    return found
