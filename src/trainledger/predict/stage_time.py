"""The stages of a layout: what a rank of each does before, in and after its micro-batches, and how long that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from trainledger.frozen import frozen
from trainledger.ledger.entry import Entry, Ledger
from trainledger.ledger.ranks import RankAccount
from trainledger.predict.collective_time import collective_seconds, host_seconds, placement
from trainledger.predict.rank_time import (
    BACKWARD,
    BUCKET_ELEMENTS,
    BUCKET_ELEMENTS_PER_RANK,
    Program,
    Timed,
    program,
    without_links,
)
from trainledger.predict.roofline import EntryTime, Roofline
from trainledger.spec.cluster import Device
from trainledger.spec.links import Fabric
from trainledger.spec.run import Run


@frozen
class ChunkWork:
    """One micro-batch in a chunk of layers; ``weights`` are seconds of its backward that can wait (zero-bubble).

    ``launches`` are what the program needs to launch the forward, and the backward.
    """

    forward: Program
    backward: Program
    weights: float
    launches: tuple[float, float]


@frozen
class StageTime:
    """One stage of a pipeline, as its first rank runs it: how many ranks it has and what they do.

    ``times`` are those of its entries over a step, ``whole`` what they come to on its own. ``begin`` comes before the
    first micro-batch, ``end`` after the last one's backward, ``close`` when all stages are there.
    """

    number: int
    ranks: Any
    ledger: Ledger
    times: tuple[EntryTime, ...]
    whole: Program
    begin: Program
    chunks: tuple[ChunkWork, ...]
    end: Program
    close: Program
    send_seconds: float


def stages_of(run: Run, ranks: Sequence[RankAccount], machine: Device, fabric: Fabric) -> list[StageTime]:
    """The stages of a layout, each with the pieces of a step; raises NoRate."""
    clock = Clock(run, machine, fabric)
    found = []
    known: dict[int, StageTime] = {}  # stages that share one ledger are timed once
    for number, group in groupby(ranks, key=lambda each: each.stage):
        alike = list(group)
        ledger, count = alike[0].ledger, sum(each.count for each in alike)
        if id(ledger) not in known:
            known[id(ledger)] = _stage(run, number, count, ledger, clock)
        found.append(replace(known[id(ledger)], number=number, ranks=count))
    return found


class Clock:
    """Seconds of one run of an entry on a device of the cluster; equal operations are timed once."""

    def __init__(self, run: Run, machine: Device, fabric: Fabric) -> None:
        self.run = run
        self.fabric = fabric
        self.roofline = Roofline(machine)
        self._known: dict[tuple[Any, ...], Any] = {}

    def time(self, entry: Entry) -> EntryTime:
        """Of one run of an operation on the device itself."""
        key = (
            entry.name, entry.kind, entry.phase, entry.dtype, entry.flops, entry.read, entry.written, entry.shape,
            entry.fused,
        )  # fmt: skip
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self.roofline.time(replace(entry, loop=()))
        return found

    def message(self, entry: Entry) -> Timed:
        """Of one collective or transfer."""
        key = (entry.name, entry.group, entry.ranks, entry.payload, entry.overlap, entry.read)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._message(entry)
        seconds, pieces = found
        return Timed(entry, seconds, pieces)

    def _message(self, entry: Entry) -> tuple[float, int]:
        if entry.kind == "transfer":
            moves = entry.name in ("to_host", "to_device")
            return (float(host_seconds(entry.read, self.fabric.host)) if moves else 0.0), 1
        if not entry.payload or entry.ranks == 1:
            return 0.0, 1
        place = placement(self.run.layout, entry.group, entry.ranks, self.fabric.devices_per_node)
        pieces = self._pieces(entry)
        return pieces * float(collective_seconds(entry.name, entry.payload / pieces, place, self.fabric)), pieces

    def _pieces(self, entry: Entry) -> int:
        """ZeRO-1's gradients go in buckets, which the ledger has as one message."""
        if entry.overlap != "compute" or not _in_buckets(self.run) or entry.loop:
            return 1
        elements: int = max(BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_RANK * entry.ranks)
        return int(-(-entry.payload // (4 * elements)))


def _in_buckets(run: Run) -> bool:
    """Whether gradients are summed once a step in buckets: DDP, and ZeRO-1."""
    return run.layout.shard_ranks == 1 or run.layout.zero == 1


def _stage(run: Run, number: int, ranks: Any, ledger: Ledger, clock: Clock) -> StageTime:
    timed, times = [], []
    for entry in ledger:
        if entry.kind in ("collective", "transfer"):
            timed.append(clock.message(entry))
            continue
        one = clock.time(entry)
        timed.append(Timed(entry, one.seconds, launch=one.launch_seconds))
        times.append(_often(one, entry))
    buckets = _in_buckets(run)
    sends = [each.seconds for each in timed if each.entry.group == "pipeline" and each.entry.name == "send"]
    parts = _parts(run, number, timed)
    chunks = []
    for forward, backward in parts.chunks:
        weights = _weights_seconds(backward) if run.layout.schedule == "zero-bubble" else 0.0
        launches = (_launches(forward), _launches(backward))
        ahead, back = (program(each, buckets=buckets) for each in (forward, backward))
        chunks.append(ChunkWork(ahead, back, weights, launches))
    return StageTime(
        number=number, ranks=ranks, ledger=ledger, times=tuple(times), whole=program(timed, buckets=buckets),
        begin=program(parts.begin, buckets=buckets), chunks=tuple(chunks), end=program(parts.end, buckets=buckets),
        close=program(parts.close, buckets=buckets), send_seconds=max(sends, default=0.0),
    )  # fmt: skip


def _launches(timed: list[Timed]) -> float:
    return float(sum(each.launch * each.entry.times for each in timed))


def _often(one: EntryTime, entry: Entry) -> EntryTime:
    times = entry.times
    return EntryTime(
        entry, one.seconds * times, one.bound, one.ideal_seconds * times, one.overhead_seconds * times,
        one.launch_seconds * times,
    )  # fmt: skip


def with_free_links(stage: StageTime) -> StageTime:
    """The same stage where communication takes no time."""
    return replace(
        stage, whole=without_links(stage.whole), begin=without_links(stage.begin), end=without_links(stage.end),
        close=without_links(stage.close), send_seconds=0.0,
        chunks=tuple(
            replace(each, forward=without_links(each.forward), backward=without_links(each.backward))
            for each in stage.chunks
        ),
    )  # fmt: skip


# The parts of a stage's step


@frozen
class Parts:
    """A stage's entries: before the first micro-batch, of one micro-batch of each chunk, after the last, at the end."""

    begin: list[Timed]
    chunks: list[tuple[list[Timed], list[Timed]]]
    end: list[Timed]
    close: list[Timed]


def _parts(run: Run, number: int, timed: list[Timed]) -> Parts:
    """The parts of a pipeline's stage (see `ledger.micro_batches.run_micro_batches` for the order of its entries).

    The first micro-batch stands outside the loops, between those ahead of it and the others.
    """
    if run.layout.pipeline == 1:
        return Parts([], [], [], [])
    loops = [each.entry.loop[0][0] if each.entry.loop else "" for each in timed]
    micro = [index for index, name in enumerate(loops) if name.startswith(("in flight", "micro-batches"))]
    close = next((index for index, each in enumerate(timed) if _closes(each.entry, index, micro)), len(timed))
    if not micro:  # a single micro-batch: it begins and ends with everything else
        forward = [each for each in timed[:close] if each.entry.phase not in BACKWARD]
        backward = [each for each in timed[:close] if each.entry.phase in BACKWARD]
        return Parts([], [(forward, backward)] * run.layout.virtual_stages, [], timed[close:])
    first = min(micro[0], next((index for index, each in enumerate(timed) if each.entry.name == "recv"), micro[0]))
    chunks = []
    for chunk in range(run.layout.virtual_stages):
        last = chunk == run.layout.virtual_stages - 1
        names = ("in flight", "micro-batches") if last else (f"in flight {chunk}", f"micro-batches {chunk}")
        for name in reversed(names):
            rows = [each for each, loop in zip(timed, loops, strict=True) if loop == name]
            if rows:
                break
        inner = [replace(each, entry=replace(each.entry, loop=each.entry.loop[1:])) for each in rows]
        chunks.append(
            (
                [each for each in inner if each.entry.phase not in BACKWARD],
                [each for each in inner if each.entry.phase in BACKWARD],
            )
        )
    return Parts(timed[:first], chunks, timed[micro[-1] + 1 : close], timed[close:])


def _closes(entry: Entry, index: int, micro: list[int]) -> bool:
    """Whether an entry is the first of the clip or the update, for which all gradients must be there."""
    return entry.phase in ("clip", "optimizer") and (not micro or index > micro[-1]) and index > 0


def _weights_seconds(backward: list[Timed]) -> float:
    """What a backward spends on the gradients of weights: half of the products of each linear layer that has two."""
    products: dict[tuple[Any, ...], list[Timed]] = {}
    for each in backward:
        if each.entry.kind == "matmul" and each.entry.phase == "backward":
            products.setdefault((each.entry.path, each.entry.loop, each.entry.flops), []).append(each)
    pairs = (alike for alike in products.values() if len(alike) % 2 == 0)
    return float(sum(each.seconds * each.entry.times for alike in pairs for each in alike) / 2)
