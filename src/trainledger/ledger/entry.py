"""An entry: what one operation of a step computes, moves, keeps and does to memory.

Closed form, trace and measurement all write this shape (`ledger.ledger` puts them together); every report reads it.
While a step runs they record `Event`s and the lifetime of each `Storage`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from functools import reduce
from operator import mul
from typing import Any

from trainledger.spec.frozen import frozen

Int = Any  # int for one run, an array for many at once, a sympy expression for a formula

PHASES = ("data", "forward", "recompute", "backward", "clip", "optimizer", "collective", "other")
_COMPUTES = ("matmul", "attention", "elementwise", "norm", "softmax", "embedding", "reduction", "copy", "allocate")
KINDS = (*_COMPUTES, "random", "update", "transfer", "collective", "host", "unknown")
_STATES = ("parameters", "frozen weights", "gradients", "optimizer state")
CATEGORIES = (*_STATES, "activations", "logits and loss", "scratch", "buffers", "batch", "communication")
HOST = "host"  # what was moved to host memory: no part of the device's
STATES_ON_HOST = tuple(f"{HOST} {state}" for state in _STATES)  # model states that are held there (`recipe.offload`)
GRADIENTS_ON_HOST = f"{HOST} gradients"
ON_HOST = frozenset((HOST, *STATES_ON_HOST))
BASES = ("exact", "bound", "assumed", "measured")

Amounts = tuple[tuple[str, Int], ...]  # (category, nbytes) pairs


@frozen
class Entry:
    """One operation of a step: its FLOPs, bytes moved, bytes kept, and memory allocated and freed.

    ``flops`` counts 2 per multiply-add and 1 per element of pointwise work; ``model_flops`` are those that
    count as model FLOPs (matmuls and attention of forward and backward, without recomputation).
    ``kept`` are bytes it creates that a later phase reads; ``scratch`` lives only while it runs.
    ``allocated`` and ``freed`` move the live bytes by category: allocated before it runs, freed after.
    ``dtype`` is the format a matmul's inputs have, which decides the peak it runs against, and ``shape`` its sizes
    (batch, m, n, k) of [m, k] @ [k, n], which decide how much of that it reaches; those of a fused attention are
    (sequences x heads, queries, keys, width of keys, width of values, 1 where a kernel knows that it is causal, else
    0). The shapes of other kinds are empty. ``fused`` is there where the run compiles its blocks and a compiler can
    make one kernel of this operation and others (`memory.compiled_schedule`): the bytes that it then
    reads and writes outside of that kernel, and how many kernels it begins (1 for the first operation of one, else 0).
    ``loop`` says which loops it runs in, outermost first, as (name, count) pairs. ``payload``, ``group``
    and ``ranks`` are the bytes of a collective, the mesh axes it goes over and how many ranks those have; the bytes are
    those of the whole message as NCCL's tests count them: of all that is reduced, of what an all-gather makes, of what
    a reduce-scatter or an all-to-all reads, of what one rank sends to one other. ``overlap`` says with what it can
    run: ``compute``, or nothing (what comes next waits for it). ``seconds`` is known only where it was measured.
    An entry of kind ``host`` is computed by the host's processor, in the host's memory.
    ``source`` is the rule it comes from, ``line`` the user's code that caused it ("file:line"; in backward the forward
    operation's), which only a traced step has.
    """

    name: str
    path: str
    phase: str
    kind: str
    flops: Int = 0
    model_flops: Int = 0
    read: Int = 0
    written: Int = 0
    kept: Int = 0
    scratch: Int = 0
    allocated: Amounts = ()
    freed: Amounts = ()
    dtype: str = ""
    shape: tuple[Int, ...] = ()
    fused: tuple[Int, ...] = ()
    loop: tuple[tuple[str, Int], ...] = ()
    payload: Int = 0
    group: str = ""
    ranks: Int = 1
    overlap: str = ""
    seconds: float | None = None
    basis: str = "exact"
    source: str = ""
    line: str = ""

    @property
    def times(self) -> Int:
        """How often it runs in one optimizer step."""
        times: Int = 1
        for _, count in self.loop:
            times = times * count
        return times

    def in_loops(self, loop: tuple[tuple[str, Int], ...]) -> Entry:
        """The same operation in other loops.

        >>> Entry("mm", "", "forward", "matmul").in_loops((("layers", 4),)).times
        4
        """
        entry = object.__new__(Entry)  # a step has thousands, and the shared ``__init__`` takes most of their time
        vars(entry).update(vars(self), loop=loop)
        return entry


@frozen
class TensorLife:
    """One piece of memory of a traced step.

    ``born`` is the index of the entry that made it, -1 where it was there before the step; ``died`` that of the
    entry after which it is gone, None where it outlives the step. ``shape`` and ``dtype`` are those of the tensor it
    was made for, ``name`` the parameter's or the operation's, ``line`` the user's code ("file:line").

    >>> life = TensorLife(nbytes=32, category="scratch", name="mm", shape=(2, 4), dtype="fp32", born=3, died=5)
    >>> [life.lives(at) for at in (2, 3, 5, 6)]
    [False, True, True, False]
    """

    nbytes: int
    category: str
    name: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    path: str = ""
    phase: str = ""
    line: str = ""
    born: int = -1
    died: int | None = None

    def lives(self, at: int) -> bool:
        """Whether it is live while the entry with this index runs."""
        return self.born <= at and (self.died is None or at <= self.died)


# A storage's category may become clear only after its birth (it turned out to be kept, or to be a gradient), so entries
# are written when the step is over.


Loop = tuple[tuple[str, Int], ...]
COMMUNICATION = "communication"  # the category of what is sent, and of buffers for what arrives


# Groups of the ranks of experts: those that split one, and all that hold a whole set.
EXPERT_TENSOR, EVERY_EXPERT = "expert tensor", "expert tensor x expert"
TO_EXPERTS = ("expert", EXPERT_TENSOR, EVERY_EXPERT)  # between which tokens travel


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
        "__weakref__",
        "basis",
        "cached",
        "category",
        "kept",
        "loop",
        "nbytes",
        "of_parameter",
        "origin",
        "phase",
    )

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


_DEFAULTS = {field.name: field.default for field in fields(Entry)}  # all fields in their order


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
        event = Event(list(self.allocated), **self.facts)
        event.freed, event.at, event.block = list(self.freed), self.at, self.block
        return event

    def entry(self) -> Entry:
        """The finished entry."""
        phase = self.facts["phase"]
        kept = (
            sum(storage.nbytes for storage in self.allocated if storage.kept) if phase in ("forward", "backward") else 0
        )
        found = object.__new__(Entry)  # a step has thousands, and the shared ``__init__`` takes most of their time
        own = vars(found)
        own.update(_DEFAULTS)
        own.update(self.facts)
        own["kept"] = kept
        if self.allocated:
            own["allocated"] = amounts((storage, 1) for storage in self.allocated)
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
    for storage in live:
        if storage.phase == phase and not storage.kept and storage.category != "gradients":
            storage.kept = True
            if storage.category == "scratch":
                storage.category = "activations"


def in_any_memory(resident: Amounts) -> dict[str, Int]:
    """Bytes by category, states on the host with those on the device.

    >>> in_any_memory((("optimizer state", 8), ("host optimizer state", 16)))
    {'optimizer state': 24}
    """
    total: dict[str, Int] = {}
    for category, nbytes in resident:
        name = category.removeprefix(f"{HOST} ")
        total[name] = total.get(name, 0) + nbytes
    return total


def amounts(storages: Iterable[tuple[Storage, Int]]) -> Amounts:
    """Bytes by category."""
    split: dict[str, Int] = {}
    for storage, copies in storages:
        # Sizes may be arrays of many layouts, where adding to nothing and multiplying by one take time as well.
        nbytes = storage.nbytes if isinstance(copies, int) and copies == 1 else storage.nbytes * copies
        split[storage.category] = split[storage.category] + nbytes if storage.category in split else nbytes
    return tuple(split.items())
