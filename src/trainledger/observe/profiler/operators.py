"""The kind of each piece of device work and of host time, and what activation checkpointing runs again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trainledger.observe.profiler.collectives import collective_named
from trainledger.observe.profiler.kinds import (
    COMMUNICATION,
    RECOMPUTATION,
    UPDATE,
    is_collective,
    kind_of_kernel,
    kind_of_operator,
    kind_on_host,
)
from trainledger.observe.profiler.recording import (
    GIVEN_A_NUMBER,
    NONE,
    Column,
    Intervals,
    Mask,
    Recording,
    Spans,
    merged,
    one_by_one,
)

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
    kinds = np.array([collective_named(each) if is_collective(each) else "" for each in recording.names], dtype=object)
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
    return {kind: merged(np.array(each, dtype=np.int64)) for kind, each in pieces.items()}


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
