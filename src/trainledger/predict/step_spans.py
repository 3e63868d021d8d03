"""The step of a layout as spans to draw: what runs from when to when, on which stream or stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainledger.ledger.ranks import RankAccount
from trainledger.predict.layout_time import after_last, pipeline_of, slowest_send
from trainledger.predict.pipeline_time import NAMES, Stage, TaskSpan, pipeline_ends, pipeline_spans
from trainledger.predict.rank_time import Span, Streams, rank_seconds
from trainledger.predict.roofline import Machine
from trainledger.predict.stage_time import StageTime, stages_of
from trainledger.spec.cluster import Device
from trainledger.spec.layout import overlaps
from trainledger.spec.run import Run

DRAWN = 24  # micro-batches of a pipeline that are drawn one by one


def spans(run: Run, ranks: Sequence[RankAccount], machine: Machine) -> tuple[Span, ...]:
    """A step's spans: of one rank on its streams, or of a pipeline one micro-batch after another on each stage.

    Rounds that are alike are one span, which says how many. Stragglers and waiting for the program are not drawn.
    Raises NoRate where a rate or a link is not known.
    """
    fabric, contention = None, 0.0
    if isinstance(machine, Device):
        fabric, contention = machine.step_fabric, machine.contention_share
    stages = stages_of(run, ranks, machine, fabric)
    if run.layout.pipeline > 1:
        return tuple(_of_pipeline(run, stages, contention))
    found: list[Span] = []
    streams = Streams(contention=contention, record=found.append)
    streams.run(stages[0].whole)
    streams.settle()
    return tuple(found)


def _of_pipeline(run: Run, stages: Sequence[StageTime], contention: float) -> Iterator[Span]:
    ready, send = pipeline_of(stages, contention), slowest_send(stages)
    schedule, micro_batches, paired = run.layout.schedule, run.grad_accum, overlaps(run.layout, "experts")
    ends = pipeline_ends(ready, micro_batches, schedule, send, paired=paired)
    there = [end + after_last(each, contention) for end, each in zip(ends, stages, strict=True)]
    for stage, tasks in zip(stages, _drawn(ready, micro_batches, schedule, send, ends, paired), strict=True):
        name = f"stage {stage.number + 1}"
        if ready[stage.number].begins:
            yield Span("gather parameters", name, 0.0, ready[stage.number].begins, "communication")
        yield from (Span(label, name, start, end, what) for label, start, end, what in tasks)
        if there[stage.number] > ends[stage.number]:
            yield Span("sum gradients", name, ends[stage.number], there[stage.number], "communication")
        close = rank_seconds(stage.close, contention=contention)
        yield Span("clip and update", name, max(there), max(there) + close, "update")


Drawn = list[tuple[str, float, float, str]]


def _drawn(
    ready: Sequence[Stage], micro_batches: int, schedule: str, send: float, ends: Sequence[float], paired: bool
) -> list[Drawn]:
    """The tasks of each stage; of many micro-batches the first and the last, those between as one."""
    stages = len(ready)
    some = max(DRAWN // stages, 3) * stages + micro_batches % stages
    if some >= micro_batches:
        whole = pipeline_spans(ready, micro_batches, schedule, send, paired=paired)
        return [[_task(each) for each in row] for row in whole]
    found = []
    for row, end in zip(pipeline_spans(ready, some, schedule, send, paired=paired), ends, strict=True):
        later, half = end - row[-1].end, len(row) // 2
        first = [_task(each) for each in row[:half]]
        last = [_task(each, micro_batches - some, later) for each in row[half:]]
        between = (f"{micro_batches - some} more micro-batches", first[-1][2], last[0][1], "more")
        found.append([*first, between, *last])
    return found


def _task(span: TaskSpan, ahead: int = 0, later: float = 0.0) -> tuple[str, float, float, str]:
    what, chunk, batch = span.task
    of = f", chunk {chunk + 1}" if chunk else ""
    return f"{NAMES[what]} {batch + 1 + ahead}{of}", span.start + later, span.end + later, NAMES[what]
