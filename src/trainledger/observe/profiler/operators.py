"""The kind of each piece of device work and of host time, and what activation checkpointing runs again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
    Recording,
    Spans,
    one_by_one,
    union,
)

_NODE = "autograd::engine::evaluate_function: "
_COMPILED = "CompiledFunctionBackward"
_MOST_NEIGHBOURS = 0.5  # of nodes that record: a region runs again in one node, and then those of its backward follow


@dataclass(frozen=True)
class Recomputed:
    """Whether each operator of a recording runs again, and sentences on what cannot be said."""

    operators: npt.NDArray[np.bool_]
    doubts: tuple[str, ...] = ()


def recomputed(recording: Recording) -> Recomputed:
    """Which operators activation checkpointing ran again."""
    operators = recording.operators
    again = np.zeros(len(operators), dtype=bool)
    node_names = {number for number, name in enumerate(recording.names) if name.startswith(_NODE)}
    is_node = np.isin(operators.names, list(node_names))
    if not is_node.any():
        return Recomputed(again)
    doubts = list(_compiled(recording))
    numbered = operators.kinds == GIVEN_A_NUMBER
    if not numbered.any():
        why = "operators have no sequence numbers here"
        return Recomputed(
            again, (*doubts, f"Whether activation checkpointing ran operators again is not known: {why}.")
        )
    node_of = np.full(len(operators), NONE)  # the innermost node that each operator runs in
    nodes, runs_again = one_by_one(node_of), one_by_one(again)
    given, evaluates = one_by_one(numbered), one_by_one(is_node)
    for at, caller in enumerate(one_by_one(recording.callers)):
        if caller != NONE and not evaluates[at]:
            node = nodes[at] = caller if evaluates[caller] else nodes[caller]
            runs_again[at] = node != NONE and (given[at] or runs_again[caller])
    if _one_after_the_other(*(np.unique(node_of[each & (node_of != NONE)]) for each in (~is_node, again))):
        why = "the backward is recorded itself (create_graph), so its own operators look like those of a forward"
        doubts.append(f"Whether activation checkpointing ran operators again is not known: {why}.")
        again[:] = False
    return Recomputed(again, tuple(doubts))


def _one_after_the_other(nodes: Column, recording_nodes: Column) -> bool:
    """Whether most nodes that record follow each other, as in a backward that is itself to be differentiated."""
    records = np.isin(nodes, recording_nodes)
    return bool((records[1:] & records[:-1]).sum() > _MOST_NEIGHBOURS * len(recording_nodes))


def _compiled(recording: Recording) -> Iterator[str]:
    if any(name.endswith(_COMPILED) for name in recording.names):
        yield "What a compiled region computes again in its backward is part of its kernels, and is not told apart."


Which = npt.NDArray[np.bool_]  # of the operators of a recording


def kinds_of_work(recording: Recording, again: Which) -> list[str]:
    """The kind of each piece of device work: of its operator, else of its own name; copies are ``copy``.

    Computation by operators that run ``again`` is recomputation, whatever it is.
    """
    work, of = recording.work, recording.operator_of_work
    updates = _during(recording, UPDATE)
    by_operator = [kind_of_operator(each) for each in recording.names]
    by_kernel = [COMMUNICATION if is_collective(each) else kind_of_kernel(each) for each in recording.names]
    found = []
    for name, kind, operator in zip(work.names.tolist(), work.kinds.tolist(), of.tolist(), strict=True):
        what = by_kernel[name]
        if kind:
            what = "copy"
        elif what != COMMUNICATION and operator != NONE and again[operator]:
            what = RECOMPUTATION
        elif what not in (COMMUNICATION, "attention") and operator != NONE:
            if updates[operator]:
                what = "optimizer"
            elif (said := by_operator[recording.operators.names[operator]]) != "other":
                what = said
        found.append(what)
    return found


def _during(recording: Recording, pattern: re.Pattern[str]) -> Which:
    """Whether each operator begins inside an annotation of such a name on its own thread."""
    around, operators = recording.named(recording.annotations, pattern), recording.operators
    inside = np.zeros(len(operators), dtype=bool)
    for begin, end, lane in zip(around.begins_ns, around.ends_ns, around.lanes, strict=True):
        first, last = np.searchsorted(operators.begins_ns, [begin, end])
        inside[first:last] |= operators.lanes[first:last] == lane
    return inside


def calls_on_host(recording: Recording) -> dict[str, Intervals]:
    """Of a program without a device: the moments inside operators that call collectives, by kind of collective."""
    operators = recording.operators
    kinds = np.array([collective_named(each) if is_collective(each) else "" for each in recording.names], dtype=object)
    of = kinds[operators.names] if len(operators) else kinds[:0]
    return {
        kind: union(operators.begins_ns[of == kind], operators.ends_ns[of == kind]) for kind in sorted({*of} - {""})
    }


def kinds_on_host(recording: Recording, again: Which) -> dict[str, Intervals]:
    """Of a program without a device: the moments in which operators of each kind run, outside those they call."""
    operators = recording.operators
    updates = _during(recording, UPDATE)
    kinds = [kind_on_host(each) for each in recording.names]
    pieces: dict[str, list[tuple[int, int]]] = {}
    for begin, end, index in alone(operators):
        kind = kinds[operators.names[index]]
        if kind != COMMUNICATION:
            kind = RECOMPUTATION if again[index] else "optimizer" if updates[index] else kind
        pieces.setdefault(kind, []).append((begin, end))
    found = {}
    for kind, each in pieces.items():
        both = np.array(sorted(each), dtype=np.int64)
        found[kind] = union(both[:, 0], both[:, 1])
    return found


def alone(spans: Spans) -> list[tuple[int, int, int]]:
    """The moments in which each span is the innermost of its lane: its beginning, its end and its index."""
    found: list[tuple[int, int, int]] = []
    for lane in np.unique(spans.lanes):
        indices = np.flatnonzero(spans.lanes == lane)
        begins, ends = spans.begins_ns[indices].tolist(), spans.ends_ns[indices].tolist()
        open_: list[tuple[int, int]] = []  # end and index of the spans that a moment lies in, the innermost last
        at = 0
        for begin, end, index in zip(begins, ends, indices.tolist(), strict=True):
            while open_ and open_[-1][0] <= begin:
                last, inner = open_.pop()
                found.append((at, last, inner))
                at = max(at, last)
            if open_:
                found.append((at, begin, open_[-1][1]))
            at = begin
            open_.append((min(end, open_[-1][0]) if open_ else end, index))
        while open_:
            last, inner = open_.pop()
            found.append((at, last, inner))
            at = max(at, last)
    return [each for each in found if each[1] > each[0]]
