"""The time of one optimizer step on one device, from its ledger: of a run, and of a traced step of other code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field, replace

from trainledger.forecast.predict.device_memory import DeviceMemory, device_memory
from trainledger.forecast.predict.forecast import IDEAL, Bar, Bottleneck, bottleneck, nanoseconds, short_of_memory
from trainledger.forecast.predict.kernel import Real
from trainledger.forecast.predict.roofline import (
    COMPUTE_KINDS,
    EntryTime,
    Machine,
    NoRate,
    Roofline,
    hfu,
    ideal_seconds,
    matmul_dtype,
    mfu,
    peak_rate,
)
from trainledger.ledger.core.sizes import added, greater, is_zero
from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.report.document import Answer
from trainledger.spec.calibration import factor_of
from trainledger.spec.device import Device
from trainledger.spec.frozen import frozen
from trainledger.spec.run import Run
from trainledger.spec.units import counted, format_nbytes, format_percent, format_seconds

Seconds = dict[str, Real]

# What the seconds of a step go to; `StepTime.causes` has these keys.
_OF_DEVICE = ("ideal", "recomputation", "kernel efficiency", "memory-bound operations", "launch overhead")
CAUSES = (*_OF_DEVICE, "exposed communication", "pipeline bubble", "stragglers")
HOST_UPDATE = "update on the host"  # of an offloaded optimizer alone


@frozen
class StepTime:
    """Predicted seconds of a step, split by phase, by kind and by what bounds each operation.

    ``seconds`` is None where a rate is unknown, and ``notes`` says which. ``basis`` is ``bound`` for peaks of
    a data sheet (no run is faster) and ``assumed`` for a roofline on measured rates. ``causes`` (CAUSES) sum to the
    seconds: ``ideal`` is model FLOPs (dense convention) over the peak of the matmuls' dtype. ``messages`` are
    the collectives of the ranks that compute longest, whether or not anything overlaps them.
    """

    seconds: Real | None
    by_phase: Seconds
    by_kind: Seconds
    by_bound: Seconds
    basis: str
    notes: tuple[str, ...] = ()
    entries: tuple[EntryTime, ...] = ()
    causes: Seconds = field(default_factory=dict)
    messages: tuple[EntryTime, ...] = ()

    def __repr__(self) -> str:
        time = format_seconds(self.seconds) if isinstance(self.seconds, float) else str(self.seconds)
        return f"StepTime({time}, {self.basis}, {len(self.entries)} operations)"


def step_time(
    ledger: Ledger, machine: Machine, *, tensors: int = 0, blocking: bool = False, update_rate: float | None = None
) -> StepTime:
    """Predicted time of one optimizer step: operations one after another, nothing overlapped.

    Works on a device of the catalog, which gives a bound where its efficiency is not known, and on a calibration.
    ``tensors`` are those that the optimizer updates: it looks at each of them before its kernels run. ``blocking``
    says that the program waits for each kernel (`recipe.launch_blocking`), ``update_rate`` is that of `host_seconds`.
    """
    basis, notes = basis_of(machine)
    if any(entry.fused for entry in ledger):
        notes.append("assuming that a compiled block runs everything between two matmuls in one kernel")
    try:
        times = entry_times(ledger, machine, blocking=blocking, update_rate=update_rate)
        ideal = ideal_seconds(ledger, machine, matmul_dtype(ledger))
    except NoRate as reason:
        return StepTime(None, {}, {}, {}, basis, (f"no step time: {reason}",))
    if blocking:
        notes += launched_one_by_one(machine)
    untimed = len(ledger) - len(times)
    times += _optimizer_call(times, machine, tensors, blocking=blocking)
    times += waiting(times)
    if untimed:
        notes.append(f"{untimed} transfers, collectives and operations of the host are not timed: no link was measured")
    if ledger.uncounted:
        names = ", ".join(name for name, _ in ledger.uncounted)
        notes.append(f"FLOPs of operations without a rule are not included: {names}")
    return StepTime(
        seconds=sum(time.seconds for time in times),
        by_phase=added((time.entry.phase, time.seconds) for time in times),
        by_kind=added((time.entry.kind, time.seconds) for time in times),
        by_bound=added((time.bound, time.seconds) for time in times),
        basis=basis,
        notes=tuple(notes),
        entries=times,
        causes=causes_of(times, ideal),
    )


def step_of_one(run: Run, ledger: Ledger, machine: Machine, *, tensors: int) -> StepTime:
    """The time of a run's step on one device."""
    rate = update_rate_of(machine, 1, run.cluster.host_update_bytes_per_second)
    return step_time(ledger, machine, tensors=tensors, blocking=run.recipe.launch_blocking, update_rate=rate)


def basis_of(machine: Machine) -> tuple[str, list[str]]:
    """What times on a machine rest on, and the sentences that say it."""
    if not isinstance(machine, Device):
        rates = f"roofline on the rates measured on {machine.date}"
        if machine.fits:
            fit = machine.fits[-1]
            rates += f", fitted to {counted(len(fit.runs), 'run')} on {fit.date}"
        return "assumed", [rates, *machine.notes]
    if machine.efficiency is None:
        return "bound", [f"peaks of {machine.title}'s data sheet: no run is faster, most are slower"]
    shares = f"rates are fitted shares of {machine.title}'s data sheet (catalog, {machine.efficiency.date})"
    if machine.clock != 1.0:
        clock = format_percent(machine.clock)
        shares += f", at {clock} of its clock under a limit of {machine.power_watts:g} W (assumed)"
    return "assumed", [shares]


def launched_one_by_one(machine: Machine) -> list[str]:
    """What `recipe.launch_blocking` changes, where it changes anything: a CPU has nothing to launch ahead."""
    if not isinstance(machine, Device) and machine.backend == "cpu":
        return []
    return [
        "the program waits for each kernel (recipe.launch_blocking): launch time is added to kernel time, and only "
        "sends between stages and round a ring overlap compute"
    ]


def entry_times(
    ledger: Ledger, machine: Machine, *, blocking: bool = False, update_rate: float | None = None
) -> tuple[EntryTime, ...]:
    """The times of what runs on the device itself, in order, and of what goes to its host; raises NoRate."""
    roofline = Roofline(machine, blocking=blocking)
    found = []
    for entry in ledger:
        if entry.kind in ("transfer", "host"):
            seconds = host_seconds(entry, machine, update_rate)
            if seconds is not None:
                found.append(EntryTime(entry, seconds * entry.times, entry.kind))
        elif entry.kind != "collective" and is_zero(entry.payload):
            found.append(roofline.time(entry))
    return tuple(found)


# Of a host's memory bandwidth what an update reaches: assumed, between 40 GB/s (deepspeedai/DeepSpeed#735: 11.6B
# parameters in 8.2 s, 28 bytes of each), about 50 GB/s (#7474: 3.1B, 128 cores) and 109 GB/s of 256
# (Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840, table 4: 10B in 2.57 s, quoted from memory).
HOST_UPDATE_SHARE = 0.25


def host_seconds(entry: Entry, machine: Machine, update_rate: float | None = None) -> Real | None:
    """Seconds of a transfer between device and host, or of what the host's processor computes; None where the rate is
    not known. ``update_rate`` is that of a process, in bytes that are read and written per second.
    """
    if entry.kind == "host":
        rate = update_rate or update_rate_of(machine, 1)
        return None if rate is None else (entry.read + entry.written) / rate
    if not isinstance(machine, Device):
        rate = machine.host_bytes_per_second
        return None if rate is None else entry.read / rate
    if machine.fabric is None or machine.fabric.host is None:
        return None
    host = machine.fabric.host
    return entry.read / (host.bytes_per_second if machine.efficiency is None else host.reached)


def update_rate_of(machine: Machine, processes: int, given: float | None = None) -> float | None:
    """Bytes per second of an update on a host, of each of the processes of a node, of which there are so many."""
    host = machine.fabric.host if isinstance(machine, Device) and machine.fabric is not None else None
    if given is None and host is not None and host.memory_bytes_per_second is not None:
        given = host.memory_bytes_per_second * HOST_UPDATE_SHARE
    per_node = 1 if not isinstance(machine, Device) or machine.fabric is None else machine.fabric.devices_per_node
    return None if given is None else given / min(processes, per_node)


def waiting(times: Sequence[EntryTime]) -> tuple[EntryTime, ...]:
    """The time that an accelerator waits for the program, as a separate entry; none where it does not.

    The program runs ahead of the device and waits for it once a step, so a step takes the longer of all launches and
    all kernels.
    """
    launches = sum(time.launch_seconds for time in times)
    seconds = greater(0.0, launches - sum(time.seconds for time in times))
    if isinstance(seconds, float | int) and not seconds:
        return ()
    entry = Entry("waiting for the program", "", "other", "unknown", basis="assumed")
    return (EntryTime(entry, seconds, "overhead", 0.0, seconds),)


def causes_of(times: Iterable[EntryTime], ideal: Real) -> Seconds:
    """What the seconds of operations go to, by CAUSES; ``ideal`` is `ideal_seconds` of their ledger.

    All that runs in the recompute phase is recomputation, and transfers to the host are communication. What matmuls
    and attention take beyond the ideal is kernel efficiency: below zero where a causal kernel leaves out more of the
    dense FLOPs than it loses.
    """
    causes: Seconds = dict.fromkeys(CAUSES, 0.0)
    for time in times:
        causes["launch overhead"] += time.overhead_seconds
        rest = time.seconds - time.overhead_seconds
        if time.entry.phase == "recompute":
            causes["recomputation"] += rest
        elif time.entry.kind == "host":
            causes[HOST_UPDATE] = causes.get(HOST_UPDATE, 0.0) + rest
        elif time.entry.kind == "transfer":
            causes["exposed communication"] += rest
        elif time.entry.kind in COMPUTE_KINDS:
            causes["kernel efficiency"] += rest
        else:
            causes["memory-bound operations"] += rest
    causes["ideal"] = ideal
    causes["kernel efficiency"] -= ideal
    return causes


def _optimizer_call(
    times: tuple[EntryTime, ...], machine: Machine, tensors: int, *, blocking: bool
) -> tuple[EntryTime, ...]:
    """What calling the optimizer costs on top of its operations; an accelerator works on unless it is waited for."""
    if isinstance(machine, Device) or all(time.entry.phase != "optimizer" for time in times):
        return ()
    seconds = machine.update_seconds + machine.update_tensor_seconds * tensors
    seconds *= factor_of(machine.factors, "optimizer", "update")
    if not seconds:
        return ()
    entry = Entry("optimizer call", "", "optimizer", "update", basis="assumed")
    if machine.backend == "cpu" or blocking:
        return (EntryTime(entry, seconds, "overhead", 0.0, seconds),)
    return (EntryTime(entry, 0.0, "overhead", launch_seconds=seconds),)


_NOTHING = 1e-5  # of a step


@frozen
class OnDevice(Answer, report="pages.traced_time"):
    """A traced step on a device: what it holds, how long a step takes, and what that goes to (None: not known)."""

    device: Device
    memory: DeviceMemory
    step: StepTime
    dtype: str
    peak_flops_per_second: float | None
    mfu: float | None
    hfu: float | None
    bars: tuple[Bar, ...]
    bottleneck: Bottleneck | None
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        shown = [self.device.name, *([] if self.step.seconds is None else [f"step {float(self.step.seconds):.4g} s"])]
        shown += [] if self.mfu is None else [f"mfu {self.mfu:.4g}"]
        shown.append(f"{self.memory.nbytes} bytes{', does NOT fit' if self.memory.fits is False else ''}")
        return f"OnDevice({', '.join(shown)})"


def on_device(ledger: Ledger, device: Device) -> OnDevice:
    """A step on a device: operations one after another, as `forecast.predict.step.step_time` times them.

    Collectives of a rank are named in the notes and not timed: a trace does not say on which nodes ranks are.
    """
    peak = ledger.peak()
    sent = ledger.filter(lambda entry: entry.kind == "collective")
    groups = sorted({(entry.group, entry.ranks) for entry in sent})
    memory = device_memory(
        peak.nbytes,
        device,
        {overhead.name: overhead for overhead in device.overheads},
        tensors=sum(entry.times for entry in ledger),
        groups=[ranks for _, ranks in groups],
    )
    of_convolution = [entry.dtype == "fp32" and "convolution" in entry.name for entry in ledger]
    in_tf32 = any(of_convolution) and device.compute_capability is not None and "tf32" in device.peak_flops_per_second
    if in_tf32:
        kinds = zip(ledger, of_convolution, strict=True)
        ledger = replace(ledger, entries=tuple(replace(entry, dtype="tf32") if has else entry for entry, has in kinds))
    step, dtype = step_time(ledger, device), matmul_dtype(ledger)
    notes = [note for note in step.notes if "not timed" not in note]
    if in_tf32:
        notes.append("fp32 convolutions run in TF32, as cuDNN's do unless torch.backends.cudnn.allow_tf32 is False")
    if len(sent):
        calls, nbytes = sum(entry.times for entry in sent), sent.total("payload")
        untimed = f"{calls:,} collectives ({format_nbytes(nbytes)} in all) are not timed"
        notes.append(f"{untimed}: a step takes longer by the exposed part of them")
    if any("convolution" in entry.name for entry in ledger):
        notes.append("assuming that convolutions reach the rates of matmuls: no published run of them was compared")
    seconds, rate, share, run_share = step.seconds, None, None, None
    try:
        rate = peak_rate(device, dtype)
    except NoRate as reason:
        if seconds is not None:
            notes.append(f"no MFU: {reason}")
    if seconds and rate is not None:
        share, run_share = mfu(ledger.model_flops, seconds, rate), hfu(ledger.matmul_flops, seconds, rate)
    bars = tuple(
        Bar(IDEAL if name == "ideal" else name, nanoseconds(float(cause)))
        for name, cause in step.causes.items()
        if abs(cause) > _NOTHING * (seconds or 0)  # a scalar that is copied from the host is no communication
    )
    limit = bottleneck(bars, mfu=share)
    if memory.fits is False:
        limit = short_of_memory(memory.nbytes, memory.usable_nbytes or 0, peak.by_category)
    return OnDevice(device, memory, step, dtype, rate, share, run_share, bars, limit, tuple(notes))
