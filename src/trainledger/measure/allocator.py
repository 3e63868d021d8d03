"""The allocator as a witness of its own: the most bytes that were allocated at once, by its own events."""

from __future__ import annotations

import os
from itertools import accumulate
from types import TracebackType
from typing import Any

import torch


class AllocatorPeak:
    """The most bytes allocated at once inside the block, on top of ``live_nbytes`` that were there before.

    On CUDA the caching allocator's own maximum; on a CPU the profiler's allocation events of this thread, which are
    ``changes`` in their order: bytes allocated, negative where freed. ``nbytes`` is None where neither tells.
    """

    def __init__(self, device: torch.device, *, live_nbytes: int = 0) -> None:
        self.nbytes: int | None = None
        self.changes: list[int] = []
        self._device = device
        self._live = live_nbytes
        self._profiler: Any = None

    def __enter__(self) -> AllocatorPeak:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        elif self._device.type == "cpu":
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it reports each start and stop otherwise
            from torch.profiler import ProfilerActivity, profile

            self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profiler.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self.nbytes = torch.cuda.max_memory_allocated(self._device)
        elif self._profiler is not None:
            self._profiler.__exit__(kind, error, trace)
            self.changes = _changes(self._profiler)
            self.nbytes = self._live + max(accumulate(self.changes, initial=0))


def _changes(profiler: Any) -> list[int]:
    """The sizes of the allocation events so far; frees of what was there before are not among them.

    PyTorch remembers addresses of an earlier profile, and tells a free there with the size of what lay there then.
    """
    events: list[tuple[int, int, int]] = []
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    while waiting:
        node = waiting.pop()
        if node.tag.name == "Allocation":
            events.append((node.start_time_ns, node.extra_fields.ptr, node.extra_fields.alloc_size))
        waiting.extend(node.children)
    inside: set[int] = set()
    changes = []
    for _, address, nbytes in sorted(events, key=lambda each: each[0]):
        if nbytes > 0:
            inside.add(address)
        elif address in inside:
            inside.remove(address)
        else:
            continue
        changes.append(nbytes)
    return changes
