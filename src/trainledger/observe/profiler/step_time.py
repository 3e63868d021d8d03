"""Where the time of a step went: every nanosecond of it in one part, so that the parts sum to the step.

A moment in which several things run is given to the first of them in this order: computation (by `kinds.KINDS`),
communication, copies. Communication beside computation is overlapped and costs nothing; what is left is exposed. A
moment in which the device does nothing is the host's, where it evaluates, saves, waits for data or has not launched
what comes next. All that is launched while it evaluates or saves is part of that.
Else work is launched and has not begun: for a moment, which each launch takes, or for longer, and then it waits for
something that no kernel shows (an event of another stream, a callback, another program on the device).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trainledger.observe.profiler.collectives import Collectives, collectives
from trainledger.observe.profiler.kinds import COMMUNICATION, KINDS
from trainledger.observe.profiler.operators import Recomputed, calls_on_host, kinds_of_work, kinds_on_host, recomputed
from trainledger.observe.profiler.recording import (
    NONE,
    Intervals,
    Recording,
    Spans,
    inside,
    length,
    union,
    within,
    without,
)
from trainledger.observe.profiler.steps import Step, launched

COPY, EXPOSED = "copies", "exposed communication"
EVALUATION, CHECKPOINTS = "evaluation", "checkpoints"
# Of a device that does nothing; of a program without one what lies outside all operators is `OUTSIDE`.
WAIT_FOR_DATA, AFTER_SYNC, HOST = "waiting for data", "after a synchronization", "host too late"
LAUNCH_GAPS, QUEUED, OUTSIDE = "launch gaps", "queued, not begun", "outside operators"
IDLE = (WAIT_FOR_DATA, AFTER_SYNC, HOST, LAUNCH_GAPS, QUEUED, OUTSIDE)
ORDER = (*KINDS, EXPOSED, COPY, EVALUATION, CHECKPOINTS, *IDLE)

_LAUNCH_NS = 20_000  # a launch takes 3 to 10 microseconds to begin on the device (assumed: twice that at most)
_QUEUE_LAUNCHES = 1024  # that CUDA takes before a launch waits (assumed: its documentation names no number)
_DATA = re.compile(r"DataLoader.*__next__|^data_?wait|load_batch|wait_for_batch|data_load", re.IGNORECASE)
_AROUND = {  # annotations of the program around what is no training
    EVALUATION: re.compile(r"(^|[^a-z])(eval|evaluat\w*|validat\w*)([^a-z]|$)", re.IGNORECASE),
    CHECKPOINTS: re.compile(r"(save|write)[ _.]?(state|model)|checkpoint(ing)?([^a-z]|$)", re.IGNORECASE),
}
SYNC = re.compile(
    r"^(cuda|hip)(Stream|Device|Event)Synchronize|^(cuda|hip)Memcpy(?!.*Async)|^cu(Stream|Ctx)Synchronize"
)


_NOTHING = np.zeros((0, 2), dtype=np.int64)


@dataclass(frozen=True)
class StepTime:
    """A step in parts (nanoseconds, by the names of `ORDER`), and what its sums hide."""

    step: Step
    parts_ns: Mapping[str, int]
    communication_ns: int
    overlapped_ns: int

    @property
    def nanoseconds(self) -> int:
        return self.step.nanoseconds

    @property
    def busy_ns(self) -> int:
        """How long the device (or, without one, any operator) did something."""
        return sum(each for name, each in self.parts_ns.items() if name not in IDLE)


@dataclass(frozen=True)
class Timeline:
    """When each kind of thing ran in a recording, on its device where it has one."""

    work_kinds: tuple[str, ...]  # of each piece of device work
    recomputed: Recomputed
    sent: Collectives
    calls: Mapping[str, Intervals]  # of a host that has no device: inside of operators that call collectives
    kinds: Mapping[str, Intervals]
    around: Mapping[str, Intervals]  # of the host: evaluation and checkpoints
    data: Intervals
    after_sync: Intervals
    host_late: Intervals


def timeline(recording: Recording) -> Timeline:
    """The moments of each kind of work, and those in which the host was in the way."""
    again, around, sent = recomputed(recording), _around(recording), collectives(recording)
    work, work_kinds = recording.work, tuple(kinds_of_work(recording, again.operators))
    if recording.on_device:
        when = launched(recording)
        kinds = np.array(work_kinds, dtype=object)
        for name, moments in around.items():
            kinds[inside(moments, when)] = name
        work_kinds = tuple(kinds.tolist())
        by_kind = {kind: union(work.begins_ns[kinds == kind], work.ends_ns[kinds == kind]) for kind in set(work_kinds)}
    else:
        by_kind = kinds_on_host(recording, again.operators)
        ran = [by_kind.get(COMMUNICATION, _NOTHING), np.stack([sent.spans.begins_ns, sent.spans.ends_ns], axis=1)]
        both = np.concatenate(ran)[np.argsort(np.concatenate(ran)[:, 0], kind="stable")]
        by_kind[COMMUNICATION] = union(both[:, 0], both[:, 1])
        for moments in around.values():
            by_kind = {kind: without(each, moments) for kind, each in by_kind.items()}
    late, after_sync = _late(recording)
    calls = {} if recording.on_device else calls_on_host(recording)
    return Timeline(work_kinds, again, sent, calls, by_kind, around, _waits_for_data(recording), after_sync, late)


def step_time(times: Timeline, step: Step) -> StepTime:
    """The parts of one step."""
    parts = {name: length(each) for name, each in moments_of(times, step).items()}
    communication = length(within(times.kinds.get(COMMUNICATION, _NOTHING), *step.device_ns))
    return StepTime(step, parts, communication, communication - parts[EXPOSED])


def moments_of(times: Timeline, step: Step) -> dict[str, Intervals]:
    """The moments of each part of a step, by the names of `ORDER`; together they are the step."""
    begin, end = step.device_ns
    left = np.array([[begin, end]], dtype=np.int64) if end > begin else _NOTHING
    found = {}
    kinds, around = times.kinds, times.around
    of: dict[str, tuple[Intervals, ...]] = {
        EXPOSED: (kinds.get(COMMUNICATION, _NOTHING),), COPY: (kinds.get("copy", _NOTHING),),
    }  # fmt: skip
    of |= {name: (kinds.get(name, _NOTHING), around.get(name, _NOTHING)) for name in (EVALUATION, CHECKPOINTS)}
    of |= {WAIT_FOR_DATA: (times.data,), AFTER_SYNC: (times.after_sync,), HOST: (times.host_late,)}
    for name in (*KINDS, *of):
        rest = left
        for moments in of.get(name, (kinds.get(name, _NOTHING),)):
            rest = without(rest, within(moments, begin, end))
        found[name], left = without(left, rest), rest
    short, on_device = left[:, 1] - left[:, 0] <= _LAUNCH_NS, len(times.work_kinds) > 0
    return found | {
        LAUNCH_GAPS: left[short] if on_device else _NOTHING,
        QUEUED: left[~short] if on_device else _NOTHING,
        OUTSIDE: _NOTHING if on_device else left,
    }


def pieces_of(moments: Mapping[str, Intervals], step: Step, count: int) -> dict[str, tuple[int, ...]]:
    """How long each part has of each of so many equal pieces of a step, in nanoseconds."""
    edges = np.linspace(*step.device_ns, count + 1).round().astype(np.int64)
    found = {}
    for name, own in moments.items():
        before = np.concatenate([[0], np.cumsum(own[:, 1] - own[:, 0])])  # what lies before each interval
        at = np.searchsorted(own[:, 0], edges, side="right") - 1
        last = np.maximum(at, 0)
        within_last = np.minimum(edges, own[last, 1]) - own[last, 0] if len(own) else np.zeros_like(edges)
        covered = np.where(at >= 0, before[last] + within_last, 0)
        found[name] = tuple(np.diff(covered).tolist())
    return found


def _around(recording: Recording) -> dict[str, Intervals]:
    found = {}
    for name, pattern in _AROUND.items():
        there = recording.named(recording.annotations, pattern)
        if len(there):
            found[name] = union(there.begins_ns, there.ends_ns)
    return found


def _waits_for_data(recording: Recording) -> Intervals:
    found = [recording.named(each, _DATA) for each in (recording.annotations, recording.operators)]
    begins, ends = (np.concatenate([getattr(each, which) for each in found]) for which in ("begins_ns", "ends_ns"))
    order = np.argsort(begins, kind="stable")
    return union(begins[order], ends[order])


def _late(recording: Recording) -> tuple[Intervals, Intervals]:
    """The gaps on all streams in which the host had not launched what came next; and what of them is there because the
    host has waited for the device. Without a device there are none.

    Where a launch is not in the recording, a gap longer than a launch takes is the host's.
    """
    if not recording.on_device:
        return _NOTHING, _NOTHING
    work, of = recording.work, recording.launch_of_work
    finished = np.concatenate([[work.begins_ns[0]], np.maximum.accumulate(work.ends_ns)[:-1]])
    known = of != NONE
    until = np.where(known, recording.launches.begins_ns[of], work.begins_ns) if known.any() else work.begins_ns
    until = np.minimum(until, work.begins_ns)
    late = np.where(known, until > finished, work.begins_ns - finished > _LAUNCH_NS)
    gaps = union(finished[late], until[late])
    waits = recording.named(recording.launches, SYNC)
    waits = waits.where(waits.ends_ns > work.begins_ns[0])  # earlier ones are the profiler's
    if not len(waits):
        return gaps, gaps[:0]
    of_a_launch = (work.ends_ns.max() - work.begins_ns[0]) / len(work)
    return gaps, _after(waits, gaps, _QUEUE_LAUNCHES * of_a_launch)


def _after(waits: Spans, gaps: Intervals, furthest: float) -> Intervals:
    """The gaps, or the first part of them, that are there because the host has waited for the device.

    Had it not waited, it would launch all that follows earlier by as long, and of the gaps from there on as much would
    not be there. It is never further ahead than what a queue holds, which takes the device ``furthest`` nanoseconds.
    """
    order = np.argsort(waits.ends_ns, kind="stable")
    ends = waits.ends_ns[order]
    waited = np.concatenate([[0], np.cumsum(ends - waits.begins_ns[order])])
    # A wait may end in the first gap that it causes.
    so_far = waited[np.searchsorted(ends, gaps[:, 1], side="right")]
    ahead, causes = 0.0, []
    for more, length_ns in zip(np.diff(so_far, prepend=0).tolist(), (gaps[:, 1] - gaps[:, 0]).tolist(), strict=True):
        ahead = min(ahead + more, furthest)
        causes.append(min(ahead, length_ns))
        ahead -= causes[-1]
    return union(gaps[:, 0], gaps[:, 0] + np.array(causes, dtype=np.int64))
