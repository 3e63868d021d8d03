"""Operations of a rank in stream order, from the entries of its ledger: the seconds and the stream of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from trainledger.ledger.entry import KINDS, Entry
from trainledger.spec.frozen import frozen

BACKWARD = ("recompute", "backward")
UPDATE = ("clip", "optimizer")
UNPACK = "split_with_sizes_copy"  # what FSDP2 copies a gathered block out with
PLAIN_WORK = tuple(kind for kind in KINDS if kind not in ("attention", "collective", "transfer"))


class StreamOp(NamedTuple):
    """One operation of a rank: ``kind`` says on which stream it runs and what it waits for (`predict.streams`).

    A collective is exposed for ``seconds``; seconds of it overlap the compute ``before`` and ``after`` that.
    """

    kind: str
    seconds: float
    name: str = ""
    backward: bool = False
    pieces: int = 1
    before: float = 0.0
    after: float = 0.0


@frozen
class Loop:
    """Operations that run ``count`` times in a row."""

    name: str
    count: int
    body: tuple[StreamOp | Loop, ...]


Schedule = tuple[StreamOp | Loop, ...]


class Timed(NamedTuple):
    """An entry with the seconds of one run of it and of its launch, and the messages that a collective is cut into.

    ``overlapped`` are those of its seconds in which matmuls run that do not wait for it (`forecast.predict.overlap`).
    """

    entry: Entry
    seconds: float
    pieces: int = 1
    launch: float = 0.0
    overlapped: float = 0.0


def schedule_of(timed: Sequence[Timed], *, buckets: bool, depth: int = 0) -> Schedule:
    """The operations of a rank's entries, loops kept; one round of the ``depth`` outer loops around all of them.

    ``buckets`` says that gradients are reduced once a step, in buckets. Sends between pipeline stages are left out:
    `forecast.predict.pipeline` adds them.
    """
    return tuple(_ops(timed, depth, buckets))


def _ops(rows: Sequence[Timed], depth: int, buckets: bool) -> Iterator[StreamOp | Loop]:
    for loop, group in groupby(rows, key=lambda row: row.entry.loop[depth : depth + 1]):
        if not loop:
            yield from _in_a_row(group, buckets)
            continue
        name, count = loop[0]
        if count < 1:
            continue
        body = tuple(_ops(list(group), depth + 1, buckets))
        if name in ("ring", "buckets"):
            ops = (op for op in body if isinstance(op, StreamOp))
            yield from (op._replace(seconds=op.seconds * count, pieces=op.pieces * count) for op in ops)
        elif body:
            yield Loop(name, count, body)


def _in_a_row(rows: Iterable[Timed], buckets: bool) -> Iterator[StreamOp]:
    """The operations of entries outside loops; compute without communication between it is one operation."""
    seconds, path, backward = 0.0, "", False
    for row in rows:
        entry = row.entry
        if entry.kind in PLAIN_WORK and entry.phase not in UPDATE and entry.name != UNPACK:
            now = entry.phase in BACKWARD
            if now != backward and seconds:
                yield StreamOp("work", seconds, path, backward)
                seconds = 0.0
            path, backward = (entry.path if not seconds else _shared(path, entry.path)), now
            seconds += row.seconds
            continue
        op = _op(row, buckets)
        if op is not None:
            if seconds:
                yield StreamOp("work", seconds, path, backward)
                seconds = 0.0
            yield op
    if seconds:
        yield StreamOp("work", seconds, path, backward)


def _shared(a: str, b: str) -> str:
    """The innermost module that contains both.

    >>> _shared("layers.*.mlp.up_proj", "layers.*.mlp.down_proj")
    'layers.*.mlp'
    """
    if a == b:
        return a
    same = []
    for x, y in zip(a.split("."), b.split("."), strict=False):
        if x != y:
            break
        same.append(x)
    return ".".join(same)


def _op(timed: Timed, buckets: bool) -> StreamOp | None:
    entry, seconds = timed.entry, timed.seconds - timed.overlapped
    backward = entry.phase in BACKWARD
    if entry.kind not in ("collective", "transfer"):
        kind = "unpack" if entry.name == UNPACK else "attention" if entry.kind == "attention" else "update"
        return StreamOp(kind, seconds, entry.path or entry.name, backward)
    label = f"{entry.name} over {entry.group}" if entry.group else entry.name
    if entry.group == "pipeline" and entry.name in ("send", "recv"):
        return None
    if entry.overlap != "compute" or entry.group == "tensor":
        kind = "after_sync" if entry.phase in UPDATE else "exposed"
        if not timed.overlapped:
            return StreamOp(kind, seconds, label, backward) if seconds or kind == "after_sync" else None
        ahead = entry.name == "all_gather"  # of the matmuls that overlap it; a reduction follows them
        before, after = (0.0, timed.overlapped) if ahead else (timed.overlapped, 0.0)
        return StreamOp(kind, seconds, label, backward, before=before, after=after)
    if entry.kind == "transfer":
        return StreamOp("upload" if entry.name == "to_device" else "sum", seconds, label, backward)
    if entry.name in ("send", "recv"):
        return StreamOp("ring", seconds, label, backward) if entry.name == "send" else None
    if entry.name == "all_gather":
        return StreamOp("gather", seconds, label, backward)
    if buckets:
        return StreamOp("bucket", seconds, label, backward, timed.pieces)
    return StreamOp("reduce" if entry.name == "reduce_scatter" else "sum", seconds, label, backward)


def without_links(ops: Schedule) -> Schedule:
    """The same schedule where communication takes no time."""
    free: list[StreamOp | Loop] = []
    for op in ops:
        if isinstance(op, Loop):
            free.append(Loop(op.name, op.count, without_links(op.body)))
        elif op.kind in ("exposed", "after_sync", "upload", "gather", "reduce", "sum", "ring", "bucket"):
            free.append(StreamOp(op.kind, 0.0, op.name, op.backward, op.pieces))
        else:
            free.append(op)
    return tuple(free)


def compute_seconds(ops: Iterable[StreamOp | Loop]) -> float:
    """Busy seconds of the compute stream."""
    total = 0.0
    for op in ops:
        if isinstance(op, Loop):
            total += op.count * compute_seconds(op.body)
        elif op.kind in ("work", "unpack", "attention", "update"):
            total += op.seconds
    return total


def flat(ops: Iterable[StreamOp | Loop]) -> Iterator[StreamOp]:
    """The operations in order, one round of each loop."""
    for op in ops:
        if isinstance(op, Loop):
            yield from flat(op.body)
        else:
            yield op
