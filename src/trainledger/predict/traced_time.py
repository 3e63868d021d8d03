"""What a traced step of somebody's own code would take on a device of the catalog: memory, time and what it goes to."""

from __future__ import annotations

from dataclasses import replace

from trainledger.frozen import frozen
from trainledger.ledger.entry import Ledger
from trainledger.predict.bottleneck import Bottleneck, bottleneck, short_of_memory
from trainledger.predict.device_memory import DeviceMemory, device_memory
from trainledger.predict.ratios import hfu, matmul_dtype, mfu
from trainledger.predict.roofline import NoRate, peak_rate
from trainledger.predict.step_time import StepTime, step_time
from trainledger.predict.waterfall import NAPKIN, Bar, nanoseconds
from trainledger.spec.cluster import Device
from trainledger.units import format_nbytes

_NOTHING = 1e-5  # of a step
IDEAL = "model FLOPs at the peak"


@frozen
class OnDevice:
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
        said = [self.device.name, *([] if self.step.seconds is None else [f"step {float(self.step.seconds):.4g} s"])]
        said += [] if self.mfu is None else [f"mfu {self.mfu:.4g}"]
        said.append(f"{self.memory.nbytes} bytes{', does NOT fit' if self.memory.fits is False else ''}")
        return f"OnDevice({', '.join(said)})"


def on_device(ledger: Ledger, device: Device) -> OnDevice:
    """A step on a device: operations one after another, as `predict.step_time.step_time` times them.

    Collectives of a rank are named in the notes and not timed: a trace does not say where the ranks of a mesh stand.
    """
    peak = ledger.peak()
    sent = ledger.filter(lambda each: each.kind == "collective")
    groups = sorted({(each.group, each.ranks) for each in sent})
    memory = device_memory(
        peak.nbytes, device, {each.name: each for each in device.overheads},
        tensors=sum(each.times for each in ledger), groups=[ranks for _, ranks in groups],
    )  # fmt: skip
    step, dtype = step_time(ledger, device), matmul_dtype(ledger)
    notes = [each for each in step.notes if "not timed" not in each]
    if len(sent):
        calls, nbytes = sum(each.times for each in sent), sent.total("payload")
        told = f"{calls:,} collectives ({format_nbytes(nbytes)} in all) are not timed"
        notes.append(f"{told}: a step takes longer by what shows of them")
    if any("convolution" in each.name for each in ledger):
        notes.append("convolutions are taken to reach what matrix products do: no published run of them was compared")
    seconds, rate, share, run_share = step.seconds, None, None, None
    try:
        rate = peak_rate(device, dtype)
    except NoRate as reason:
        if seconds is not None:
            notes.append(f"no MFU: {reason}")
    if seconds and rate is not None:
        share, run_share = mfu(ledger.model_flops, seconds, rate), hfu(ledger.matmul_flops, seconds, rate)
    bars = tuple(
        Bar(NAPKIN if name == "ideal" else name, nanoseconds(float(each)))
        for name, each in step.causes.items()
        if abs(each) > _NOTHING * (seconds or 0)  # a scalar that is copied from the host is no communication
    )
    limit = bottleneck(bars, mfu=share)
    if memory.fits is False:
        limit = short_of_memory(memory.nbytes, memory.usable_nbytes or 0, peak.by_category)
    bars = tuple(replace(each, cause=IDEAL) if each.cause == NAPKIN else each for each in bars)
    return OnDevice(device, memory, step, dtype, rate, share, run_share, bars, limit, tuple(notes))
