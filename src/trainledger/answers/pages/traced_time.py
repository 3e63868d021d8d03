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


def page(found: OnDevice) -> Document:
    """What it costs on the device, and where the time of a step goes."""
    timed = any(each.nanoseconds for each in found.bars)
    return Document(
        title=f"A traced step on {found.device.title}",
        sections=sections(
            section(f"What it costs on {found.device.title} ({BASES[found.step.basis]})", Facts(tuple(_costs(found)))),
            section("Where the time of a step goes", bars(found.bars)) if timed else None,
            notes(map(sentence, found.notes)),
        ),
        data=lambda: _data(found),
    )


def _costs(found: OnDevice) -> Iterator[tuple[str, str]]:
    seconds = found.step.seconds
    if seconds:
        yield "step", f"{format_seconds(float(seconds))}; {SECONDS_PER_HOUR / seconds:,.0f} steps an hour"
    if found.mfu is not None and found.hfu is not None and found.peak_flops_per_second is not None:
        peak = f"{format_flops_per_second(found.peak_flops_per_second)} {found.dtype}"
        yield "speed", f"MFU {format_percent(found.mfu)}, HFU {format_percent(found.hfu)} of {peak}"
    memory = found.memory
    if memory.usable_nbytes is not None:
        fits = "fits" if memory.fits else "does NOT fit"
        parts = ", ".join(f"{each.name} {format_nbytes(each.nbytes)}" for each in memory.lines if each.nbytes)
        alone = f"; {TENSORS_ALONE}" if memory.tensors_alone else ""
        yield (
            "memory",
            f"{fits}: {format_nbytes(memory.nbytes)} of {format_nbytes(memory.usable_nbytes)} ({parts}){alone}",
        )
    if found.bottleneck is not None:
        yield "bottleneck", f"{found.bottleneck.name}: {found.bottleneck.sentence}"


def _data(found: OnDevice) -> dict[str, Any]:
    memory = found.memory
    return {
        "device": found.device.name,
        "basis": found.step.basis,
        "step_seconds": plain(found.step.seconds),
        "step_causes": {"ideal" if each.cause == IDEAL else each.cause: each.seconds for each in found.bars},
        "step_seconds_by_phase": plain(found.step.by_phase),
        "mfu": found.mfu,
        "hfu": found.hfu,
        "peak_flops_per_second": found.peak_flops_per_second,
        "matmul_dtype": found.dtype,
        "device_nbytes": memory.nbytes,
        "device_memory": memory_data(memory),
        "usable_nbytes": memory.usable_nbytes,
        "fits": memory.fits,
        "bottleneck": plain(found.bottleneck),
        "notes": list(found.notes),
    }
