"""The steps in a recording: where each begins and ends on the host, and on the device.

A device works behind its host: a step is there from its first kernel to the first of the next step, by the launch of
each. Steps are those that the program's profiler was told of (`ProfilerStep#N`); else they end where an optimizer
updates; else they are found by repetition of what is launched.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainledger.observe.profiler.kinds import UPDATE
from trainledger.observe.profiler.recording import NONE, Recording, Spans

_MARKED = re.compile(r"^ProfilerStep#(\d+)$")
_LEAST_ALIKE = 0.95  # of what two neighbouring steps launch
_LEAST_COVERED = 0.5  # of the recording, by the steps that are found
_MOST = 0.8  # of neighbouring steps: some also evaluate or save
_TRIED_OF_A_COUNT = 8  # names that occur equally often


@dataclass(frozen=True)
class Step:
    """One step: its name, when it began and ended on the host, and on the device (nanoseconds)."""

    name: str
    host_ns: tuple[int, int]
    device_ns: tuple[int, int]

    @property
    def nanoseconds(self) -> int:
        return self.device_ns[1] - self.device_ns[0]


@dataclass(frozen=True)
class Steps:
    """The steps that are whole in a recording, and how they were found."""

    steps: tuple[Step, ...]
    found_by: str


def steps_of(recording: Recording) -> Steps:
    """The steps, in their order; of a recording without any sign of them the whole is one."""
    for find in (_by_marks, _by_updates, _by_repetition):
        edges, names, found_by = find(recording)
        if len(edges) > 1:
            return Steps(_on_device(recording, edges, names), found_by)
    first, last = extent(recording)
    return Steps((Step("all", (first, last), _extent_of(recording)),), "the whole recording, as nothing in it repeats")


def extent(recording: Recording) -> tuple[int, int]:
    """When the first event on the host begins and the last one ends."""
    there = [spans for spans in (recording.operators, recording.launches, recording.annotations) if len(spans)]
    there = there or [recording.work]
    return min(int(spans.begins_ns[0]) for spans in there), max(int(spans.ends_ns.max()) for spans in there)


def _extent_of(recording: Recording) -> tuple[int, int]:
    work = recording.work
    return (int(work.begins_ns[0]), int(work.ends_ns.max())) if recording.on_device else extent(recording)


def _by_marks(recording: Recording) -> tuple[list[int], list[str], str]:
    marks = recording.named(recording.annotations, _MARKED)
    edges = [*marks.begins_ns.tolist(), *marks.ends_ns.tolist()[-1:]]
    return edges, [recording.names[name].partition("#")[2] for name in marks.names], "ProfilerStep annotations"


def _by_updates(recording: Recording) -> tuple[list[int], list[str], str]:
    """From the last update of a step to that of the next one; what stands before the first such end is cut off."""
    updates = recording.named(recording.annotations, UPDATE)
    order = np.argsort(updates.ends_ns, kind="stable")
    first, period = _updates_of_a_step(recording, updates.ends_ns[order], updates.names[order])
    edges = updates.ends_ns[order][first::period].tolist()
    names = [str(index + 2) for index in range(len(edges) - 1)]
    return edges, names, "the ends of Optimizer.step annotations" + (f", {period} a step" if period > 1 else "")


def _updates_of_a_step(
    recording: Recording, ends: npt.NDArray[np.int64], names: npt.NDArray[np.int64]
) -> tuple[int, int]:
    """The first update that ends a step, and how many updates a step has: the fewest that repeat as a whole.

    Updates of several optimizers, of a container and those inside of it, of a class and the one above it: the same
    names follow each other, and what runs between is nearly the same each time. The last of a step is the one before
    most operators. Where nothing repeats, as with evaluations in between, each update ends a step.
    """
    operators = _busiest_thread(recording.operators)
    counts = np.diff(np.searchsorted(operators.begins_ns, ends))  # of operators between an update and the next
    for period in range(1, len(ends) // 2 + 1):
        one, other = counts[:-period], counts[period:]
        alike = np.minimum(one, other) >= _LEAST_ALIKE * np.maximum(one, other)
        if (names[:-period] == names[period:]).all() and len(alike) and np.mean(alike) >= _MOST:
            by_place = [float(np.median(counts[at::period])) for at in range(period)]
            return int(np.argmax(by_place)), period
    return 0, 1


def _by_repetition(recording: Recording) -> tuple[list[int], list[str], str]:
    """From one occurrence of a name to the next, where what lies between is nearly the same each time.

    Names that occur most often are tried first, as the shortest period is the step; layers within one fail, as what
    lies between the last of a step and the first of the next is something else.
    """
    operators = _busiest_thread(recording.operators)
    for what, when in ((operators, operators.begins_ns), (recording.work, launched(recording))):
        names, tried = what.names, Counter[int]()
        for name, count in Counter(names.tolist()).most_common():
            if count < 2 or tried[count] == _TRIED_OF_A_COUNT:
                continue
            tried[count] += 1
            places = np.flatnonzero(names == name)
            if _alike(names, places):
                begins = when[places]
                return begins.tolist(), [str(index + 1) for index in range(len(begins) - 1)], "repetition"
    return [], [], ""


def _busiest_thread(operators: Spans) -> Spans:
    if not len(operators):
        return operators
    lanes, counts = np.unique(operators.lanes, return_counts=True)
    return operators.where(operators.lanes == lanes[counts.argmax()])


def _alike(names: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> bool:
    """Whether the names between any two neighbouring places are those of the first two, but for a twentieth.

    Before and after them stand parts of steps, whose names are among those of a whole one: so layers are no steps.
    """
    first = None
    for begin, end in itertools.pairwise(places.tolist()):
        there = np.bincount(names[begin:end], minlength=int(names.max()) + 1)
        if first is None:
            first = there
        elif np.minimum(first, there).sum() < _LEAST_ALIKE * max(first.sum(), there.sum()):
            return False
    assert first is not None
    outside = np.concatenate([names[: places[0]], names[places[-1] :]])
    covered = (places[-1] - places[0]) >= _LEAST_COVERED * len(names)
    return bool(covered and np.mean(first[outside] > 0) >= _LEAST_ALIKE and (len(places) > 2 or len(outside)))


def launched(recording: Recording) -> npt.NDArray[np.int64]:
    """When each piece of device work was launched on the host.

    Work without a launch in the recording was launched with what stands before it in its stream, and what stands before
    all launches, before the recording began.
    """
    work, of = recording.work, recording.launch_of_work
    if not (of != NONE).any():
        return work.begins_ns
    found = np.where(of != NONE, recording.launches.begins_ns[of], np.iinfo(np.int64).min)
    for lane in np.unique(work.lanes):
        there = work.lanes == lane
        found[there] = np.maximum.accumulate(found[there])
    return found


def _on_device(recording: Recording, edges: list[int], names: list[str]) -> tuple[Step, ...]:
    hosts = list(itertools.pairwise(edges))
    if not recording.on_device:
        return tuple(Step(name, host, host) for name, host in zip(names, hosts, strict=True))
    when, work = launched(recording), recording.work
    begins = [int(min(work.begins_ns[when >= edge], default=edge)) for edge in edges[:-1]]
    end = int(max(work.ends_ns[(when >= edges[-2]) & (when < edges[-1])], default=begins[-1]))
    if len(begins) > 1:  # what the device still does after as long as a step takes would be in the time of the next one
        usual = max(hosts[-1][1] - hosts[-1][0], int(np.median(np.diff(begins))))
        end = min(end, begins[-1] + usual)
    return tuple(
        Step(name, host, (begin, max(begin, after)))
        for name, host, begin, after in zip(names, hosts, begins, [*begins[1:], end], strict=True)
    )
