"""What PyTorch's allocator had handed out during a step, from the events that `profile_memory=True` records."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainledger.observe.profiler.recording import Recording
from trainledger.observe.profiler.steps import Step

_POINTS = 600  # of a curve: of more the highest of each piece is kept


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes allocated and reserved over a step, at nanoseconds from its beginning on the host."""

    times_ns: tuple[int, ...]
    allocated_nbytes: tuple[int, ...]
    reserved_nbytes: tuple[int, ...]
    peak_nbytes: int


def memory_of(recording: Recording, step: Step) -> MemoryCurve | None:
    """The memory of a step; None where it was not recorded. Of a program on a device it is the device's."""
    events = recording.memory
    begin, end = step.host_ns
    inside = (events.begins_ns >= begin) & (events.begins_ns < end)
    devices = events.kinds[inside]
    if not len(devices):
        return None
    inside &= events.kinds == devices.max()
    times, allocated, reserved = (column[inside] for column in (events.begins_ns, events.links, events.operators))
    if not allocated.max() > 0:
        return None
    kept = np.arange(len(times))
    if len(kept) > _POINTS:
        pieces = np.array_split(kept, _POINTS)
        kept = np.array([each[allocated[each].argmax()] for each in pieces])
    return MemoryCurve(
        tuple((times[kept] - begin).tolist()), tuple(allocated[kept].tolist()), tuple(reserved[kept].tolist()),
        int(allocated.max()),
    )  # fmt: skip
