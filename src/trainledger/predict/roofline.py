"""The time of one operation: the slower of computing and moving bytes, and what calling it costs.

On a calibrated machine the rates are those of measured kernels of the same kind and about the same size; of a
data sheet only the peaks are known, and the time is a bound that no run can beat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from trainledger.frozen import frozen
from trainledger.ledger.entry import Entry
from trainledger.spec.cluster import Device

if TYPE_CHECKING:
    from trainledger.spec.calibration import Calibration, KernelTime

Machine: TypeAlias = "Device | Calibration"
COMPUTE_KINDS = ("matmul", "attention")

# Data sheets state one rate for both 8-bit formats, and one for 4 bits in blocks.
SHEET_NAMES = {"e4m3": "fp8", "e5m2": "fp8", "mxfp8": "fp8", "e2m1": "fp4", "mxfp4": "fp4", "nvfp4": "fp4"}


class NoRate(ValueError):  # noqa: N818
    """A rate that is not known; its text is the sentence to print instead of a number."""


@frozen
class EntryTime:
    """Predicted seconds of an entry over the step, and what bounds them: compute, memory or overhead."""

    entry: Entry
    seconds: float
    bound: str


class Roofline:
    """Times entries on one machine: a device of the catalog, or a calibration.

    max(FLOPs / rate, bytes / bandwidth) + overhead per operation (Williams et al. 2009, Roofline). An
    accelerator runs behind the program, so there the overhead counts only where it is the longest of the three.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._kernels: dict[tuple[str, str, bool], list[KernelTime]] = {}
        if not isinstance(machine, Device):
            for each in sorted(machine.kernels, key=lambda each: each.nbytes):
                dtype = each.dtype if each.kind in COMPUTE_KINDS else ""
                self._kernels.setdefault((each.kind, dtype, each.phase == "backward"), []).append(each)

    def time(self, entry: Entry) -> EntryTime:
        """Predicted time of an entry, as often as it runs in a step; raises NoRate where a rate is unknown."""
        if isinstance(self.machine, Device):
            parts = {"compute": _sheet_compute(entry, self.machine), "memory": _sheet_memory(entry, self.machine)}
            seconds = max(parts.values())
        else:
            overhead = 0.0 if entry.kind == "allocate" else self.machine.operation_seconds
            parts = {"compute": self._compute(entry), "memory": self._memory(entry), "overhead": overhead}
            slower = max(parts["compute"], parts["memory"])
            seconds = slower + overhead if self.machine.backend == "cpu" else max(slower, overhead)
        return EntryTime(entry, seconds * entry.times, max(parts, key=lambda each: parts[each]))

    def _compute(self, entry: Entry) -> float:
        if entry.kind not in COMPUTE_KINDS or not entry.flops:
            return 0.0
        backward = entry.kind == "attention" and entry.phase == "backward"
        kernels = self._kernels.get((entry.kind, entry.dtype, backward))
        if not kernels:
            dtype = entry.dtype or "an unnamed dtype"
            raise NoRate(f"no {entry.kind} in {dtype} was measured on {self.machine.title}")
        return float(entry.flops / _compute_rate(kernels, entry.flops, entry.read + entry.written))

    def _memory(self, entry: Entry) -> float:
        """At the rate of its own kind; a matmul's bytes, and any kind that was not measured, at that of a copy."""
        copies = self._kernels.get(("copy", "", False), [])
        own = copies if entry.kind in COMPUTE_KINDS else self._kernels.get((entry.kind, "", False), copies)
        return _move(own, entry.read + entry.written)


def peak_rate(machine: Machine, dtype: str) -> float:
    """FLOP/s of the best matmul in ``dtype``; raises NoRate where the device has none on record."""
    peaks = machine.peak_flops_per_second
    rate = peaks.get(dtype, peaks.get(SHEET_NAMES.get(dtype, dtype)))
    if rate is None:
        known = ", ".join(sorted(machine.peak_flops_per_second)) or "nothing"
        raise NoRate(f"{machine.title} has no peak for {dtype or 'an unnamed dtype'} on record (it has {known})")
    return rate


def _sheet_compute(entry: Entry, device: Device) -> float:
    if entry.kind not in COMPUTE_KINDS or not entry.flops:
        return 0.0
    return float(entry.flops / peak_rate(device, entry.dtype))


def _sheet_memory(entry: Entry, device: Device) -> float:
    if device.memory_bytes_per_second is None:
        raise NoRate(f"{device.title} has no memory bandwidth on record")
    return float((entry.read + entry.written) / device.memory_bytes_per_second)


def _compute_rate(kernels: Sequence[KernelTime], flops: int, nbytes: int) -> float:
    """FLOP/s at a size and an intensity: measured kernels near in both count most.

    Small products and thin ones (few FLOPs per byte) each have their own efficiency; the logarithms of
    FLOPs and of FLOPs per byte place an entry among the measured shapes, weighted by 1 / distance^2.
    """
    weights, logs = 0.0, 0.0
    for each in kernels:
        apart = math.log(flops / each.flops) ** 2
        apart += (math.log(flops / max(nbytes, 1)) - math.log(each.flops / each.nbytes)) ** 2
        weight = 1.0 / (apart + 1e-6)
        weights += weight
        logs += weight * math.log(each.flops_per_second)
    return math.exp(logs / weights)


def _move(kernels: Sequence[KernelTime], nbytes: int) -> float:
    """Seconds to move bytes, at the measured rate for that many (caches make small ones faster)."""
    if not nbytes or not kernels:
        return 0.0
    rate = kernels[0].bytes_per_second
    for low, high in pairwise(kernels):
        if nbytes > low.nbytes:
            share = min(1.0, math.log(nbytes / low.nbytes) / math.log(high.nbytes / low.nbytes))
            rate = math.exp((1 - share) * math.log(low.bytes_per_second) + share * math.log(high.bytes_per_second))
    return nbytes / rate
