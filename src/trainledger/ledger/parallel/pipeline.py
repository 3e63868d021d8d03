"""Pipelines: which layers each stage has, and how many micro-batches it has in flight by schedule.

Sizes: P stages, S the stage counted from 0, V chunks of layers on each rank, M micro-batches of a step.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.ledger.core.sizes import between, greater, is_zero, smaller
from trainledger.ledger.entry import Int
from trainledger.spec.frozen import frozen
from trainledger.spec.layers import Group, LayerRun
from trainledger.spec.layout import Layout, overlaps


@frozen
class Chunk:
    """Consecutive layers of a rank: ``count`` of them from ``first`` on, with the parameters before or after all."""

    first: Int
    count: Int
    begins: bool
    ends: bool


def chunks_of(layout: Layout, n_layers: Int, stage: int) -> tuple[Chunk, ...]:
    """The chunks of one stage in order; of V chunks to a rank, the stage has every P-th (Narayanan et al. 2021).

    >>> chunks_of(Layout(pipeline=2), 8, 1)
    (Chunk(first=4, count=4, begins=False, ends=True),)
    """
    stages, total = layout.pipeline, layout.pipeline * layout.virtual_stages
    chunks = []
    for number in range(stage, total, stages):
        if layout.stage_layers is None:
            count = n_layers // total
            first = number * count
        else:
            count, first = layout.stage_layers[number], sum(layout.stage_layers[:number])
        chunks.append(Chunk(first, count, number == 0, number == total - 1))
    return tuple(chunks)


def in_flight(layout: Layout, stage: int, micro_batches: Int) -> Int:
    """Forwards of a chunk that a stage has run before its first backward is over, that one's included.

    gpipe: all M (Huang et al. 2019). 1f1b: P - S (Narayanan et al. 2019, PipeDream-Flush). zero-bubble, as ZB-H1: P on
    every stage, since the weights' part of a backward waits there (Qi et al. 2023, section 3). Each counts as much as
    before its backward; what waits in torch 2.13 keeps more, as the first part frees nothing and leaves gradients for
    the second (`tests/engine/train/test_pipeline_witness.py`). interleaved: 2 (P - S - 1) + (V - 1) P + 1 chunks, as
    Megatron-LM's schedules.py has it (num_warmup_microbatches, and the one that runs); one more where forwards run
    together with backwards (overlap has ``experts``).

    >>> [in_flight(Layout(pipeline=4), stage, 8) for stage in range(4)]
    [4, 3, 2, 1]
    >>> [in_flight(Layout(pipeline=4, schedule="interleaved", virtual_stages=2), stage, 8) for stage in range(4)]
    [11, 9, 7, 5]
    """
    stages = layout.pipeline
    if stages == 1:
        return 1
    if layout.schedule == "gpipe":
        return micro_batches
    if layout.schedule == "interleaved":
        chunks = layout.virtual_stages
        ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages + overlaps(layout, "experts")
        return smaller(ahead + 1, micro_batches * chunks)
    return smaller(stages if layout.schedule == "zero-bubble" else stages - stage, micro_batches)


def in_flight_by_chunk(layout: Layout, stage: int, micro_batches: Int) -> tuple[Int, ...]:
    """The same with the chunk: forwards take P micro-batches of one chunk, then P of the next.

    >>> in_flight_by_chunk(Layout(pipeline=4, schedule="interleaved", virtual_stages=2), 0, 8)
    (7, 4)
    """
    total, stages, chunks = in_flight(layout, stage, micro_batches), layout.pipeline, layout.virtual_stages
    rounds, rest = total // (stages * chunks), total % (stages * chunks)
    return tuple(rounds * stages + between(rest - chunk * stages, 0, stages) for chunk in range(chunks))


def cut(runs: tuple[LayerRun, ...], chunk: Chunk) -> tuple[LayerRun, ...]:
    """The runs of layers that fall into a chunk; a group that is recomputed together ends with its chunk."""
    if chunk.begins and chunk.ends:
        return runs
    if len(runs) == 1 and len(runs[0].kinds) == 1:
        return (LayerRun(runs[0].kinds, runs[0].groups, chunk.count),)
    found: list[LayerRun] = []
    start, until = chunk.first, chunk.first + chunk.count
    at = 0
    for run in runs:
        size = len(run.kinds)
        low, high = max(start - at, 0), min(until - at, size * run.count)
        at += size * run.count
        if low < high:
            found.extend(_part(run, low, high))
    return tuple(found)


def _part(run: LayerRun, low: int, high: int) -> Iterator[LayerRun]:
    """The layers from ``low`` to ``high`` of a run: the end of a round, whole rounds, the beginning of one."""
    size = len(run.kinds)
    head = min(-low % size, high - low)
    if head:
        yield _piece(run, low % size, low % size + head)
    whole, tail = divmod(high - low - head, size)
    if whole:
        yield LayerRun(run.kinds, run.groups, whole)
    if tail:
        yield _piece(run, 0, tail)


def _piece(run: LayerRun, low: int, high: int) -> LayerRun:
    groups, at = [], 0
    for each in run.groups:
        size = min(high, at + each.size) - max(low, at)
        at += each.size
        if size > 0:
            groups.append(Group(size, each.again))
    return LayerRun(run.kinds[low:high], tuple(groups), 1)


def ends_apart(runs: tuple[LayerRun, ...], *, first: bool, last: bool) -> tuple[LayerRun, ...]:
    """The layers of a stage with the first or the last round separate.

    The input of a stage's first block is kept to the end, the output of its last is sent and freed: a loop cannot
    say so of the others. Runs of no layers are left out.
    """
    runs = tuple(each for each in runs if not is_zero(each.count))
    if first and runs:
        count = runs[0].count
        runs = (*_counted(runs[0], between(count, 0, 1), greater(count - 1, 0)), *runs[1:])
    if last and runs:
        count = runs[-1].count
        runs = (*runs[:-1], *_counted(runs[-1], greater(count - 1, 0), between(count, 0, 1)))
    return runs


def _counted(run: LayerRun, *counts: Int) -> Iterator[LayerRun]:
    for each in counts:
        if not is_zero(each):
            yield LayerRun(run.kinds, run.groups, each)


def standing_apart(runs: tuple[LayerRun, ...], ahead: int) -> tuple[LayerRun, ...]:
    """The same layers with the first ``ahead`` rounds and the last round of each run separate.

    The block before leaves what FSDP2 keeps while a block runs, so the first and last differ from the others.
    Counts that are arrays become arrays of zeros and ones.
    """
    found: list[LayerRun] = []
    for run in runs:
        counts = [between(run.count - number, 0, 1) for number in range(ahead)]
        counts += [greater(run.count - 1 - ahead, 0), between(run.count - ahead, 0, 1)]
        found += _counted(run, *counts)
    return tuple(found)
