"""What a rank does, act by act, from the entries of its ledger: what each needs and on which stream it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from trainledger.frozen import frozen
from trainledger.ledger.entry import KINDS, Entry

BACKWARD = ("recompute", "backward")
UPDATE = ("clip", "optimizer")
UNPACK = "split_with_sizes_copy"  # what FSDP2 copies a gathered block out with
PLAIN_WORK = tuple(kind for kind in KINDS if kind not in ("attention", "collective", "transfer"))


@frozen
class Act:
    """Something that a rank does once: ``kind`` says on which stream and what it waits for.

    Of a collective that shows for ``seconds``, others go beside what comes ``before`` it or ``after`` it.
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
    """Acts that are done so many times in a row."""

    name: str
    count: int
    body: tuple[Act | Loop, ...]


Program = tuple[Act | Loop, ...]


class Timed(NamedTuple):
    """An entry with the seconds of one run of it and of launching it, and the messages a collective is cut into.

    ``beside`` are those of its seconds in which products run that do not wait for it (`predict.overlap`).
    """

    entry: Entry
    seconds: float
    pieces: int = 1
    launch: float = 0.0
    beside: float = 0.0


def program(timed: Sequence[Timed], *, buckets: bool, depth: int = 0) -> Program:
    """The acts of a rank's entries, loops kept; of ``depth`` outer loops that they are in, one round.

    ``buckets`` says that gradients are summed once a step, in buckets. Sends of a pipeline are left out: they join
    ranks.
    """
    return tuple(_acts(timed, depth, buckets))


def _acts(rows: Sequence[Timed], depth: int, buckets: bool) -> Iterator[Act | Loop]:
    for loop, group in groupby(rows, key=lambda row: row.entry.loop[depth : depth + 1]):
        if not loop:
            yield from _in_a_row(group, buckets)
            continue
        name, count = loop[0]
        if count < 1:
            continue
        body = tuple(_acts(list(group), depth + 1, buckets))
        if name in ("ring", "buckets"):
            yield from (
                Act(act.kind, act.seconds * count, act.name, act.backward, act.pieces * count) for act in _only(body)
            )
        elif body:
            yield Loop(name, count, body)


def _in_a_row(rows: Iterable[Timed], buckets: bool) -> Iterator[Act]:
    """The acts of entries outside loops; operations without anything between them are one."""
    seconds, path, backward = 0.0, "", False
    for each in rows:
        entry = each.entry
        if entry.kind in PLAIN_WORK and entry.phase not in UPDATE and entry.name != UNPACK:
            now = entry.phase in BACKWARD
            if now != backward and seconds:
                yield Act("work", seconds, path, backward)
                seconds = 0.0
            path, backward = (entry.path if not seconds else _shared(path, entry.path)), now
            seconds += each.seconds
            continue
        act = _act(each, buckets)
        if act is not None:
            if seconds:
                yield Act("work", seconds, path, backward)
                seconds = 0.0
            yield act
    if seconds:
        yield Act("work", seconds, path, backward)


def _shared(a: str, b: str) -> str:
    """The part of the model that two modules lie in.

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


def _only(body: Iterable[Act | Loop]) -> Iterator[Act]:
    for each in body:
        assert isinstance(each, Act)
        yield each


def _act(timed: Timed, buckets: bool) -> Act | None:
    entry, seconds = timed.entry, timed.seconds - timed.beside
    backward = entry.phase in BACKWARD
    if entry.kind not in ("collective", "transfer"):
        kind = "unpack" if entry.name == UNPACK else "attention" if entry.kind == "attention" else "update"
        return Act(kind, seconds, entry.path or entry.name, backward)
    label = f"{entry.name} over {entry.group}" if entry.group else entry.name
    if entry.group == "pipeline" and entry.name in ("send", "recv"):
        return None
    if entry.overlap != "compute" or entry.group == "tensor":
        kind = "settled" if entry.phase in UPDATE else "exposed"
        if not timed.beside:
            return Act(kind, seconds, label, backward) if seconds or kind == "settled" else None
        ahead = entry.name == "all_gather"  # of the products beside it; a sum follows them
        before, after = (0.0, timed.beside) if ahead else (timed.beside, 0.0)
        return Act(kind, seconds, label, backward, before=before, after=after)
    if entry.name in ("send", "recv"):
        return Act("ring", seconds, label, backward) if entry.name == "send" else None
    if entry.name == "all_gather":
        return Act("gather", seconds, label, backward)
    if buckets:
        return Act("bucket", seconds, label, backward, timed.pieces)
    return Act("reduce" if entry.name == "reduce_scatter" else "sum", seconds, label, backward)


def without_links(acts: Program) -> Program:
    """The same program where communication takes no time."""
    free: list[Act | Loop] = []
    for each in acts:
        if isinstance(each, Loop):
            free.append(Loop(each.name, each.count, without_links(each.body)))
        elif each.kind in ("exposed", "settled", "gather", "reduce", "sum", "ring", "bucket"):
            free.append(Act(each.kind, 0.0, each.name, each.backward, each.pieces))
        else:
            free.append(each)
    return tuple(free)


def compute_seconds(acts: Iterable[Act | Loop]) -> float:
    """What the compute stream does, waiting left out."""
    total = 0.0
    for each in acts:
        if isinstance(each, Loop):
            total += each.count * compute_seconds(each.body)
        elif each.kind in ("work", "unpack", "attention", "update"):
            total += each.seconds
    return total


def flat(acts: Iterable[Act | Loop]) -> Iterator[Act]:
    """The acts in order, of each loop one round."""
    for each in acts:
        if isinstance(each, Loop):
            yield from flat(each.body)
        else:
            yield each
