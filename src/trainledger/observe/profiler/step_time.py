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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from trainledger.observe.profiler.kinds import (
    COMMUNICATION,
    KINDS,
    RECOMPUTATION,
    UPDATE,
    Collectives,
    collective_named,
    collectives,
    is_collective,
    kind_of_kernel,
    kind_of_operator,
    kind_on_host,
)
from trainledger.observe.profiler.recording import (
    GIVEN_A_NUMBER,
    NONE,
    NOTHING,
    Column,
    Intervals,
    Mask,
    Recording,
    Spans,
    inside,
    length,
    merged,
    one_by_one,
    union,
    within,
    without,
)
from trainledger.observe.profiler.steps import Step, launched

_NODE = "autograd::engine::evaluate_function: "
_COMPILED = "CompiledFunctionBackward"
_MOST_NEIGHBOURS = 0.5  # of nodes that record: a region runs again in one node, and then those of its backward follow
_IN_KERNELS = "What a compiled region computes again in its backward is part of its kernels, and is not told apart."
_NEVER = 2**63 - 1
_UNKNOWN = "Whether activation checkpointing ran operators again is not known: "


@dataclass(frozen=True)
class Recomputed:
    """Whether each operator of a recording runs again, and sentences on what cannot be said."""

    operators: Mask
    doubts: tuple[str, ...] = ()


# Autograd's engine evaluates a node without recording what runs in it; a checkpointed region runs again with recording
# on, as its backward needs a graph. So an operator inside of a node that was given a sequence number of its own (a
# backward's have that of their forward, with the thread which ran that) is recomputed, with all that it calls. This is
# so where the node is `CheckpointFunctionBackward` (reentrant; the backward inside of it is in nodes of its own), and
# where a saved tensor is unpacked in any other node.
def recomputed(recording: Recording) -> Recomputed:
    """Which operators activation checkpointing ran again: forward operators inside of a backward."""
    operators = recording.operators
    again = np.zeros(len(operators), dtype=bool)
    is_node = np.isin(operators.names, [at for at, name in enumerate(recording.names) if name.startswith(_NODE)])
    if not is_node.any():
        return Recomputed(again)
    doubts = []
    if any(name.endswith(_COMPILED) for name in recording.names):
        doubts.append(_IN_KERNELS)
    numbered = operators.kinds == GIVEN_A_NUMBER
    if not numbered.any():
        return Recomputed(again, (*doubts, f"{_UNKNOWN}operators have no sequence numbers here."))
    node_of = np.full(len(operators), NONE)  # the innermost node that each operator runs in
    nodes, runs_again = one_by_one(node_of), one_by_one(again)
    given, evaluates = one_by_one(numbered), one_by_one(is_node)
    for at, caller in enumerate(one_by_one(recording.callers)):
        if caller != NONE and not evaluates[at]:
            node = nodes[at] = caller if evaluates[caller] else nodes[caller]
            runs_again[at] = node != NONE and (given[at] or runs_again[caller])
    if _one_after_the_other(*(np.unique(node_of[each & (node_of != NONE)]) for each in (~is_node, again))):
        why = "the backward is recorded itself (create_graph), so its own operators look like those of a forward"
        doubts.append(f"{_UNKNOWN}{why}.")
        again[:] = False
    return Recomputed(again, tuple(doubts))


def _one_after_the_other(nodes: Column, recording_nodes: Column) -> bool:
    """Whether most nodes that record follow each other, as in a backward that is itself to be differentiated."""
    records = np.isin(nodes, recording_nodes)
    return bool((records[1:] & records[:-1]).sum() > _MOST_NEIGHBOURS * len(recording_nodes))


def kinds_of_work(recording: Recording, again: Mask) -> list[str]:
    """The kind of each piece of device work: of its operator, else of its own name; copies are ``copy``.

    Computation by operators that run ``again`` is recomputation, whatever it is.
    """
    work, updates = recording.work, _updates(recording)
    by_operator = [kind_of_operator(name) for name in recording.names]
    by_kernel = [COMMUNICATION if is_collective(name) else kind_of_kernel(name) for name in recording.names]

    def kind_of(name: int, is_copy: int, operator: int) -> str:
        kind = by_kernel[name]
        if is_copy:
            return "copy"
        if kind == COMMUNICATION or operator == NONE:
            return kind
        if again[operator]:
            return RECOMPUTATION
        if kind == "attention":
            return kind
        said = "optimizer" if updates[operator] else by_operator[recording.operators.names[operator]]
        return kind if said == "other" else said

    columns = (work.names, work.kinds, recording.operator_of_work)
    return [kind_of(*each) for each in zip(*(column.tolist() for column in columns), strict=True)]


def _updates(recording: Recording) -> Mask:
    """Whether each operator begins inside an optimizer's update on its own thread."""
    around, operators = recording.named(recording.annotations, UPDATE), recording.operators
    updates = np.zeros(len(operators), dtype=bool)
    for begin, end, lane in zip(around.begins_ns, around.ends_ns, around.lanes, strict=True):
        first, last = np.searchsorted(operators.begins_ns, [begin, end])
        updates[first:last] |= operators.lanes[first:last] == lane
    return updates


def calls_on_host(recording: Recording) -> dict[str, Intervals]:
    """Of a program without a device: the moments inside operators that call collectives, by kind of collective."""
    operators = recording.operators
    kinds = np.array([collective_named(name) if is_collective(name) else "" for name in recording.names], dtype=object)
    of = kinds[operators.names] if len(operators) else kinds[:0]
    return {kind: operators.moments(of == kind) for kind in sorted({*of} - {""})}


def kinds_on_host(recording: Recording, again: Mask) -> dict[str, Intervals]:
    """Of a program without a device: the moments in which operators of each kind run, outside those they call."""
    operators, updates = recording.operators, _updates(recording)
    kinds = [kind_on_host(name) for name in recording.names]
    pieces: dict[str, list[tuple[int, int]]] = {}
    for begin, end, index in _alone(operators):
        kind = kinds[operators.names[index]]
        if kind != COMMUNICATION:
            kind = RECOMPUTATION if again[index] else "optimizer" if updates[index] else kind
        if end > begin:
            pieces.setdefault(kind, []).append((begin, end))
    return {kind: merged(np.array(piece, dtype=np.int64)) for kind, piece in pieces.items()}


def _alone(spans: Spans) -> Iterator[tuple[int, int, int]]:
    """The moments in which each span is the innermost of its lane: its beginning, its end and its index."""
    for lane in np.unique(spans.lanes):
        indices = np.flatnonzero(spans.lanes == lane)
        begins, ends = spans.begins_ns[indices].tolist(), spans.ends_ns[indices].tolist()
        open_: list[tuple[int, int]] = []  # end and index of the spans that a moment lies in, the innermost last
        at = 0
        # The last event is none: it begins behind all others, and ends them.
        for begin, end, index in [*zip(begins, ends, indices.tolist(), strict=True), (_NEVER, _NEVER, NONE)]:
            while open_ and open_[-1][0] <= begin:
                last, inner = open_.pop()
                yield at, last, inner
                at = max(at, last)
            if open_:
                yield at, begin, open_[-1][1]
            at = begin
            open_.append((min(end, open_[-1][0]) if open_ else end, index))


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
    reasons: Mapping[str, Intervals]  # why a device does nothing, from the host's annotations and launches


def timeline(recording: Recording) -> Timeline:
    """The moments of each kind of work, and those in which the host was in the way."""
    again, sent = recomputed(recording), collectives(recording)
    marked = {name: recording.named(recording.annotations, pattern).moments() for name, pattern in _AROUND.items()}
    around = {name: moments for name, moments in marked.items() if len(moments)}
    work_kinds, calls = tuple(kinds_of_work(recording, again.operators)), dict[str, Intervals]()
    if recording.on_device:
        when, kinds = launched(recording), np.array(work_kinds, dtype=object)
        for name, moments in around.items():
            kinds[inside(moments, when)] = name
        work_kinds = tuple(kinds.tolist())
        by_kind = {kind: recording.work.moments(kinds == kind) for kind in set(work_kinds)}
    else:
        by_kind, calls = kinds_on_host(recording, again.operators), calls_on_host(recording)
        by_kind[COMMUNICATION] = merged(by_kind.get(COMMUNICATION, NOTHING), sent.spans.moments())
        for moments in around.values():
            by_kind = {kind: without(each, moments) for kind, each in by_kind.items()}
    data = (recording.named(spans, _DATA).moments() for spans in (recording.annotations, recording.operators))
    late, after_sync = _late(recording)
    reasons = {**around, WAIT_FOR_DATA: merged(*data), AFTER_SYNC: after_sync, HOST: late}
    return Timeline(work_kinds, again, sent, calls, by_kind, reasons)


def step_time(times: Timeline, step: Step) -> StepTime:
    """The parts of one step."""
    parts = {name: length(moment) for name, moment in moments_of(times, step).items()}
    communication = length(within(times.kinds.get(COMMUNICATION, NOTHING), *step.device_ns))
    return StepTime(step, parts, communication, communication - parts[EXPOSED])


def moments_of(times: Timeline, step: Step) -> dict[str, Intervals]:
    """The moments of each part of a step, by the names of `ORDER`; together they are the step."""
    begin, end = step.device_ns
    left = np.array([[begin, end]], dtype=np.int64) if end > begin else NOTHING
    parts, kind_of = {}, {EXPOSED: COMMUNICATION, COPY: "copy"}
    for name in ORDER[: ORDER.index(LAUNCH_GAPS)]:
        rest = left
        for moments in (times.kinds.get(kind_of.get(name, name)), times.reasons.get(name)):
            rest = rest if moments is None else without(rest, within(moments, begin, end))
        parts[name], left = without(left, rest), rest
    if not times.work_kinds:
        return parts | {LAUNCH_GAPS: NOTHING, QUEUED: NOTHING, OUTSIDE: left}
    short = left[:, 1] - left[:, 0] <= _LAUNCH_NS
    return parts | {LAUNCH_GAPS: left[short], QUEUED: left[~short], OUTSIDE: NOTHING}


def pieces_of(moments: Mapping[str, Intervals], step: Step, count: int) -> dict[str, tuple[int, ...]]:
    """How long each part has of each of so many equal pieces of a step, in nanoseconds."""
    edges = np.linspace(*step.device_ns, count + 1).round().astype(np.int64)

    def pieces(own: Intervals) -> tuple[int, ...]:
        if not len(own):
            return (0,) * count
        before = np.concatenate([[0], np.cumsum(own[:, 1] - own[:, 0])])  # what lies before each interval
        at = np.searchsorted(own[:, 0], edges, side="right") - 1
        last = np.maximum(at, 0)
        covered = np.where(at >= 0, before[last] + np.minimum(edges, own[last, 1]) - own[last, 0], 0)
        return tuple(np.diff(covered).tolist())

    return {name: pieces(own) for name, own in moments.items()}


def _late(recording: Recording) -> tuple[Intervals, Intervals]:
    """The gaps on all streams in which the host had not launched what came next; and what of them is there because the
    host has waited for the device. Without a device there are none.

    Where a launch is not in the recording, a gap longer than a launch takes is the host's.
    """
    if not recording.on_device:
        return NOTHING, NOTHING
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
        return gaps, NOTHING
    of_a_launch = (work.ends_ns.max() - work.begins_ns[0]) / len(work)
    return gaps, _after(waits, gaps, _QUEUE_LAUNCHES * of_a_launch)


def _after(waits: Spans, gaps: Intervals, furthest: float) -> Intervals:
    """The gaps, or the first part of them, that are there because the host has waited for the device."""
    # Had it not waited, it would launch all that follows earlier by as long, and of later gaps as much would
    # not be there. It is never further ahead than what a queue holds, which takes the device ``furthest`` nanoseconds.
    order = np.argsort(waits.ends_ns, kind="stable")
    ends = waits.ends_ns[order]
    waited = np.concatenate([[0], np.cumsum(ends - waits.begins_ns[order])])
    so_far = waited[np.searchsorted(ends, gaps[:, 1], side="right")]  # a wait may end in the first gap that it causes
    ahead, caused = 0.0, []
    for more, length_ns in zip(np.diff(so_far, prepend=0).tolist(), (gaps[:, 1] - gaps[:, 0]).tolist(), strict=True):
        ahead = min(ahead + more, furthest)
        caused.append(min(ahead, length_ns))
        ahead -= caused[-1]
    return union(gaps[:, 0], gaps[:, 0] + np.array(caused, dtype=np.int64))
