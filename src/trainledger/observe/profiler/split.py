"""What the matmuls and the exposed communication of a step consist of, each moment given to one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from trainledger.observe.profiler.flops import Multiplied
from trainledger.observe.profiler.intervals import Intervals, common, length, union, without
from trainledger.observe.profiler.recording import NONE, Recording, Spans
from trainledger.observe.profiler.step_time import EXPOSED, Timeline, moments_of
from trainledger.observe.profiler.steps import Step

Key = TypeVar("Key")

COMPUTE_PARTS = ("matmul", "attention", "convolution")


@dataclass(frozen=True)
class Split:
    """Nanoseconds of a step's parts by what ran in them.

    ``matmuls`` are the moments of matmuls, attention and convolutions by kind, shape, format and whether they run
    again (as `MatmulRate.key` has it); ``collectives`` those of exposed communication by kind of collective.
    """

    matmuls: Mapping[tuple[str, str, str, bool], int]
    collectives: Mapping[str, int]


def split(recording: Recording, times: Timeline, found: Multiplied, step: Step) -> Split:
    """The moments of a step's matmuls and of its exposed communication, each given to the first that was running."""
    moments = moments_of(times, step)
    computing = [moments[each] for each in COMPUTE_PARTS]
    begin, end = step.device_ns
    ran = recording.work if recording.on_device else recording.operators
    inside = np.flatnonzero((ran.begins_ns < end) & (ran.ends_ns > begin))
    kinds = times.work_kinds or (COMPUTE_PARTS[0],) * len(ran)
    chosen = [at for at in inside.tolist() if found.of_work[at] != NONE and kinds[at] in COMPUTE_PARTS]

    def matmul_at(at: int) -> tuple[str, str, str, bool]:
        operator = int(found.of_work[at])
        matmul = found.matmuls[operator]
        return matmul.kind, matmul.shape, matmul.dtype, bool(times.recomputed.operators[operator])

    by_matmul: dict[tuple[str, str, str, bool], int] = {}
    for part in computing:
        for key, own in _by_key(ran, chosen, matmul_at, part).items():
            by_matmul[key] = by_matmul.get(key, 0) + length(own)
    sent = exposed_by_kind(times, step, moments[EXPOSED])
    return Split(by_matmul, {kind: length(own) for kind, own in sent.items()})


def exposed_by_kind(times: Timeline, step: Step, exposed: Intervals) -> dict[str, Intervals]:
    """The moments of a step's exposed communication by kind of collective, where several run of the first of them.

    A host calls a collective before, and often waits in the call after, what its backend says that it runs.
    """
    begin, end = step.device_ns
    sent = times.sent
    there = np.flatnonzero((sent.spans.begins_ns < end) & (sent.spans.ends_ns > begin)).tolist()
    found = _by_key(sent.spans, there, lambda at: sent.kinds[at], exposed)
    for each in found.values():
        exposed = without(exposed, each)
    for kind, calls in times.calls.items():
        own = common(exposed, calls)
        if len(own):
            both = np.concatenate([found[kind], own]) if kind in found else own
            both = both[np.argsort(both[:, 0], kind="stable")]
            found[kind], exposed = union(both[:, 0], both[:, 1]), without(exposed, own)
    return found


def _by_key(ran: Spans, chosen: list[int], key_of: Callable[[int], Key], left: Intervals) -> dict[Key, Intervals]:
    """The moments of a part that each of these has, where several run the first of them."""
    places: dict[Key, list[int]] = {}
    for at in chosen:
        places.setdefault(key_of(at), []).append(at)
    found = {}
    for key, some in places.items():
        there = common(left, union(ran.begins_ns[some], ran.ends_ns[some]))
        if len(there):
            found[key], left = there, without(left, there)
    return found
