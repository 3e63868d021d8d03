"""What a device holds, in sentences, as a figure with its table, and for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainledger.answers.pages.memory import COLOUR_OF
from trainledger.answers.pages.plain_data import plain
from trainledger.forecast.predict.device_memory import TENSORS_ALONE, DeviceMemory, of_a_device
from trainledger.ledger.entry import CATEGORIES, Int
from trainledger.report.chart import Chart, bar_chart, stacked, usable_memory
from trainledger.report.document import Table
from trainledger.report.table import sentence
from trainledger.spec.units import GIGA, format_nbytes


def device_lines(device: DeviceMemory | None, peak_nbytes: int, memory_nbytes: int | None) -> Iterator[str]:
    """Sentences on whether a device holds a peak: of a catalog device with each part outside the tensors named."""
    if device is None:
        if memory_nbytes:
            fits = "Fits in" if peak_nbytes <= memory_nbytes else "Does NOT fit in"
            yield f"{fits} the device's {format_nbytes(memory_nbytes)}."
        return
    outside = [each for each in device.lines if each.name != "tensors" and each.nbytes]
    if outside:
        parts = ", ".join(f"{each.name} {format_nbytes(each.nbytes)}" for each in outside)
        yield f"Outside the tensors ({' and '.join(sorted({each.basis for each in outside}))}): {parts}."
    elif device.tensors_alone:
        yield sentence(TENSORS_ALONE)
    if device.usable_nbytes is not None:
        yield verdict(device.nbytes, device)


def verdict(nbytes: Int, device: DeviceMemory) -> str:
    """Whether so many bytes fit in a device; of it the usable memory must be known.

    >>> verdict(3 * 10**9, DeviceMemory((), 80 * 10**9, "the driver"))
    '3 GB in all: fits in 80 GB of usable memory.'
    """
    fits = "fits" if device.fits else "does NOT fit"
    return (
        f"{format_nbytes(nbytes)} in all: {fits} in {format_nbytes(device.usable_nbytes or 0)} {of_a_device(device)}."
    )


def memory_data(device: DeviceMemory | None) -> Any:
    """What a device holds, line by line, and whether it fits."""
    return plain(device, more={DeviceMemory: ("nbytes", "fits")})


def device_table(by_category: Mapping[str, int], device: DeviceMemory | None) -> Table:
    """What a device holds at the peak: the tensors by category, what is outside them, and each one's basis."""
    rows = [(name, by_category[name], "exact") for name in _ordered(by_category)]
    rows += [(each.name, int(each.nbytes), each.basis) for each in _outside(device)]
    total = sum(nbytes for _, nbytes, _ in rows)
    shared = [(name, nbytes, nbytes / total, basis) for name, nbytes, basis in rows]
    whole = ("in all", total, None, "")
    return Table(
        "device memory", ("at the peak", "bytes", "share", "basis"), (*shared, whole), units=("", "nbytes", "share"),
        align="lrrl",
    )  # fmt: skip


def device_chart(
    by_category: Mapping[str, int], device: DeviceMemory | None, usable_nbytes: int | None, title: str
) -> Chart:
    """One bar of a device's memory at the peak, by category and outside the tensors, and its usable memory."""
    parts = {name: [by_category[name] / GIGA] for name in _ordered(by_category)}
    outside = sum(int(each.nbytes) for each in _outside(device))
    if outside:
        parts[_OUTSIDE] = [outside / GIGA]
    row = f"{format_nbytes(sum(by_category.values()) + outside)} at the peak"
    bars = stacked(parts, COLOUR_OF, lambda name, _: f"{parts[name][0]:.2f} GB of {name}")
    return bar_chart(title, "memory of the peak rank (GB)", [row], [*bars, *usable_memory(usable_nbytes)])


_OUTSIDE = "outside the tensors"


def _ordered(by_category: Mapping[str, int]) -> list[str]:
    """The categories that have bytes, states first."""
    return [each for each in dict.fromkeys((*CATEGORIES, *by_category)) if by_category.get(each)]


def _outside(device: DeviceMemory | None) -> list[Any]:
    return [] if device is None else [each for each in device.lines if each.name != "tensors" and each.nbytes]
