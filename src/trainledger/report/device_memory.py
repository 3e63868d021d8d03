"""What a device holds, in sentences and for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainledger.ledger.entry import Int
from trainledger.predict.device_memory import TENSORS_ALONE, DeviceMemory, of_a_device
from trainledger.report.plain_data import plain
from trainledger.report.table import sentence
from trainledger.units import format_nbytes


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
