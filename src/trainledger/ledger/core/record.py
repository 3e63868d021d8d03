"""What a writer records during a step: operations, and the lifetime of each piece of memory.

A storage's category may become clear only after its birth (it turned out to be kept, or to be a gradient),
so entries are written when the step is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from functools import reduce
from operator import mul
from typing import Any

from trainledger.ledger.entry import Amounts, Entry, Int
from trainledger.spec.frozen import frozen

Loop = tuple[tuple[str, Int], ...]
COMMUNICATION = "communication"  # the category of what is sent, and of buffers for what arrives


@frozen
class Group:
    """The ranks of a collective: the mesh axes they are on, joined by ``x``, and how many they are."""

    axes: str
    ranks: Int


class Storage:
    """One piece of memory. ``cached`` means that each iteration of a loop keeps its own copy, ``of_parameter``
    that it is a parameter in another format; ``origin`` what a trace knows of it, ``basis`` that of its size.
    """

    __slots__ = (
        "__weakref__", "basis", "cached", "category", "kept", "loop", "nbytes", "of_parameter", "origin", "phase",
    )  # fmt: skip

    def __init__(self, nbytes: Int, phase: str, category: str = "scratch", loop: Loop = ()) -> None:
        self.nbytes = nbytes
        self.phase = phase
        self.category = category
        self.loop = loop
        self.kept = False
        self.cached = False
        self.of_parameter = False
        self.basis = "exact"
        self.origin: Origin | None = None


class Origin:
    """Where a piece of memory comes from, and when it is live (`TensorLife`)."""

    __slots__ = ("born", "died", "dtype", "line", "name", "path", "shape")

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str, path: str, line: str, born: int) -> None:
        self.name, self.shape, self.dtype, self.path, self.line = name, shape, dtype, path, line
        self.born = born
        self.died: int | None = None


_DEFAULTS = {each.name: each.default for each in fields(Entry)}  # all fields in their order


class Event:
    """One operation, before the categories of its memory are known.

    ``at`` is its index in a step that a tape follows, ``block`` the run of a block that it belongs to.
    """

    __slots__ = ("allocated", "at", "block", "facts", "freed")

    def __init__(self, allocated: list[Storage], **facts: Any) -> None:
        self.allocated = allocated
        self.freed: list[tuple[Storage, Int]] = []
        self.facts = facts
        self.at = -1
        self.block: BlockRun | None = None

    def copy(self) -> Event:
        """The same event, which also frees memory without a request."""
        found = Event(list(self.allocated), **self.facts)
        found.freed, found.at, found.block = list(self.freed), self.at, self.block
        return found

    def entry(self) -> Entry:
        """The finished entry."""
        phase = self.facts["phase"]
        kept = sum(each.nbytes for each in self.allocated if each.kept) if phase in ("forward", "backward") else 0
        found = object.__new__(Entry)  # a step has thousands, and the shared ``__init__`` takes most of their time
        own = vars(found)
        own.update(_DEFAULTS)
        own.update(self.facts)
        own["kept"] = kept
        if self.allocated:
            own["allocated"] = amounts((each, 1) for each in self.allocated)
        if self.freed:
            own["freed"] = amounts(self.freed)
        return found


class BlockRun:
    """One run of a block, by which what happens in it is known forward, when it is recomputed and backward.

    ``checkpointed``: its operations are recomputed for its backward, except those whose results (``recalled``: their
    storages) were kept.
    """

    __slots__ = ("checkpointed", "recalled")

    def __init__(self) -> None:
        self.checkpointed = False
        self.recalled: set[int] = set()


def copies_left_behind(storage: Storage, loop: Loop) -> Int:
    """How many copies die with a storage that loops inside ``loop`` made one after the other."""
    if not storage.cached or storage.loop[: len(loop)] != loop:
        return 1
    return reduce(mul, (count for _, count in storage.loop[len(loop) :]), 1)


def keep_what_lives(live: Iterable[Storage], phase: str) -> None:
    """Mark the memory that a phase made and left live for the next as kept."""
    for each in live:
        if each.phase == phase and not each.kept and each.category != "gradients":
            each.kept = True
            if each.category == "scratch":
                each.category = "activations"


def amounts(storages: Iterable[tuple[Storage, Int]]) -> Amounts:
    """Bytes by category."""
    split: dict[str, Int] = {}
    for each, copies in storages:
        # Sizes may be arrays of many layouts, where adding to nothing and multiplying by one take time as well.
        nbytes = each.nbytes if isinstance(copies, int) and copies == 1 else each.nbytes * copies
        split[each.category] = split[each.category] + nbytes if each.category in split else nbytes
    return tuple(split.items())
