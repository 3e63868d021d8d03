"""A traced step on a device of the catalog, for a terminal: whether it fits, how long it takes, what that goes to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainledger.plan import in_json
from trainledger.predict.device_memory import TENSORS_ALONE
from trainledger.predict.step import IDEAL, OnDevice
from trainledger.report.plan import BASES, named_lines
from trainledger.report.table import sentence, wrapped
from trainledger.report.waterfall import text as waterfall
from trainledger.units import SECONDS_PER_HOUR, format_flops_per_second, format_nbytes, format_percent, format_seconds


def text(told: OnDevice) -> str:
    """What it costs on the device, and where the time of a step goes."""
    title = wrapped(f"What it costs on {told.device.title} ({BASES[told.step.basis]})")
    parts = ["\n".join([title, *named_lines(_costs(told))])]
    if any(each.nanoseconds for each in told.bars):
        parts.append(f"Where the time of a step goes\n{waterfall(told.bars)}")
    if told.notes:
        parts.append("\n".join(wrapped(sentence(each)) for each in told.notes))
    return "\n\n".join(parts)


def _costs(told: OnDevice) -> Iterator[tuple[str, str]]:
    seconds = told.step.seconds
    if seconds:
        yield "step", f"{format_seconds(float(seconds))}; {SECONDS_PER_HOUR / seconds:,.0f} steps an hour"
    if told.mfu is not None and told.hfu is not None and told.peak_flops_per_second is not None:
        peak = f"{format_flops_per_second(told.peak_flops_per_second)} {told.dtype}"
        yield "speed", f"MFU {format_percent(told.mfu)}, HFU {format_percent(told.hfu)} of {peak}"
    held = told.memory
    if held.usable_nbytes is not None:
        fits = "fits" if held.fits else "does NOT fit"
        parts = ", ".join(f"{each.name} {format_nbytes(each.nbytes)}" for each in held.lines if each.nbytes)
        alone = f"; {TENSORS_ALONE}" if held.tensors_alone else ""
        yield "memory", f"{fits}: {format_nbytes(held.nbytes)} of {format_nbytes(held.usable_nbytes)} ({parts}){alone}"
    if told.bottleneck is not None:
        yield "bottleneck", f"{told.bottleneck.name}: {told.bottleneck.sentence}"


def to_json(told: OnDevice) -> dict[str, Any]:
    """The same for programs."""
    held = told.memory
    return {
        "device": told.device.name,
        "basis": told.step.basis,
        "step_seconds": told.step.seconds,
        "step_causes": {"ideal" if each.cause == IDEAL else each.cause: each.seconds for each in told.bars},
        "step_seconds_by_phase": told.step.by_phase,
        "mfu": told.mfu,
        "hfu": told.hfu,
        "peak_flops_per_second": told.peak_flops_per_second,
        "matmul_dtype": told.dtype,
        "device_nbytes": held.nbytes,
        "device_memory": in_json.device_memory(held),
        "usable_nbytes": held.usable_nbytes,
        "fits": held.fits,
        "bottleneck": None if told.bottleneck is None else vars(told.bottleneck),
        "notes": list(told.notes),
    }
