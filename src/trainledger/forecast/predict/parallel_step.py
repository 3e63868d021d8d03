"""The time of one optimizer step over several devices: the slowest path through its ranks, and its spans to draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

from trainledger.forecast.predict.clock import measured_fabric, of_each_rank, rank_contention
from trainledger.forecast.predict.overlap import times_of
from trainledger.forecast.predict.pipeline import NAMES, Chunk, Stage, TaskSpan, pipeline_ends, pipeline_spans
from trainledger.forecast.predict.roofline import (
    EntryTime,
    Machine,
    NoRate,
    ideal_seconds,
    launched_as,
    matmul_dtype_of,
)
from trainledger.forecast.predict.stage import StageTime, stages_of, with_free_links
from trainledger.forecast.predict.step import CAUSES, StepTime, basis_of, causes_of, launched_one_by_one, step_of_one
from trainledger.forecast.predict.stream_ops import StreamOp, compute_seconds, flat
from trainledger.forecast.predict.streams import Span, Streams, rank_seconds
from trainledger.ledger.core.sizes import added
from trainledger.ledger.ranks import RankAccount
from trainledger.spec.cluster import Cluster, Fabric, Link
from trainledger.spec.device import Device
from trainledger.spec.layout import overlaps
from trainledger.spec.run import Run
from trainledger.spec.units import ceil_div, format_nbytes, format_percent

Result = TypeVar("Result")

NO_LINK = "no step time: no link between devices of this machine was measured"


def layout_time(ranks: Sequence[RankAccount], machine: Machine, *, tensors: int = 0) -> StepTime:
    """Predicted time of one step of a run with a layout, from the accounts of its ranks (`ledger.ranks.accounts`).

    Of one device it is `step_time` with its ``tensors``. Causes are means over the devices: ``exposed communication``
    is what the step would be shorter by if links took no time, ``pipeline bubble`` what the slowest path is longer than
    the mean device computes (uneven stages included), ``stragglers`` what slow nodes add
    (`Efficiency.straggler_share`). ``seconds`` is None, and a note says why, where a rate or a link is not known.
    """
    run = ranks[0].plan.whole
    machine = launched_as(run.recipe, machine)
    if run.layout.alone:
        return step_of_one(run, ranks[0].ledger, machine, tensors=tensors)
    basis, notes = basis_of(machine)
    machine, fabric, contention = of_layout(run, machine)
    if fabric is None:
        return StepTime(None, {}, {}, {}, basis, (NO_LINK,))
    try:
        stages = stages_of(ranks, machine, fabric)
        shares = shares_of(stages)
        # One dtype for all stages: that of most matmuls, though the head's may be most of the last one's.
        dtype = matmul_dtype_of((stage.ledger, share) for stage, share in shares)
        ideal = {id(stage_time.ledger): ideal_seconds(stage_time.ledger, machine, dtype) for stage_time, _ in shares}
    except NoRate as reason:
        return StepTime(None, {}, {}, {}, basis, (f"no step time: {reason}",))
    seconds = step_seconds(run, stages, contention)
    computing = sum(share * sum(time.seconds for time in stage.times) for stage, share in shares)
    free = computing
    if run.layout.pipeline > 1:
        free = step_seconds(run, once_for_alike(stages, with_free_links), 0.0)
    causes = dict.fromkeys(CAUSES, 0.0)
    for stage, share in shares:
        for name, cause in causes_of(stage.times, ideal[id(stage.ledger)]).items():
            causes[name] = causes.get(name, 0.0) + share * cause
    causes["pipeline bubble"] = free - computing
    causes["exposed communication"] = seconds - free
    launches = max(sum(time.launch_seconds for time in stage.times) for stage, _ in shares)
    waiting = max(seconds, launches) - seconds
    if run.layout.pipeline > 1 and any(launch_bound(stage_time) for stage_time, _ in shares):
        waiting = max(waiting, step_seconds(run, stages, contention, launching=True) - seconds)
    causes["launch overhead"] += waiting
    slower = straggling(run, machine, fabric) * (seconds + waiting)
    causes["stragglers"] = slower
    others = {
        "collective": causes["exposed communication"],
        "bubble": causes["pipeline bubble"],
        "other": waiting,
        "stragglers": slower,
    }
    slowest = max((stage_time for stage_time, _ in shares), key=lambda stage_time: compute_seconds(stage_time.whole))
    notes += _notes(run, [stage_time for stage_time, _ in shares], machine, fabric)
    return StepTime(
        seconds=seconds + waiting + slower,
        by_phase=_mean(shares, "phase", others),
        by_kind=_mean(shares, "kind", others),
        by_bound=_mean(shares, "bound", others),
        basis=basis,
        notes=tuple(notes),
        entries=slowest.times,
        causes=causes,
        messages=tuple(
            EntryTime(message.entry, message.seconds * times_of(message.entry), "link") for message in slowest.messages
        ),
    )


def of_layout(run: Run, machine: Machine) -> tuple[Machine, Fabric | None, float]:
    """The machine that each rank has, what joins the ranks (None: not known), and what compute loses to collectives."""
    if isinstance(machine, Device):
        return machine, machine.step_fabric, machine.contention_share
    devices = run.layout.devices
    contention = rank_contention(machine, devices)
    return of_each_rank(machine, devices), measured_fabric(machine, devices), contention


def shares_of(stages: Sequence[StageTime]) -> list[tuple[StageTime, Any]]:
    """Of stages that are alike the first, and the share of all devices that they are."""
    devices = sum(stage.ranks for stage in stages)
    ranks = added((id(stage.times), stage.ranks) for stage in stages)
    firsts = {id(stage.times): stage for stage in reversed(stages)}
    return [(firsts[key], count / devices) for key, count in ranks.items()]


def _mean(shares: Sequence[tuple[StageTime, Any]], key: str, others: dict[str, float]) -> dict[str, float]:
    """Seconds of the mean device by an attribute, and of what is no operation."""
    operations = (
        (time.bound if key == "bound" else getattr(time.entry, key), time.seconds * share)
        for stage, share in shares
        for time in stage.times
    )
    split = added(chain(operations, others.items()))
    return {label: seconds for label, seconds in split.items() if seconds}


def straggling(run: Run, machine: Machine, fabric: Fabric) -> float:
    """The share that slow nodes add: so much for each doubling of their number."""
    if not isinstance(machine, Device) or machine.efficiency is None:
        return 0.0
    nodes: int = ceil_div(run.layout.devices, fabric.devices_per_node)
    return machine.efficiency.straggler_share * (nodes - 1).bit_length()


def _notes(run: Run, stages: Sequence[StageTime], machine: Machine, fabric: Fabric) -> list[str]:
    notes = launched_one_by_one(machine) if run.recipe.launch_blocking else []
    if fabric.network is not None and run.layout.devices > fabric.devices_per_node:
        network = network_text(run.cluster, fabric.network)
        note = f"{fabric.devices_per_node} devices per node over {fabric.node.title}, nodes over {network}"
        if fabric.network_share < 1:
            share = format_percent(fabric.network_share)
            note += f", of which collectives reach {share} in a step (network_share of the calibration)"
        notes.append(note)
    else:
        notes.append(f"all devices in one node, over {fabric.node.title}")
    if not isinstance(machine, Device) and machine.backend == "cpu":
        notes.append(f"assuming that {run.layout.devices} ranks share the cores of this machine evenly")
    found = {name for stage in stages for name, _ in stage.ledger.uncounted}
    if found:
        notes.append(f"FLOPs of operations without a rule are not included: {', '.join(sorted(found))}")
    return notes


def network_text(cluster: Cluster, network: Link) -> str:
    """The network between nodes: the catalog's, or the rate that the cluster says in its place.

    >>> from trainledger.spec.cluster import Link
    >>> network_text(Cluster(network_bytes_per_second=25 * 10**9), Link(name="ndr", title="NDR", bytes_per_second=25e9))
    'a network of 25 GB/s for each device (cluster.network_bytes_per_second) with the latencies of NDR'
    """
    of = f"with the latencies of {network.title}"
    reached = cluster.network_reached_bytes_per_second
    if reached is not None:
        # A bound is of the data sheet.
        at = f" of {format_nbytes(network.bytes_per_second)}/s" if network.bytes_per_second > reached else ""
        kept = " (not in this bound)" if network.basis == "bound" else ""
        measured = f"that was measured to reach {format_nbytes(reached)}/s{at} for each device{kept}"
        return f"a network {measured} (cluster.network_reached_bytes_per_second) {of}"
    if cluster.network_bytes_per_second is not None:
        rate = format_nbytes(cluster.network_bytes_per_second)
        return f"a network of {rate}/s for each device (cluster.network_bytes_per_second) {of}"
    return network.title


# The step


def step_seconds(run: Run, stages: Sequence[StageTime], contention: float, *, launching: bool = False) -> float:
    """Seconds from the first operation of any rank to the last of all.

    ``launching`` says that a pipeline's stage launches nothing of a micro-batch before what it reads has come
    (Megatron-LM waits so), and takes as long as that where launching is the slower.
    """
    if run.layout.pipeline == 1:
        return max(rank_seconds(stage.whole, contention=contention) for stage in stages)
    ready = pipeline_of(stages, contention, launching=launching)
    paired = overlaps(run.layout, "experts")
    ends = pipeline_ends(ready, run.grad_accum, run.layout.schedule, slowest_send(stages), paired=paired)
    after = once_for_alike(stages, lambda stage: after_last(stage, contention, launching=launching))
    close = once_for_alike(stages, lambda stage: rank_seconds(stage.close, contention=contention))
    return max(end + later for end, later in zip(ends, after, strict=True)) + max(close)


def once_for_alike(stages: Sequence[StageTime], of: Callable[[StageTime], Result]) -> list[Result]:
    """What a function makes of each stage's parts, asked once for stages that share theirs."""
    known: dict[int, Result] = {}
    for stage in stages:
        if id(stage.times) not in known:
            known[id(stage.times)] = of(stage)
    return [known[id(stage.times)] for stage in stages]


def pipeline_of(stages: Sequence[StageTime], contention: float, *, launching: bool = False) -> list[Stage]:
    """The stages as their pipeline sees them: when each can begin, and its seconds of a micro-batch."""
    return once_for_alike(stages, lambda stage: _in_pipeline(stage, contention, launching))


def _in_pipeline(stage: StageTime, contention: float, launching: bool) -> Stage:
    chunks = []
    for chunk in stage.chunks:
        ahead = rank_seconds(chunk.forward, contention=contention)
        back = rank_seconds(chunk.inputs, contention=contention)
        took = [ahead, back, chunk.weights]
        if launching:
            took = [max(*both) for both in zip(took, chunk.launches, strict=True)]
        chunks.append(Chunk(took[0], took[1], took[2], chunk.alone))
    return Stage(tuple(chunks), begins(stage, sum(chunk.forward for chunk in chunks), contention))


def begins(stage: StageTime, forward: float, contention: float) -> float:
    """When a stage can begin its first forward.

    Parameters that are gathered once a step are gathered block by block as the first micro-batch comes to them, while
    the block before computes: what shows is the first of them, and what takes longer than that forward.
    """
    streams = Streams(contention=contention)
    streams.run(stage.begin)
    first = 0.0
    for each in flat(stage.begin):
        first += each.seconds
        if each.kind == "unpack":
            return max(first, streams.compute - forward)
    return streams.compute


def launch_bound(stage: StageTime) -> bool:
    """Whether a stage's forwards or backwards take longer to launch than to compute."""
    return any(
        launches > seconds
        for chunk in stage.chunks
        for launches, seconds in zip(
            chunk.launches, (compute_seconds(chunk.forward), compute_seconds(chunk.inputs), chunk.weights), strict=True
        )
    )


def slowest_send(stages: Sequence[StageTime]) -> float:
    """Seconds from stage to stage: of equal messages the slowest of the sends."""
    return max(stage.send_seconds for stage in stages)


def after_last(stage: StageTime, contention: float, *, launching: bool = False) -> float:
    """What a stage's last reductions take beyond the last micro-batch's backward, which they overlap.

    A backward that is launched more slowly than it runs (``launching``) leaves them as long as that.
    """
    streams = Streams(contention=contention)
    if launching:
        last = stage.chunks[0]
        waits = sum(last.launches[1:]) - rank_seconds(last.backward, contention=contention)
        streams.run([StreamOp("work", max(0.0, waits), "launching", backward=True)])
    streams.run(stage.chunks[0].backward)
    alone = streams.compute
    streams.run(stage.end)
    streams.synchronize()
    return streams.compute - alone


DRAWN = 24  # micro-batches of a pipeline that are drawn one by one


def spans(ranks: Sequence[RankAccount], machine: Machine) -> tuple[Span, ...]:
    """A step's spans: of one rank on its streams, or of a pipeline one micro-batch after another on each stage.

    Rounds that are alike are one span, which says how many. Stragglers and waiting for the program are not drawn.
    Raises NoRate where a rate or a link is not known.
    """
    run = ranks[0].plan.whole
    machine, fabric, contention = of_layout(run, machine)
    stages = stages_of(ranks, machine, fabric)
    if run.layout.pipeline > 1:
        return tuple(_of_pipeline(run, stages, contention))
    found: list[Span] = []
    streams = Streams(contention=contention, record=found.append)
    streams.run(stages[0].whole)
    streams.synchronize()
    return tuple(found)


def _of_pipeline(run: Run, stages: Sequence[StageTime], contention: float) -> Iterator[Span]:
    ready, send = pipeline_of(stages, contention), slowest_send(stages)
    schedule, micro_batches, paired = run.layout.schedule, run.grad_accum, overlaps(run.layout, "experts")
    ends = pipeline_ends(ready, micro_batches, schedule, send, paired=paired)
    there = [end + after_last(stage_time, contention) for end, stage_time in zip(ends, stages, strict=True)]
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
