"""How well the arithmetic of a device is used: MFU and HFU, and the roofline of a step kind by kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from trainledger.forecast.predict.roofline import COMPUTE_KINDS, EntryTime, Machine, NoRate, peak_rate
from trainledger.ledger.ledger import Ledger
from trainledger.spec.frozen import frozen


def mfu(model_flops: float, seconds: float, peak_flops_per_second: float) -> float:
    """Model FLOPs utilization: the model's own FLOPs of a step over what the peak does in its time.

    Recomputation is left out (Chowdhery et al. 2022, PaLM, appendix B).

    >>> round(mfu(6 * 70e9 * 4e6, 3.317, 1024 * 989e12), 4)
    0.5001
    """
    return model_flops / (seconds * peak_flops_per_second)


def hfu(hardware_flops: float, seconds: float, peak_flops_per_second: float) -> float:
    """Hardware FLOPs utilization: as `mfu`, with recomputation (Korthikanti et al. 2022, section 5)."""
    return hardware_flops / (seconds * peak_flops_per_second)


def matmul_dtype(ledger: Ledger) -> str:
    """The dtype in which most of a step's matmul and attention FLOPs run; empty where there are none."""
    return matmul_dtype_of([(ledger, 1)])


def matmul_dtype_of(shares: Iterable[tuple[Ledger, Any]]) -> str:
    """The same of several ledgers, each with how much it counts."""
    split: dict[str, Any] = {}
    for ledger, share in shares:
        for dtype, flops in ledger.filter(lambda each: each.kind in COMPUTE_KINDS).by("dtype").items():
            split[dtype] = split.get(dtype, 0) + share * flops
    return max(split, key=lambda each: split[each]) if split else ""


def step_peak(ledger: Ledger, machine: Machine) -> float:
    """The peak that a step's MFU is taken against; raises NoRate where the device has none for its dtype."""
    return peak_rate(machine, matmul_dtype(ledger))


@frozen
class RooflineRow:
    """Operations of one kind and format over a step of a device.

    ``intensity`` is FLOPs for each byte read or written. Above the ``ridge`` of their format (its peak over the
    memory's rate) computing takes longer than moving: None where the machine has no peak for it, or where an operation
    does not run on matrix units. ``bound`` is what most of the seconds are bound by, ``share`` their part of all
    seconds here; ``flops_per_second`` and ``bytes_per_second`` are what is reached.
    """

    kind: str
    dtype: str
    flops: int
    nbytes: int
    intensity: float
    ridge: float | None
    bound: str
    seconds: float
    share: float
    flops_per_second: float
    bytes_per_second: float


def roofline_table(times: Sequence[EntryTime], machine: Machine) -> tuple[RooflineRow, ...]:
    """The rows of a step's operations (`StepTime.entries`), the longest first; what takes no time is left out."""
    groups: dict[tuple[str, str], list[EntryTime]] = {}
    for each in times:
        dtype = each.entry.dtype if each.entry.kind in COMPUTE_KINDS else ""
        groups.setdefault((each.entry.kind, dtype), []).append(each)
    total = sum(each.seconds for each in times)
    rows = (
        _row(kind, dtype, group, machine, total)
        for (kind, dtype), group in groups.items()
        if any(each.seconds for each in group)
    )
    return tuple(sorted(rows, key=lambda each: -each.seconds))


def ridge_of(machine: Machine | None, dtype: str) -> float | None:
    """FLOPs for each byte above which matmuls of a dtype are compute-bound; None where a rate is not known."""
    if machine is None:
        return None
    bandwidth = machine.memory_bytes_per_second
    try:
        return peak_rate(machine, dtype) / bandwidth if bandwidth else None
    except NoRate:
        return None


def _row(kind: str, dtype: str, group: list[EntryTime], machine: Machine, total: float) -> RooflineRow:
    seconds = sum(each.seconds for each in group)
    flops = sum(each.entry.flops * each.entry.times for each in group)
    nbytes = sum(moved_nbytes(each) * each.entry.times for each in group)
    by_bound: dict[str, float] = {}
    for each in group:
        by_bound[each.bound] = by_bound.get(each.bound, 0.0) + each.seconds
    return RooflineRow(
        kind=kind, dtype=dtype, flops=flops, nbytes=nbytes, intensity=flops / nbytes if nbytes else 0.0,
        ridge=ridge_of(machine, dtype) if kind in COMPUTE_KINDS else None,
        bound=max(by_bound, key=lambda each: by_bound[each]), seconds=seconds, share=seconds / total,
        flops_per_second=flops / seconds, bytes_per_second=nbytes / seconds,
    )  # fmt: skip


def moved_nbytes(each: EntryTime) -> int:
    """Bytes that one run of an operation reads and writes; in a compiled kernel those outside of it."""
    entry = each.entry
    nbytes: int = sum(entry.fused[:2]) if entry.fused else entry.read + entry.written
    return nbytes
