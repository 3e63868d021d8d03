"""The document of a traced step on a device: whether it fits, how long it takes, what that goes to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainledger.answers.pages.device_memory import memory_data
from trainledger.answers.pages.plain_data import plain
from trainledger.answers.plan import BASES, bars
from trainledger.forecast.predict.device_memory import TENSORS_ALONE
from trainledger.forecast.predict.forecast import IDEAL
from trainledger.forecast.predict.step import OnDevice
from trainledger.report.document import Document, Facts, notes, section, sections
from trainledger.report.table import sentence
from trainledger.spec.units import (
    SECONDS_PER_HOUR,
    format_flops_per_second,
    format_nbytes,
    format_percent,
    format_seconds,
)


def page(on_device: OnDevice) -> Document:
    """What it costs on the device, and where the time of a step goes."""
    timed = any(bar.nanoseconds for bar in on_device.bars)
    return Document(
        title=f"A traced step on {on_device.device.title}",
        sections=sections(
            section(
                f"What it costs on {on_device.device.title} ({BASES[on_device.step.basis]})",
                Facts(tuple(_costs(on_device))),
            ),
            section("Where the time of a step goes", bars(on_device.bars)) if timed else None,
            notes(map(sentence, on_device.notes)),
        ),
        data=lambda: _data(on_device),
    )


def _costs(on_device: OnDevice) -> Iterator[tuple[str, str]]:
    seconds = on_device.step.seconds
    if seconds:
        yield "step", f"{format_seconds(float(seconds))}; {SECONDS_PER_HOUR / seconds:,.0f} steps an hour"
    if on_device.mfu is not None and on_device.hfu is not None and on_device.peak_flops_per_second is not None:
        peak = f"{format_flops_per_second(on_device.peak_flops_per_second)} {on_device.dtype}"
        yield "speed", f"MFU {format_percent(on_device.mfu)}, HFU {format_percent(on_device.hfu)} of {peak}"
    memory = on_device.memory
    if memory.usable_nbytes is not None:
        fits = "fits" if memory.fits else "does NOT fit"
        parts = ", ".join(f"{line.name} {format_nbytes(line.nbytes)}" for line in memory.lines if line.nbytes)
        alone = f"; {TENSORS_ALONE}" if memory.tensors_alone else ""
        yield (
            "memory",
            f"{fits}: {format_nbytes(memory.nbytes)} of {format_nbytes(memory.usable_nbytes)} ({parts}){alone}",
        )
    if on_device.bottleneck is not None:
        yield "bottleneck", f"{on_device.bottleneck.name}: {on_device.bottleneck.sentence}"


def _data(on_device: OnDevice) -> dict[str, Any]:
    memory = on_device.memory
    return {
        "device": on_device.device.name,
        "basis": on_device.step.basis,
        "step_seconds": plain(on_device.step.seconds),
        "step_causes": {"ideal" if bar.cause == IDEAL else bar.cause: bar.seconds for bar in on_device.bars},
        "step_seconds_by_phase": plain(on_device.step.by_phase),
        "mfu": on_device.mfu,
        "hfu": on_device.hfu,
        "peak_flops_per_second": on_device.peak_flops_per_second,
        "matmul_dtype": on_device.dtype,
        "device_nbytes": memory.nbytes,
        "device_memory": memory_data(memory),
        "usable_nbytes": memory.usable_nbytes,
        "fits": memory.fits,
        "bottleneck": plain(on_device.bottleneck),
        "notes": list(on_device.notes),
    }
