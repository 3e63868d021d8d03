"""Operators that activation checkpointing runs again: forward operators inside of a backward.

Autograd's engine evaluates a node without recording what runs in it; a checkpointed region runs again with recording
on, as its backward needs a graph. So an operator inside of a node that was given a sequence number of its own (a
backward's have that of their forward, with the thread which ran that) is recomputed, with all that it calls. This is so
where the node is `CheckpointFunctionBackward` (reentrant; the backward inside of it is in nodes of its own), and where
a saved tensor is unpacked in any other node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainledger.observe.profiler.recording import GIVEN_A_NUMBER, NONE, Column, Recording, one_by_one

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
