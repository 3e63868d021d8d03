"""The time of one operation: the slower of computing and moving bytes, and what calling it costs; MFU and HFU.

On a calibrated machine the rates are those of measured kernels of the same kind and about the same size; on a device of
the catalog they are shares of its data sheet by shape (`forecast.predict.kernel`). Of a device whose efficiency is not
known only the peaks are, and the time is a bound that no run can beat.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from trainledger.forecast.predict.kernel import Real, attention_seconds, matmul_seconds, unmasked_share
from trainledger.ledger.core.sizes import added, greater, is_zero
from trainledger.ledger.entry import Entry, Int
from trainledger.ledger.ledger import Ledger
from trainledger.spec.calibration import factor_of
from trainledger.spec.device import Device
from trainledger.spec.frozen import frozen
from trainledger.spec.recipe import Recipe
from trainledger.spec.units import round_up

if TYPE_CHECKING:
    from trainledger.spec.calibration import Calibration, KernelTime

Machine: TypeAlias = "Device | Calibration"
COMPUTE_KINDS = ("matmul", "attention")
GROUPED, TOKEN_ROWS = ("grouped_mm", "_scaled_grouped_mm"), 16
ACTIVATIONS = ("gelu", "silu", "gelu_backward", "silu_backward")  # on a CPU these compute longer than they move

# Data sheets state one rate for both 8-bit formats, and one for 4 bits in blocks.
SHEET_NAMES = {"e4m3": "fp8", "e5m2": "fp8", "mxfp8": "fp8", "e2m1": "fp4", "mxfp4": "fp4", "nvfp4": "fp4"}


class NoRate(ValueError):  # noqa: N818
    """A rate that is not known; its text is the sentence to print instead of a number."""


class EntryTime(NamedTuple):
    """Predicted seconds of an entry over the step, and what bounds them: compute, memory or overhead.

    ``ideal_seconds`` are its FLOPs over the peak of its dtype (0 but for matmuls and attention), ``overhead_seconds``
    the part of ``seconds`` that neither computes nor moves bytes. ``launch_seconds`` is what the program needs to
    launch it on an accelerator: time of the host, not in ``seconds``.
    """

    entry: Entry
    seconds: Real
    bound: str
    ideal_seconds: Real = 0.0
    overhead_seconds: Real = 0.0
    launch_seconds: Real = 0.0

    def repeated(self, entry: Entry, times: Int) -> EntryTime:
        """The time of an entry that runs so many times as this one."""
        return EntryTime(
            entry,
            self.seconds * times,
            self.bound,
            self.ideal_seconds * times,
            self.overhead_seconds * times,
            self.launch_seconds * times,
        )


def launched_as(recipe: Recipe, machine: Machine) -> Machine:
    """A machine as a recipe launches its kernels: replayed as CUDA graphs they wait for no launch.

    A graph is launched once for each micro-batch, in microseconds, which is left out.
    """
    if not recipe.cuda_graphs or not isinstance(machine, Device) or machine.efficiency is None:
        return machine
    return replace(machine, efficiency=replace(machine.efficiency, launch_seconds=0.0))


class Roofline:
    """Times entries on one machine: a device of the catalog, or a calibration.

    max(FLOPs / rate, bytes / bandwidth) + overhead per operation (Williams et al. 2009, Roofline). An
    accelerator runs behind the program: what that needs to launch operations is kept apart. What a
    compiler makes one kernel of counts as one (`Entry.fused`). ``blocking`` says that the program waits for each
    kernel (`recipe.launch_blocking`): then launching is time of the device too.
    """

    def __init__(self, machine: Machine, *, blocking: bool = False) -> None:
        self.machine = machine
        self.blocking = blocking
        self._on_cpu = not isinstance(machine, Device) and machine.backend == "cpu"
        self._kernels: dict[tuple[str, str, str], list[KernelTime]] = {}
        self._factors = {} if isinstance(machine, Device) else machine.factors
        if not isinstance(machine, Device):
            for each in sorted(machine.kernels, key=lambda kernel: kernel.nbytes):
                named = each.phase if each.kind in COMPUTE_KINDS else each.operation
                self._kernels.setdefault((each.kind, each.dtype, named), []).append(each)

    def time(self, entry: Entry) -> EntryTime:
        """Predicted time of an entry, as often as it runs in a step; raises NoRate where a rate is unknown."""
        return self.once(entry).repeated(entry, entry.times)

    def once(self, entry: Entry) -> EntryTime:
        """Predicted time of one run of an entry; raises NoRate where a rate is unknown."""
        time = _on_device(entry, self.machine) if isinstance(self.machine, Device) else self._measured(entry)
        if not self.blocking:
            return time
        # The program launches nothing meanwhile.
        seconds, overhead = time.seconds + time.launch_seconds, time.overhead_seconds + time.launch_seconds
        return time._replace(seconds=seconds, overhead_seconds=overhead, launch_seconds=0.0)

    def _measured(self, entry: Entry) -> EntryTime:
        """One run of an entry on a calibrated machine."""
        machine = self.machine
        assert not isinstance(machine, Device)
        kernels = entry.fused[2] if entry.fused else 1
        overhead = 0.0 if entry.kind == "allocate" else kernels * machine.operation_seconds
        compute, memory = self._compute(entry), self._memory(entry)
        bound = _bound(compute, memory, overhead)
        ideal = entry.flops / peak_rate(machine, entry.dtype) if compute else 0.0
        factor = factor_of(self._factors, entry.phase, entry.kind)
        compute, memory, overhead = factor * compute, factor * memory, factor * overhead
        if self._on_cpu:
            return EntryTime(entry, max(compute, memory) + overhead, bound, ideal, overhead)
        # An accelerator works while the program launches what comes next.
        return EntryTime(entry, max(compute, memory), bound, ideal, 0.0, overhead)

    def _compute(self, entry: Entry) -> float:
        if entry.kind not in COMPUTE_KINDS or not entry.flops:
            return 0.0
        phase = "backward" if entry.phase == "backward" else ""
        kernels = self._kernels.get((entry.kind, entry.dtype, phase))
        if kernels is None and entry.kind == "matmul":  # a quick calibration has none of backward
            kernels = self._kernels.get((entry.kind, entry.dtype, ""))
        if not kernels:
            dtype = entry.dtype or "an unnamed dtype"
            measured = ", ".join(sorted({known for kind, known, _ in self._kernels if kind == entry.kind}))
            only = f", only in {measured}" if measured and dtype not in measured.split(", ") else ""
            what = f"{phase} {entry.kind}" if phase else entry.kind
            raise NoRate(f"no {what} in {dtype} was measured on {self.machine.title}{only}")
        if entry.kind == "attention" and entry.shape:
            heads, _, keys, width, *_ = entry.shape
            # A few heads do not fill an accelerator; a CPU works on few at a time.
            return float(entry.flops / _attention_rate(kernels, None if self._on_cpu else heads, keys, width))
        return float(entry.flops / _compute_rate(kernels, entry.flops, entry.read + entry.written))

    def _memory(self, entry: Entry) -> float:
        """At its operator's own rate, else at that of its kind; matmuls, and kinds not measured, at that of a copy."""
        # In a compiled kernel it moves fewer bytes, and what it computes takes no less.
        nbytes = entry.read + entry.written
        own, kind = self._rates(entry, entry.name), self._rates(entry, "")
        if not entry.fused:
            return _move(own or kind, nbytes)
        read, written, _ = entry.fused
        computes = _move(own, nbytes) - _move(kind, nbytes) if own and entry.name in ACTIVATIONS else 0.0
        return _move(kind, read + written) + max(0.0, computes)

    def _rates(self, entry: Entry, operation: str) -> list[KernelTime]:
        """Kernels of an operator in the entry's format, or in fp32; of no operator those of the kind."""
        kinds = ("copy",) if entry.kind in COMPUTE_KINDS else (entry.kind,) if operation else (entry.kind, "copy")
        for kind in kinds:
            for dtype in (entry.dtype, "fp32"):
                kernel_times = self._kernels.get((kind, dtype, operation))
                if kernel_times:
                    return kernel_times
        return []


def peak_rate(machine: Machine, dtype: str) -> float:
    """FLOP/s of the best matmul in ``dtype``; raises NoRate where the device has none on record."""
    peaks = machine.peak_flops_per_second
    rate = peaks.get(dtype, peaks.get(SHEET_NAMES.get(dtype, dtype)))
    if rate is None:
        known = ", ".join(sorted(machine.peak_flops_per_second)) or "nothing"
        other = "; trainers take fp16 there: recipe.precision = fp16-mixed" * (dtype == "bf16" and "fp16" in peaks)
        raise NoRate(f"{machine.title} has no peak for {dtype or 'an unnamed dtype'} on record (it has {known}){other}")
    return rate


def _on_device(entry: Entry, device: Device) -> EntryTime:
    """One run on a device of the catalog: as its efficiency says, or a bound from its data sheet."""
    moved, kernels = entry.read + entry.written, 1
    if entry.fused:
        read, written, kernels = entry.fused
        moved = read + written
    if device.memory_bytes_per_second is None:
        raise NoRate(f"{device.title} has no memory bandwidth on record")
    efficiency = device.efficiency
    computes = entry.kind in COMPUTE_KINDS and not is_zero(entry.flops)
    peak = peak_rate(device, entry.dtype) if computes else 1.0
    ideal = entry.flops / peak if computes else 0.0
    if efficiency is None:
        memory = moved / device.memory_bytes_per_second
        if computes and entry.kind == "attention" and entry.shape:
            _, queries, keys, _, _, causal = entry.shape
            ideal = ideal * unmasked_share(queries, keys, causal)
        return EntryTime(entry, greater(ideal, memory), _bound(ideal, memory, 0.0), ideal)
    if entry.kind == "allocate":
        return EntryTime(entry, 0.0, "overhead")
    compute = 0.0
    if computes and not entry.shape:
        compute = ideal / efficiency.matmul_share
    elif computes and entry.kind == "attention":
        compute = attention_seconds(
            entry.name, entry.dtype, entry.shape, entry.flops, peak, efficiency, device.multiprocessors,
            device.compute_capability, device.matrix_unit,
        )  # fmt: skip
    elif computes:
        compute = matmul_seconds(_padded(entry), entry.dtype, peak, efficiency, device.multiprocessors)
    memory = moved / (device.memory_bytes_per_second * efficiency.bandwidth_share)
    least = kernels * efficiency.kernel_seconds
    return EntryTime(
        entry,
        greater(compute, memory) + least,
        _bound(compute, memory, least),
        ideal,
        least,
        kernels * efficiency.launch_seconds,
    )


def _padded(entry: Entry) -> tuple[Int, ...]:
    """The shape of a matmul as its kernel computes it: tokens that are no multiple of `TOKEN_ROWS` fill it up."""
    # A router gives each expert any number of rows, and grouped matmuls need multiples (torchtitan's experts pad them
    # to TOKEN_GROUP_ALIGN_SIZE_M: 8, of 8-bit matmuls 16). In forward the rows are tokens, and no row lies across them,
    # so that however many they are the kernel is the same: it leaves the rest of its last tile empty.
    batch, m, n, k = entry.shape
    if entry.name in GROUPED:
        return batch, m, n, round_up(k, TOKEN_ROWS)
    if entry.phase in ("forward", "recompute"):
        return batch, round_up(m, TOKEN_ROWS), n, k
    return entry.shape


def _bound(compute: Real, memory: Real, overhead: Real) -> str:
    """What an operation spends most on; of arrays, what the first elements do."""
    parts = {"compute": compute, "memory": memory, "overhead": overhead}
    first = {name: float(part.flat[0]) if hasattr(part, "flat") else part for name, part in parts.items()}
    return max(first, key=lambda each: first[each])


def _compute_rate(kernels: Sequence[KernelTime], flops: int, nbytes: int) -> float:
    """FLOP/s at a size and an intensity."""
    # Small matmuls and thin ones (few FLOPs per byte) each have their own efficiency; the logarithms of FLOPs and of
    # FLOPs per byte place an entry among the measured shapes.
    return _rate_near(
        (
            math.log(flops / kernel.flops) ** 2
            + (math.log(flops / max(nbytes, 1)) - math.log(kernel.flops / kernel.nbytes)) ** 2,
            kernel,
        )
        for kernel in kernels
    )


def _attention_rate(kernels: Sequence[KernelTime], heads: int | None, keys: int, width: int) -> float:
    """FLOP/s of attention over so many keys with heads so wide, and with so many of them where that counts."""
    return _rate_near(
        (math.log((heads or many) / many) ** 2 + math.log(keys / length) ** 2 + 4 * math.log(width / head) ** 2, each)
        for each, (many, length, head) in ((kernel, kernel.shape) for kernel in kernels)
    )


def _rate_near(measured: Iterable[tuple[float, KernelTime]]) -> float:
    """The geometric mean of the rates of measured kernels, weighted by 1 / distance^2."""
    weights, logs = 0.0, 0.0
    for apart, kernel_time in measured:
        weight = 1.0 / (apart + 1e-6)
        weights += weight
        logs += weight * math.log(kernel_time.flops_per_second)
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
    split = added(
        (dtype, share * flops)
        for ledger, share in shares
        for dtype, flops in ledger.filter(lambda entry: entry.kind in COMPUTE_KINDS).by("dtype").items()
    )
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
    for time in times:
        dtype = time.entry.dtype if time.entry.kind in COMPUTE_KINDS else ""
        groups.setdefault((time.entry.kind, dtype), []).append(time)
    total = sum(time.seconds for time in times)
    rows = (
        _row(kind, dtype, group, machine, total)
        for (kind, dtype), group in groups.items()
        if any(each.seconds for each in group)
    )
    return tuple(sorted(rows, key=lambda row: -row.seconds))


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
    by_bound = added((each.bound, each.seconds) for each in group)
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


def ideal_seconds(ledger: Ledger, machine: Machine, dtype: str) -> Real:
    """Model FLOPs over the peak of a dtype, that of most matmuls of a step; raises NoRate."""
    flops = ledger.model_flops
    return 0.0 if is_zero(flops) else flops / peak_rate(machine, dtype)
