"""Kernels, matmuls and collectives of a step: count, time, and each moment of the step given to one of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from trainledger.observe.profiler.collectives import payload_nbytes
from trainledger.observe.profiler.flops import Matmul, MatmulRate, Multiplied
from trainledger.observe.profiler.operators import Which
from trainledger.observe.profiler.recording import (
    NONE,
    Intervals,
    Message,
    Recording,
    Spans,
    common,
    length,
    union,
    without,
)
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


_SAVING = re.compile(r"^(aten::)?detach$|^PythonDispatchMode$")


@dataclass(frozen=True)
class KernelTime:
    """A kernel of the step: its kind, how often it ran and for how long (its runs may overlap others')."""

    name: str
    kind: str
    count: int
    nanoseconds: int


@dataclass(frozen=True)
class Sent:
    """A collective of the step: what it sends, how often, and how long its kernels ran, waits for others included.

    ``payload_nbytes`` is the whole message (`collectives.payload_nbytes`).
    """

    collective: str
    dtype: str
    elements_in: int
    elements_out: int
    ranks: int
    count: int
    nanoseconds: int
    payload_nbytes: int | None = None


def work_of(
    recording: Recording, times: Timeline, found: Multiplied, step: Step
) -> tuple[tuple[KernelTime, ...], tuple[MatmulRate, ...]]:
    """The kernels and the matmuls of a step, those that take longest first."""
    kinds, again = times.work_kinds, times.recomputed.operators
    if not recording.on_device:
        return (), _rates(_matmuls_on_host(recording, step, found, again), again)
    work, of = recording.work, found.of_work
    begin, end = step.device_ns
    inside = np.flatnonzero((work.begins_ns >= begin) & (work.begins_ns < end)).tolist()
    lengths = work.ends_ns - work.begins_ns
    kernels: dict[tuple[str, str], list[int]] = {}
    taken: dict[int, int] = {}
    for at in inside:
        nanoseconds = int(lengths[at])
        _add(kernels, (recording.names[work.names[at]], kinds[at]), nanoseconds)
        if of[at] != NONE:
            taken[int(of[at])] = taken.get(int(of[at]), 0) + nanoseconds
    return (
        tuple(KernelTime(*key, *both) for key, both in _longest(kernels)),
        _rates(((found.matmuls[operator], operator, nanoseconds) for operator, nanoseconds in taken.items()), again),
    )


def collectives_of(times: Timeline, step: Step) -> tuple[Sent, ...]:
    """The collectives of a step that say what they send, those that take longest first."""
    found: dict[tuple[str, Message], list[int]] = {}
    for at in times.sent.between(*step.device_ns):
        message = times.sent.messages[at]
        if message is not None:
            length = times.sent.spans.ends_ns[at] - times.sent.spans.begins_ns[at]
            _add(found, (times.sent.kinds[at], message), int(length))
    return tuple(
        Sent(kind, key.dtype, key.elements_in, key.elements_out, key.ranks, count, nanoseconds, payload_nbytes(key))
        for (kind, key), (count, nanoseconds) in _longest(found)
    )


def _matmuls_on_host(
    recording: Recording, step: Step, found: Multiplied, again: Which
) -> Iterable[tuple[Matmul, int, int]]:
    """Without those that are not run again: a checkpointed region breaks its last one off, as it has all that it needs,
    and takes what it has kept in the place of others. They call nothing but what saves their inputs, where others of
    their name do.
    """
    operators = recording.operators
    calling = np.unique(recording.callers[~recording.has_name(operators, _SAVING)])
    names = set(operators.names[calling[calling != NONE]].tolist())
    idle = again & ~np.isin(np.arange(len(operators)), calling) & np.isin(operators.names, list(names))
    for index, matmul in found.matmuls.items():
        if idle[index] or index in found.around:
            continue
        if step.host_ns[0] <= operators.begins_ns[index] < step.host_ns[1]:
            yield matmul, index, int(operators.ends_ns[index] - operators.begins_ns[index])


def _rates(ran: Iterable[tuple[Matmul, int, int]], again: Which) -> tuple[MatmulRate, ...]:
    """By matmul, of matmuls, the operators that ran them, and how long each took."""
    by_matmul: dict[tuple[Matmul, bool], list[int]] = {}
    for matmul, operator, nanoseconds in ran:
        _add(by_matmul, (matmul, bool(again[operator])), nanoseconds)
    return tuple(_rate(*key, *both) for key, both in _longest(by_matmul))


def _rate(matmul: Matmul, recomputed: bool, count: int, nanoseconds: int) -> MatmulRate:
    model_flops = 0 if recomputed else matmul.model_flops * count
    return MatmulRate(
        matmul.kind, matmul.shape, matmul.dtype, count, matmul.flops * count, nanoseconds, recomputed, model_flops,
        matmul.sizes,
    )  # fmt: skip


def _add(known: dict[Key, list[int]], key: Key, nanoseconds: int) -> None:
    both = known.setdefault(key, [0, 0])
    both[0] += 1
    both[1] += nanoseconds


def _longest(known: dict[Key, list[int]]) -> list[tuple[Key, list[int]]]:
    return sorted(known.items(), key=lambda each: -each[1][1])
