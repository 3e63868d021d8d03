"""Kernels, matmuls and collectives of a step: count, time, and each moment of the step given to one of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from trainledger.observe.profiler.flops import Matmul, MatmulRate, Multiplied
from trainledger.observe.profiler.kinds import payload_nbytes
from trainledger.observe.profiler.recording import (
    NONE,
    Intervals,
    Mask,
    Recording,
    Spans,
    common,
    length,
    merged,
    without,
)
from trainledger.observe.profiler.step_time import EXPOSED, Timeline, moments_of
from trainledger.observe.profiler.steps import Step

Key = TypeVar("Key")
Runs = tuple[int, int]  # how often, and nanoseconds (FLOPs, bytes) in all

COMPUTE_PARTS = ("matmul", "attention", "convolution")
_SAVING = re.compile(r"^(aten::)?detach$|^PythonDispatchMode$")


@dataclass(frozen=True)
class Split:
    """Nanoseconds of a step's parts by what ran in them.

    ``matmuls`` are the moments of matmuls, attention and convolutions by kind, shape, format and whether they run
    again (as `MatmulRate.key` has it); ``collectives`` those of exposed communication by kind of collective.
    """

    matmuls: Mapping[tuple[str, str, str, bool], int]
    collectives: Mapping[str, int]


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


def split(recording: Recording, times: Timeline, matmuls: Multiplied, step: Step) -> Split:
    """The moments of a step's matmuls and of its exposed communication, each given to the first that was running."""
    moments = moments_of(times, step)
    ran = recording.work if recording.on_device else recording.operators
    kinds = times.work_kinds or (COMPUTE_PARTS[0],) * len(ran)
    of = [at for at in ran.overlapping(step.device_ns).tolist() if matmuls.of_work[at] != NONE]
    multiplying = [at for at in of if kinds[at] in COMPUTE_PARTS]

    def key_of(at: int) -> tuple[str, str, str, bool]:
        operator = int(matmuls.of_work[at])
        matmul = matmuls.matmuls[operator]
        return matmul.kind, matmul.shape, matmul.dtype, bool(times.recomputed.operators[operator])

    by_matmul: dict[tuple[str, str, str, bool], int] = {}
    for part in COMPUTE_PARTS:
        for key, own in _by_key(ran, multiplying, key_of, moments[part]).items():
            by_matmul[key] = by_matmul.get(key, 0) + length(own)
    exposed = exposed_by_kind(times, step, moments[EXPOSED])
    return Split(by_matmul, {kind: length(own) for kind, own in exposed.items()})


def exposed_by_kind(times: Timeline, step: Step, exposed: Intervals) -> dict[str, Intervals]:
    """The moments of a step's exposed communication by kind of collective, where several run of the first of them."""
    sent = times.sent
    by_kind = _by_key(sent.spans, sent.spans.overlapping(step.device_ns).tolist(), sent.kinds.__getitem__, exposed)
    exposed = without(exposed, merged(*by_kind.values()))
    # A host calls a collective before, and often waits in the call after, what its backend says that it runs.
    for kind, calls in times.calls.items():
        own = common(exposed, calls)
        if len(own):
            by_kind[kind] = merged(by_kind[kind], own) if kind in by_kind else own
            exposed = without(exposed, own)
    return by_kind


def _by_key(ran: Spans, chosen: Sequence[int], key_of: Callable[[int], Key], left: Intervals) -> dict[Key, Intervals]:
    """The moments of a part that each of these has, where several run the first of them."""
    places: dict[Key, list[int]] = {}
    for at in chosen:
        places.setdefault(key_of(at), []).append(at)
    by_key = {}
    for key, some in places.items():
        own = common(left, ran.moments(some))
        if len(own):
            by_key[key], left = own, without(left, own)
    return by_key


def work_of(
    recording: Recording, times: Timeline, matmuls: Multiplied, step: Step
) -> tuple[tuple[KernelTime, ...], tuple[MatmulRate, ...]]:
    """The kernels and the matmuls of a step, those that take longest first."""
    again = times.recomputed.operators
    if not recording.on_device:
        return (), _rates(_matmuls_on_host(recording, step, matmuls, again), again)
    work = recording.work
    inside = np.flatnonzero(work.begin_in(step.device_ns)).tolist()
    lengths = (work.ends_ns - work.begins_ns).tolist()
    kernels = summed(((recording.names[work.names[at]], times.work_kinds[at]), (1, lengths[at])) for at in inside)
    of = summed((int(matmuls.of_work[at]), (1, lengths[at])) for at in inside if matmuls.of_work[at] != NONE)
    return (
        tuple(KernelTime(*key, *runs) for key, runs in _longest(kernels)),
        _rates(
            ((matmuls.matmuls[operator], operator, nanoseconds) for operator, (_, nanoseconds) in of.items()), again
        ),
    )


def collectives_of(times: Timeline, step: Step) -> tuple[Sent, ...]:
    """The collectives of a step that say what they send, those that take longest first."""
    spans, messages = times.sent.spans, times.sent.messages
    ran = summed(
        ((times.sent.kinds[at], message), (1, int(spans.ends_ns[at] - spans.begins_ns[at])))
        for at in times.sent.between(*step.device_ns)
        if (message := messages[at]) is not None
    )
    return tuple(
        Sent(kind, to.dtype, to.elements_in, to.elements_out, to.ranks, *runs, payload_nbytes(to))
        for (kind, to), runs in _longest(ran)
    )


def summed(ran: Iterable[tuple[Key, Runs]]) -> dict[Key, Runs]:
    """The runs of each key together."""
    by_key: dict[Key, Runs] = {}
    for key, (count, amount) in ran:
        before = by_key.get(key, (0, 0))
        by_key[key] = before[0] + count, before[1] + amount
    return by_key


def _longest(by_key: dict[Key, Runs]) -> list[tuple[Key, Runs]]:
    return sorted(by_key.items(), key=lambda each: -each[1][1])


def _matmuls_on_host(
    recording: Recording, step: Step, matmuls: Multiplied, again: Mask
) -> Iterator[tuple[Matmul, int, int]]:
    # A checkpointed region breaks its last matmul off, as it has all that it needs, and takes what it has kept in the
    # place of others. Those call nothing but what saves their inputs, where others of their name do.
    operators = recording.operators
    calling = np.unique(recording.callers[~recording.has_name(operators, _SAVING)])
    names = np.unique(operators.names[calling[calling != NONE]])
    idle = again & ~np.isin(np.arange(len(operators)), calling) & np.isin(operators.names, names)
    for index, matmul in matmuls.matmuls.items():
        ran = not idle[index] and index not in matmuls.around
        if ran and step.host_ns[0] <= operators.begins_ns[index] < step.host_ns[1]:
            yield matmul, index, int(operators.ends_ns[index] - operators.begins_ns[index])


def _rates(ran: Iterable[tuple[Matmul, int, int]], again: Mask) -> tuple[MatmulRate, ...]:
    """By matmul, of matmuls, the operators that ran them, and how long each took."""
    by_matmul = summed(((matmul, bool(again[operator])), (1, ns)) for matmul, operator, ns in ran)
    return tuple(_rate(*key, *runs) for key, runs in _longest(by_matmul))


def _rate(matmul: Matmul, recomputed: bool, count: int, nanoseconds: int) -> MatmulRate:
    flops, model_flops = matmul.flops * count, 0 if recomputed else matmul.model_flops * count
    what = matmul.kind, matmul.shape, matmul.dtype
    return MatmulRate(*what, count, flops, nanoseconds, recomputed, model_flops, matmul.sizes)
