"""The stages of a layout: operations of a rank of each before, in and after its micro-batches, and their seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from trainledger.forecast.predict.clock import Clock
from trainledger.forecast.predict.overlap import in_buckets, times_of, with_experts_overlapped, with_overlap
from trainledger.forecast.predict.roofline import EntryTime, Machine
from trainledger.forecast.predict.stream_ops import (
    BACKWARD,
    UNPACK,
    UPDATE,
    Schedule,
    Timed,
    schedule_of,
    without_links,
)
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.ranks import RankAccount
from trainledger.spec.cluster import Fabric
from trainledger.spec.frozen import frozen
from trainledger.spec.run import Run


@frozen
class ChunkWork:
    """One micro-batch in a chunk of layers; ``weights`` are seconds of its backward that can wait (zero-bubble).

    ``inputs`` is the backward without them. ``launches`` are what the program needs to launch the forward, the backward
    without what can wait, and that. ``alone`` is what a forward and a backward take longer that overlap no other
    micro-batch.
    """

    forward: Schedule
    backward: Schedule
    inputs: Schedule
    weights: float
    launches: tuple[float, float, float]
    alone: tuple[float, float] = (0.0, 0.0)


@frozen
class StageTime:
    """One stage of a pipeline, as its first rank runs it: how many ranks it has and what they do.

    ``times`` are those of its entries over a step, ``messages`` one run of each collective, ``whole`` what they come to
    on its own. ``begin`` comes before the first micro-batch, ``end`` after the last one's backward, ``close`` when all
    stages are there.
    """

    number: int
    ranks: Any
    ledger: Ledger
    times: tuple[EntryTime, ...]
    messages: tuple[Timed, ...]
    whole: Schedule
    begin: Schedule
    chunks: tuple[ChunkWork, ...]
    end: Schedule
    close: Schedule
    send_seconds: float


def stages_of(ranks: Sequence[RankAccount], machine: Machine, fabric: Fabric | None) -> list[StageTime]:
    """The stages of a layout, each with the pieces of a step; raises NoRate.

    Of stages that are alike the first is timed: the others run the same operations as often, and share its parts.
    """
    clock = Clock(ranks[0].plan.whole, machine, fabric)
    found = []
    known: dict[int, StageTime] = {}
    for number, group in groupby(ranks, key=lambda rank: rank.stage):
        same = list(group)
        count = sum(rank_account.count for rank_account in same)
        first = number if same[0].alike is None else same[0].alike
        if first not in known:
            known[first] = _stage(same[0], count, clock)
        found.append(replace(known[first], number=number, ranks=count))
    return found


def _stage(rank: RankAccount, ranks: Any, clock: Clock) -> StageTime:
    run, ledger = rank.plan.whole, rank.ledger
    timed: list[Timed] = []
    often: dict[tuple[Any, ...], list[Any]] = {}  # equal operations of a module: one of them, its time, how often
    for entry in ledger:
        if entry.kind in ("collective", "transfer"):
            timed.append(clock.message(entry))
            continue
        key, one = clock.time(entry)
        timed.append(Timed(entry, one.seconds, 1, one.launch_seconds))
        known = often.setdefault((key, entry.path), [entry, one, 0])
        known[2] += times_of(entry)
    alone = with_overlap(run, timed)
    timed = with_experts_overlapped(run, alone, clock.contention)
    parts = _parts(run, timed)
    buckets = in_buckets(run)

    def ops(rows: list[Timed], depth: int = 0) -> Schedule:
        return schedule_of(rows, buckets=buckets, depth=depth)

    zero_bubble = run.layout.schedule == "zero-bubble"
    both = zip(parts.chunks, _parts(run, alone).chunks, strict=True)
    chunks = tuple(_chunk(each, by_itself, ops, zero_bubble=zero_bubble) for each, by_itself in both)
    # All runs of equal operations in a step, in whichever loops they are.
    times = tuple(one.repeated(entry.in_loops((("step", count),)), count) for entry, one, count in often.values())
    sends = [each.seconds for each in timed if each.entry.group == "pipeline" and each.entry.name == "send"]
    return StageTime(
        number=rank.stage, ranks=ranks, ledger=ledger, times=times,
        messages=tuple(each for each in timed if each.entry.kind == "collective"),
        whole=ops(timed), begin=ops(parts.begin), chunks=chunks, end=ops(parts.end), close=ops(parts.close),
        send_seconds=max(sends, default=0.0),
    )  # fmt: skip


def _chunk(
    rows: MicroBatch, alone: MicroBatch, ops: Callable[[list[Timed], int], Schedule], *, zero_bubble: bool
) -> ChunkWork:
    depth = rows.depth
    inputs = _without_weights(rows) if zero_bubble else rows.backward
    launches = _launches(inputs, depth)
    return ChunkWork(
        ops(rows.forward, depth),
        ops(rows.backward, depth),
        ops(inputs, depth),
        _seconds(rows.backward, depth) - _seconds(inputs, depth),
        (_launches(rows.forward, depth), launches, _launches(rows.backward, depth) - launches),
        (
            _seconds(alone.forward, depth) - _seconds(rows.forward, depth),
            _seconds(alone.backward, depth) - _seconds(rows.backward, depth),
        ),
    )


def _seconds(rows: list[Timed], depth: int) -> float:
    return float(sum(row.seconds * times_of(row.entry, depth) for row in rows))


def _launches(rows: list[Timed], depth: int) -> float:
    return float(sum(row.launch * times_of(row.entry, depth) for row in rows if row.launch))


def with_free_links(stage: StageTime) -> StageTime:
    """The same stage where communication takes no time."""
    return replace(
        stage, whole=without_links(stage.whole), begin=without_links(stage.begin), end=without_links(stage.end),
        close=without_links(stage.close), send_seconds=0.0,
        chunks=tuple(
            replace(
                chunk, forward=without_links(chunk.forward), backward=without_links(chunk.backward),
                inputs=without_links(chunk.inputs), alone=(0.0, 0.0),
            )
            for chunk in stage.chunks
        ),
    )  # fmt: skip


# The parts of a stage's step


class MicroBatch(NamedTuple):
    """A chunk's entries of one micro-batch, which are in ``depth`` loops over micro-batches."""

    forward: list[Timed]
    backward: list[Timed]
    depth: int


class Parts(NamedTuple):
    """A stage's entries: before the first micro-batch, of one micro-batch of each chunk, after the last, at the end."""

    begin: list[Timed]
    chunks: list[MicroBatch]
    end: list[Timed]
    close: list[Timed]


def _parts(run: Run, timed: list[Timed]) -> Parts:
    """The parts of a pipeline's stage (see `ledger.parallel.micro_batches` for the order of its entries)."""
    # The first micro-batch is outside the loops, between those ahead of it and the others.
    if run.layout.pipeline == 1:
        return Parts([], [], [], [])
    rounds: dict[str, list[Timed]] = {}  # of each loop over micro-batches
    first = last = None
    for index, each in enumerate(timed):
        name = each.entry.loop[0][0] if each.entry.loop else ""
        if name.startswith(("in flight", "micro-batches")):
            rounds.setdefault(name, []).append(each)
            first, last = (index if first is None else first), index
        elif first is None and each.entry.name == "recv":
            first = index
    begin = len(timed) if first is None else first
    after = len(timed) if last is None else last + 1
    close = next((at for at in range(after, len(timed)) if timed[at].entry.phase in UPDATE), len(timed))
    if last is None:
        return _parts_of_one(run, timed)
    chunks = []
    for chunk in range(run.layout.virtual_stages):
        of = "" if chunk == run.layout.virtual_stages - 1 else f" {chunk}"
        chunks.append(_micro_batch(rounds.get(f"micro-batches{of}") or rounds[f"in flight{of}"], 1))
    return Parts(timed[:begin], chunks, timed[after:close], timed[close:])


def _parts_of_one(run: Run, timed: list[Timed]) -> Parts:
    """The parts where a step is a single micro-batch, without loops around it."""
    # It begins where gathers end, with what is received, and ends with what is sent back: the stage before does not
    # wait for reductions. Nobody waits for the first stage, so that its reductions may count as backward.
    names = [each.entry.name for each in timed]
    close = next((at for at in range(1, len(timed)) if timed[at].entry.phase in UPDATE), len(timed))
    sent = (at for at in range(close) if names[at] == "send" and timed[at].entry.phase in BACKWARD)
    after = max(sent, default=close - 1) + 1
    if "recv" in names and after < close:
        begin = names.index("recv")
    else:
        rows = enumerate(zip(timed[:after], names, strict=False))
        ahead = ("all_gather", UNPACK)
        begin = next((at for at, (each, name) in rows if each.entry.phase == "forward" and name not in ahead), after)
    one, nothing = _micro_batch(timed[begin:after], 0), MicroBatch([], [], 0)
    return Parts(timed[:begin], [one, *[nothing] * (run.layout.virtual_stages - 1)], timed[after:close], timed[close:])


def _micro_batch(rows: list[Timed], depth: int) -> MicroBatch:
    backward = [row for row in rows if row.entry.phase in BACKWARD]
    return MicroBatch([row for row in rows if row.entry.phase not in BACKWARD], backward, depth)


def _without_weights(micro_batch: MicroBatch) -> list[Timed]:
    """A backward without the gradients of weights: half of the matmuls of each linear layer that has two."""
    often = Counter(_linear_of(each) for each in micro_batch.backward)
    return [
        each._replace(seconds=each.seconds / 2, launch=each.launch / 2)
        if _linear_of(each) is not None and often[_linear_of(each)] % 2 == 0
        else each
        for each in micro_batch.backward
    ]


def _linear_of(timed: Timed) -> tuple[Any, ...] | None:
    """What the two matmuls of a linear layer's backward have in common; None of anything else."""
    entry = timed.entry
    return (entry.path, entry.loop, entry.flops) if (entry.kind, entry.phase) == ("matmul", "backward") else None
