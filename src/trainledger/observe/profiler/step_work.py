"""The kernels, the matmuls and the collectives of a step: what each is, how often it ran, and for how long."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from trainledger.observe.profiler.collectives import payload_nbytes
from trainledger.observe.profiler.flops import Matmul, MatmulRate, Multiplied
from trainledger.observe.profiler.operators import Which
from trainledger.observe.profiler.recording import NONE, Message, Recording
from trainledger.observe.profiler.step_time import Timeline
from trainledger.observe.profiler.steps import Step

Key = TypeVar("Key")

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
