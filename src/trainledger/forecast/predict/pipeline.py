"""The time of a pipeline: stages that hand micro-batches to each other, in the order of a schedule.

Sizes: P stages, S a stage counted from 0, V chunks of layers on each stage, M micro-batches of a step. Every forward
waits for the chunk before it, every backward for the chunk behind it, and each stage does one thing at a time in a
fixed order:

- gpipe (Huang et al. 2019): all forwards, then all backwards.
- 1f1b (Narayanan et al. 2019, PipeDream-Flush): P - S - 1 forwards ahead, then one forward and one backward in turn.
- interleaved (Narayanan et al. 2021, section 2.2): the same over chunks, P micro-batches of one chunk at a time, with
  2 (P - S - 1) + (V - 1) P chunks ahead.
- zero-bubble, as ZB-H1 (Qi et al. 2023, section 2.3): a backward's part for the weights waits until there is nothing
  else to do, but no longer than 1f1b's memory allows.

Where a micro-batch's messages overlap another one's compute (`Layout.overlap` has ``experts``), a forward and the
backward after it run at once, and count one after the other; forwards ahead of all backwards and backwards behind
all forwards overlap no other and take longer. An interleaved pipeline then has one forward more ahead, so that
no backward waits for the forward that it overlaps (Megatron Core, schedules.py, num_warmup_microbatches).

For equal stages without sends the bubble of gpipe and 1f1b is (P - 1) (F + B), of interleaved (P - 1) (F + B) / V, of
ZB-H1 (P - 1) (F + B - 2 W), where F, B and W are a micro-batch's seconds on a stage: forward, backward in all, and the
weights' part of that (Narayanan et al. 2021, section 2.2; Qi et al. 2023, table 2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from trainledger.spec.frozen import frozen

FORWARD, BACKWARD, WEIGHTS = 0, 1, 2
NAMES = ("forward", "backward", "weights")
Task = tuple[int, int, int]  # what, chunk of the stage, micro-batch
WHOLE = 4096  # forwards of all stages that are followed before the rest is assumed to go on like the last rounds


@frozen
class Chunk:
    """Seconds of one micro-batch in a chunk of layers; ``backward`` without the weights' part, which is ``weights``.

    ``weights`` is 0 where the schedule does not set it apart. ``alone`` is what a forward and a backward take longer
    that overlap no other micro-batch.
    """

    forward: float
    backward: float
    weights: float = 0.0
    alone: tuple[float, float] = (0.0, 0.0)

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.weights


@frozen
class Stage:
    """A stage's chunks, in the order in which a forward goes through them, and when it can begin."""

    chunks: tuple[Chunk, ...]
    begins: float = 0.0


class TaskSpan(NamedTuple):
    """A forward, a backward or the weights' part of one on a stage, and when."""

    stage: int
    task: Task
    start: float
    end: float


def pipeline_ends(
    stages: Sequence[Stage], micro_batches: int, schedule: str, send_seconds: float, *, paired: bool = False
) -> list[float]:
    """When each stage has done its last backward; ``paired`` says that forwards and backwards run at once.

    Long pipelines are not followed to their end: once P micro-batches more make every stage later by the same amount,
    so do the others.

    >>> stages = [Stage((Chunk(1.0, 2.0),))] * 4
    >>> max(pipeline_ends(stages, 8, "1f1b", 0.0))  # (8 + 4 - 1) x 3
    33.0
    """
    period = len(stages)
    followed = max(4, WHOLE // (period * period * len(stages[0].chunks))) * period
    while followed + 3 * period < micro_batches:
        base = followed + micro_batches % period
        ends = [_ends(stages, base + more * period, schedule, send_seconds, paired) for more in range(3)]
        first, second = ([b - a for a, b in zip(x, y, strict=True)] for x, y in (ends[:2], ends[1:]))
        if all(abs(a - b) <= 1e-9 * abs(b) for a, b in zip(first, second, strict=True)):
            rounds = (micro_batches - base - 2 * period) // period
            return [end + rounds * each for end, each in zip(ends[2], second, strict=True)]
        followed *= 4
    return _ends(stages, micro_batches, schedule, send_seconds, paired)


def _ends(stages: Sequence[Stage], micro_batches: int, schedule: str, send_seconds: float, paired: bool) -> list[float]:
    if schedule == "zero-bubble":
        return _zero_bubble(stages, micro_batches, send_seconds, None)
    plan = plan_of(schedule, len(stages), len(stages[0].chunks), micro_batches, paired)
    return _follow(stages, plan, send_seconds)[0]


def pipeline_spans(
    stages: Sequence[Stage], micro_batches: int, schedule: str, send_seconds: float, *, paired: bool = False
) -> list[list[TaskSpan]]:
    """All that each stage does, in order."""
    spans: list[list[TaskSpan]] = [[] for _ in stages]
    if schedule == "zero-bubble":
        _zero_bubble(stages, micro_batches, send_seconds, spans)
        return spans
    chunks = len(stages[0].chunks)
    plan = plan_of(schedule, len(stages), chunks, micro_batches, paired)
    _, ends = _follow(stages, plan, send_seconds)
    orders = [iter(order(schedule, stage, len(stages), chunks, micro_batches, paired)) for stage in range(len(stages))]
    costs = _costs(stages)
    for (number, cost, _), end in zip(plan, ends, strict=True):
        spans[number].append(TaskSpan(number, next(orders[number]), end - costs[cost], end))
    return spans


# Of each task in an order in which none comes before what it reads: its stage, the place of its seconds, and which task
# of the plan has to have sent what it reads (-1: none on another stage).
Plan = list[tuple[int, int, int]]


@lru_cache(maxsize=16)  # the longest have some hundred thousand tasks
def plan_of(schedule: str, stages: int, chunks: int, micro_batches: int, paired: bool = False) -> Plan:
    """All tasks of a schedule whose order does not depend on their seconds."""
    orders = [order(schedule, stage, stages, chunks, micro_batches, paired) for stage in range(stages)]
    ahead = [_ahead(schedule, stage, stages, chunks, micro_batches, paired) for stage in range(stages)]
    total, batches = stages * chunks, micro_batches
    done = [[-1] * (total * batches) for _ in (FORWARD, BACKWARD)]  # places in the plan, by chunk of all stages
    at = [0] * stages
    plan: Plan = []
    left = sum(len(each) for each in orders)
    while left:
        before = left
        for number, tasks in enumerate(orders):
            while at[number] < len(tasks):
                what, chunk, batch = tasks[at[number]]
                place = chunk * stages + number
                reads = place - 1 if what == FORWARD else place + 1
                sent = -1
                if 0 <= reads < total:
                    sent = done[what][reads * batches + batch]
                    if sent < 0:
                        break
                done[what][place * batches + batch] = len(plan)
                alone = _is_alone(at[number], ahead[number], len(tasks))
                plan.append((number, 2 * (place + total * alone) + what, sent))
                at[number] += 1
                left -= 1
        assert left < before, "a schedule that deadlocks"
    return plan


def _costs(stages: Sequence[Stage]) -> list[float]:
    """Seconds of a forward and of a backward of each chunk, counted over all stages; then of those that are alone."""
    every = [stage.chunks[chunk] for chunk in range(len(stages[0].chunks)) for stage in stages]
    overlapped = [seconds for chunk in every for seconds in (chunk.forward, chunk.backward + chunk.weights)]
    alone = [seconds for chunk in every for seconds in chunk.alone]
    return [*overlapped, *(seconds + more for seconds, more in zip(overlapped, alone, strict=True))]


def _follow(stages: Sequence[Stage], plan: Plan, send_seconds: float) -> tuple[list[float], list[float]]:
    """When each stage is done with everything, and when each task of the plan is."""
    costs, free = _costs(stages), [stage.begins for stage in stages]
    ends: list[float] = []
    for number, cost, sent in plan:
        start = free[number]
        if sent >= 0 and (ready := ends[sent] + send_seconds) > start:
            start = ready
        free[number] = end = start + costs[cost]
        ends.append(end)
    return free, ends


def order(schedule: str, stage: int, stages: int, chunks: int, micro_batches: int, paired: bool = False) -> list[Task]:
    """What a stage does, in order; ``paired`` as in `pipeline_ends`.

    >>> order("1f1b", 1, 2, 1, 2)
    [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1)]
    """
    forwards = _rounds(FORWARD, stages, chunks, micro_batches)
    backwards = _rounds(BACKWARD, stages, chunks, micro_batches)
    ahead = _ahead(schedule, stage, stages, chunks, micro_batches, paired)
    tasks = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        tasks += [forward, backward]
    return tasks + backwards[len(forwards) - ahead :]


def _ahead(schedule: str, stage: int, stages: int, chunks: int, micro_batches: int, paired: bool) -> int:
    """Forwards before the first that a backward follows."""
    if schedule == "gpipe":
        return chunks * micro_batches
    if schedule == "interleaved":
        return min(chunks * micro_batches, 2 * (stages - stage - 1) + (chunks - 1) * stages + paired)
    return min(chunks * micro_batches, stages - stage - 1)


def _is_alone(place: int, ahead: int, tasks: int) -> bool:
    """Whether what a stage does at this place of its order overlaps no micro-batch in the other pass."""
    return place < ahead or place >= tasks - ahead


def _rounds(what: int, stages: int, chunks: int, micro_batches: int) -> list[Task]:
    """P micro-batches of the first chunk, as many of the next; backwards from the last chunk to the first."""
    if chunks == 1:
        return [(what, 0, batch) for batch in range(micro_batches)]
    found: list[Task] = []
    for begin in range(0, micro_batches, stages):
        some = range(begin, min(begin + stages, micro_batches))
        for chunk in range(chunks) if what == FORWARD else range(chunks - 1, -1, -1):
            found += [(what, chunk, batch) for batch in some]
    return found


def _zero_bubble(
    stages: Sequence[Stage], micro_batches: int, send_seconds: float, spans: list[list[TaskSpan]] | None
) -> list[float]:
    """ZB-H1: 1f1b's order of forwards and backwards, the weights' parts in the gaps; when each stage is done."""
    # A stage holds what 1f1b holds on the first: P micro-batches whose weights' part is not done. What is waiting is
    # done when the next forward or backward is not there yet, or has no room.
    count = len(stages)
    orders = [order("1f1b", number, count, 1, micro_batches) for number in range(count)]
    ahead = [_ahead("1f1b", number, count, 1, micro_batches, False) for number in range(count)]
    # When the forwards and the backwards of each stage end, by micro-batch, and how many weights' parts are done.
    forward_ends, backward_ends = ([list[float]() for _ in stages] for _ in range(2))
    weights, free = [0] * count, [each.begins for each in stages]

    def do_weights(number: int, start: float) -> float:
        end = start + stages[number].chunks[0].weights
        if spans is not None:
            spans[number].append(TaskSpan(number, (WEIGHTS, 0, weights[number]), start, end))
        weights[number] += 1
        return end

    left = sum(len(each) for each in orders)
    at = [0] * count
    while left:
        before = left
        for number, stage in enumerate(stages):
            each, tasks, place, now = stage.chunks[0], orders[number], at[number], free[number]
            forwards, backwards = forward_ends[number], backward_ends[number]
            while place < len(tasks):
                what, chunk, batch = tasks[place]
                neighbour = number - 1 if what == FORWARD else number + 1
                ready = 0.0 if what == FORWARD else forwards[batch]
                if 0 <= neighbour < count:
                    sent = forward_ends[neighbour] if what == FORWARD else backward_ends[neighbour]
                    if batch >= len(sent):
                        break
                    ready = max(ready, sent[batch] + send_seconds)
                full = what == FORWARD and len(forwards) - weights[number] >= count
                # As many weights' parts as fit before the next task can begin, one at least where there is no room.
                while weights[number] < len(backwards) and (full or now + each.weights <= ready + 1e-12):
                    now, full = do_weights(number, now), False
                start = max(now, ready)
                now = start + (each.forward if what == FORWARD else each.backward)
                if _is_alone(place, ahead[number], len(tasks)):
                    now += each.alone[what]
                if spans is not None:
                    spans[number].append(TaskSpan(number, (what, chunk, batch), start, now))
                (forwards if what == FORWARD else backwards).append(now)
                place += 1
            left -= place - at[number]
            at[number], free[number] = place, now
        assert left < before, "a schedule that deadlocks"
    for number in range(count):
        while weights[number] < micro_batches:
            free[number] = do_weights(number, free[number])
    return free


def critical_path(
    forward: Any,
    backward: Any,
    deferred: Any,
    *,
    ahead: Callable[[Any], Any],
    micro_batches: Any,
    chunks: Any,
    stages: int,
    sends: Any,
    alone: tuple[Any, Any] = (0.0, 0.0),
    rounds_alone: Any = 0.0,
) -> Any:
    """Seconds that a pipeline takes at least: through the stages ahead of each stage, and all its micro-batches.

    Sizes are arrays with an axis of stages, and the longest of their paths counts. ``forward`` and ``backward`` are
    seconds of a micro-batch in all ``chunks`` of a stage, ``ahead`` sums such seconds over the stages ahead of each,
    and ``sends`` are the seconds from the first stage to it and back. ``deferred`` is the part of a backward that waits
    for gaps (zero-bubble, else 0). ``alone`` is what a forward and a backward take longer that overlap no other
    micro-batch, as they do in ``rounds_alone`` of this stage's chunks and on the stages ahead of it.
    """
    import numpy as np

    longer, longer_back = alone
    first = ahead(forward + longer)
    last = ahead(backward + longer_back - deferred) - np.minimum(micro_batches, stages) * deferred
    own = np.minimum(rounds_alone, chunks * micro_batches) * (longer + longer_back)
    return micro_batches * (forward + backward) + sends + (first + np.maximum(0.0, last) + own) / chunks
