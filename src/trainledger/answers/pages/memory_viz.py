"""A traced step in the format of PyTorch's memory viewer, pytorch.org/memory_viz: a snapshot as the allocator of CUDA
writes one (``torch.cuda.memory._dump_snapshot``).

Sizes, order and origins are the ledger's. The addresses are not a forecast: they come from a first fit into one
segment for what is there before the step and one for what the step makes, so the free space that the viewer shows says
nothing about the fragmentation on a device. What lives in host memory is shown as a second device.
"""

from __future__ import annotations

import os
import pickle
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from trainledger.answers.pages.peak import NO_TENSORS
from trainledger.ledger.entry import HOST, TensorLife
from trainledger.ledger.ledger import Ledger
from trainledger.spec.plain import check_target, replace_file
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import round_up

_ALIGNED = 512  # bytes that CUDA's caching allocator rounds a block up to
_SEGMENT = 2 << 20  # and a segment
_FIRST = 0x7F0000000000
_APART = 1 << 44  # between the addresses of two segments
_PROTOCOL = 4  # the newest that the viewer reads
_POOL = (0, 0)

Record = dict[str, Any]


def write_memory_viz(ledger: Ledger, path: str | os.PathLike[str]) -> None:
    """Store a full trace as a file that pytorch.org/memory_viz opens; raises InvalidInput for a ledger without tensors.

    The file is a pickle of numbers, texts, lists and dicts alone. trainledger writes such files and reads none.
    """
    check_target(path, "--memory-viz")
    replace_file(path, pickle.dumps(snapshot(ledger), protocol=_PROTOCOL))


def snapshot(ledger: Ledger) -> Record:
    """What `write_memory_viz` stores: ``segments`` after the step, ``device_traces`` of all events.

    Raises InvalidInput for a ledger without tensors.
    """
    if not ledger.tensors:
        raise InvalidInput([Problem("--memory-viz", None, NO_TENSORS[:1].lower() + NO_TENSORS[1:].rstrip("."))])
    inside = [
        TensorLife(
            entry.scratch, "scratch", f"inside {entry.name}", (entry.scratch,), "bytes", entry.path, entry.phase,
            entry.line, born=at, died=at,
        )
        for at, entry in enumerate(ledger.entries)
        if entry.scratch
    ]  # fmt: skip
    lives = [*ledger.tensors, *inside]
    devices = [[live for live in lives if live.category != HOST], [live for live in lives if live.category == HOST]]
    segments: list[Record] = []
    traces: list[list[Record]] = []
    for device, own in enumerate(devices):
        if own or not device:
            events, ends = _device(own, device, len(ledger))
            traces.append(events)
            segments += ends
    return {"segments": segments, "device_traces": traces, "allocator_settings": {}, "external_annotations": []}


def _device(lives: Sequence[TensorLife], device: int, n_entries: int) -> tuple[list[Record], list[Record]]:
    """The events of a device in the order of the step, and its segments after it."""
    born: dict[int, list[TensorLife]] = defaultdict(list)
    died: dict[int, list[TensorLife]] = defaultdict(list)
    for live in lives:
        born[live.born].append(live)
        if live.died is not None:
            died[live.died].append(live)
    base = _FIRST + 2 * device * _APART
    resident, step = _Segment(base), _Segment(base + _APART)
    frames = _Frames()
    events: list[Record] = []
    for at in range(-1, n_entries):
        for tensor_life in born[at]:
            segment = resident if at < 0 else step
            frame = frames.of(tensor_life)
            address = segment.place(tensor_life, frame)
            events.append(_event("alloc", address, tensor_life, frame, at))
        for tensor_life in died[at]:
            segment = resident if tensor_life.born < 0 else step
            address, frame = segment.release(tensor_life)
            events.append(_event("free_requested", address, tensor_life, frame, at))
            events.append(_event("free_completed", address, tensor_life, frame, at))
    used = [each for each in (resident, step) if each.total_nbytes]
    grown = [_segment_event(each) for each in used]
    # The viewer colours by category where there is one, and then wants one of this name among them.
    last = {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": n_entries, "frames": []}
    return [*grown, *events, last | {"category": "unknown"}], [each.record(device) for each in used]


class _Frames:
    """Where tensors were made, in the words of a stack: the user's line, the module, the place in the ledger."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, str], Record] = {}

    def of(self, life: TensorLife) -> list[Record]:
        what = f"{life.name} {life.dtype}[{', '.join(map(str, life.shape))}]"
        if life.born < 0:
            return [self._frame("before the step", 0, what)]
        file, _, number = life.line.rpartition(":")
        line = int(number) if number.isdigit() else 0
        stack = [self._frame(file or "no line of yours", line, what)]
        if life.path:
            stack.append(self._frame("module", 0, life.path))
        return [*stack, self._frame("entry", life.born, life.phase)]

    def _frame(self, filename: str, line: int, name: str) -> Record:
        key = (filename, line, name)
        return self._known.setdefault(key, {"filename": filename, "line": line, "name": name})


def _event(action: str, address: int, life: TensorLife, frames: list[Record], at: int) -> Record:
    return {
        "action": action, "addr": address, "size": life.nbytes, "stream": 0, "time_us": at + 1, "frames": frames,
        "category": life.category, "pool_id": _POOL,
    }  # fmt: skip


def _segment_event(segment: _Segment) -> Record:
    return {
        "action": "segment_alloc", "addr": segment.address, "size": segment.total_nbytes, "stream": 0, "time_us": 0,
        "frames": [], "pool_id": _POOL,
    }  # fmt: skip


class _Segment:
    """A stretch of addresses that tensors are put into where the first gap is large enough."""

    def __init__(self, address: int) -> None:
        self.address = address
        self._end = 0  # offsets from here on were never used
        self._gaps: list[tuple[int, int]] = []  # (offset, nbytes) below the end, in order, none next to another
        self._blocks: dict[int, tuple[int, TensorLife, list[Record]]] = {}

    @property
    def total_nbytes(self) -> int:
        return round_up(self._end, _SEGMENT)

    def place(self, life: TensorLife, frames: list[Record]) -> int:
        """The address that a tensor gets."""
        size = round_up(life.nbytes, _ALIGNED)
        for at, (offset, room) in enumerate(self._gaps):
            if room >= size:
                self._gaps[at : at + 1] = [(offset + size, room - size)] if room > size else []
                break
        else:
            offset = self._end
            self._end += size
        self._blocks[id(life)] = (offset, life, frames)
        return self.address + offset

    def release(self, life: TensorLife) -> tuple[int, list[Record]]:
        """The address that a tensor had; its room becomes a gap, joined with its neighbours."""
        offset, _, frames = self._blocks.pop(id(life))
        start, end = offset, offset + round_up(life.nbytes, _ALIGNED)
        at = bisect_left(self._gaps, (start, 0))
        if at < len(self._gaps) and self._gaps[at][0] == end:
            end += self._gaps.pop(at)[1]
        if at and sum(self._gaps[at - 1]) == start:
            start = self._gaps.pop(at - 1)[0]
        insort(self._gaps, (start, end - start))
        return self.address + offset, frames

    def record(self, device: int) -> Record:
        """The segment after the step."""
        blocks: list[Record] = []
        used = 0
        requested = 0
        place = 0

        def gap(until: int) -> None:
            if until > place:
                blocks.append(_block(self.address + place, until - place, 0, "inactive", []))

        for offset, life, frames in sorted(self._blocks.values(), key=lambda block: block[0]):
            gap(offset)
            size = round_up(life.nbytes, _ALIGNED)
            blocks.append(_block(self.address + offset, size, life.nbytes, "active_allocated", frames))
            used, requested, place = used + size, requested + life.nbytes, offset + size
        gap(self.total_nbytes)
        return {
            "device": device, "address": self.address, "total_size": self.total_nbytes, "allocated_size": used,
            "active_size": used, "requested_size": requested, "stream": 0, "segment_type": "large",
            "segment_pool_id": _POOL, "is_expandable": False, "frames": [], "blocks": blocks,
        }  # fmt: skip


def _block(address: int, size: int, requested: int, state: str, frames: list[Record]) -> Record:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}
