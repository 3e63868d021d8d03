"""A profiler's recording of one process in columns (a trace of a gigabyte has millions of events), and sets of moments.

Times are whole nanoseconds from a beginning of the profiler's own. Names, and shapes of operators, are stored once.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.int64]
Intervals = npt.NDArray[np.int64]  # sorted and disjoint, [N, 2]: beginnings and ends
Mask = npt.NDArray[np.bool_]

NOTHING: Intervals = np.zeros((0, 2), dtype=np.int64)
NONE = -1  # an event has no such number
KERNEL, COPY, SET = range(3)  # kinds of device work, by Kineto's categories
DEVICE_WORK = {"kernel": KERNEL, "gpu_memcpy": COPY, "gpu_memset": SET}
GIVEN_A_NUMBER = 1  # of an operator: autograd gave it a sequence number, as it does in a forward
_MOST_IDS = 0.5  # of launches: where fewer have the id of an operator, ids mean something else


def union(begins: Column, ends: Column) -> Intervals:
    """The moments that lie in any of these, whose beginnings are sorted; empty ones are left out.

    >>> union(np.array([0, 2, 8]), np.array([4, 3, 9])).tolist()
    [[0, 4], [8, 9]]
    """
    there = ends > begins
    begins, ends = begins[there], ends[there]
    if not len(begins):
        return NOTHING
    furthest = np.maximum.accumulate(ends)
    first = np.concatenate([[True], begins[1:] > furthest[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([begins[first], furthest[last]], axis=1)


def merged(*sets: Intervals) -> Intervals:
    """The moments that lie in any of several sets, or of pairs in any order.

    >>> merged(np.array([[8, 9]]), np.array([[0, 4], [3, 8]])).tolist()
    [[0, 9]]
    """
    pairs = np.concatenate([NOTHING, *sets])
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    return union(pairs[:, 0], pairs[:, 1])


def common(some: Intervals, others: Intervals) -> Intervals:
    """The moments that lie in both.

    >>> common(np.array([[0, 4], [8, 9]]), np.array([[3, 20]])).tolist()
    [[3, 4], [8, 9]]
    """
    return _where(some, others, lambda one, other: one & other)


def without(some: Intervals, others: Intervals) -> Intervals:
    """The moments of the first that do not lie in the second.

    >>> without(np.array([[0, 4], [8, 9]]), np.array([[3, 20]])).tolist()
    [[0, 3]]
    """
    return _where(some, others, lambda one, other: one & ~other)


def length(some: Intervals) -> int:
    """How long they are together, in nanoseconds.

    >>> length(np.array([[0, 4], [8, 9]]))
    5
    """
    return int((some[:, 1] - some[:, 0]).sum())


def within(some: Intervals, begin: int, end: int) -> Intervals:
    """What lies between two moments.

    >>> within(np.array([[0, 4], [8, 9]]), 3, 20).tolist()
    [[3, 4], [8, 9]]
    """
    if end <= begin:
        return some[:0]
    first, last = np.searchsorted(some[:, 1], begin, side="right"), np.searchsorted(some[:, 0], end)
    return np.clip(some[first:last], begin, end)


def _where(some: Intervals, others: Intervals, chosen: Callable[[Mask, Mask], Mask]) -> Intervals:
    """The pieces, between any two ends that follow each other, of which a choice by both sets is true."""
    ends = np.unique(np.concatenate([some.ravel(), others.ravel()]))
    kept = chosen(inside(some, ends[:-1]), inside(others, ends[:-1]))
    return union(ends[:-1][kept], ends[1:][kept])


def inside(some: Intervals, moments: Column) -> Mask:
    """Whether each moment lies in one of them (at its beginning: yes, at its end: no)."""
    if not len(some):
        return np.zeros(len(moments), dtype=bool)
    at = np.searchsorted(some[:, 0], moments, side="right") - 1
    lies: Mask = (at >= 0) & (moments < some[np.maximum(at, 0), 1])
    return lies


# Typecodes of columns: names, lanes and arguments are numbered, so narrow ones do. A trace of a gigabyte has millions
# of operators.
_TYPES = {
    "begins_ns": "q",
    "ends_ns": "q",
    "names": "i",
    "lanes": "i",
    "links": "q",
    "operators": "q",
    "more": "i",
    "kinds": "b",
}
_OFTEN_NONE = ("links", "operators", "more")  # takes no memory where every value is `NONE`


@dataclass(frozen=True)
class Spans:
    """Events that have a length, in the order of their beginnings.

    ``names`` are numbers of names, ``lanes`` of threads on the host and of streams on a device. ``links`` is what
    launches and device work have in common (Kineto's correlation), ``operators`` what those of an operator have (its
    External id). ``more`` is the number of shapes or of a collective's arguments, ``kinds`` what device work is, and
    of operators `GIVEN_A_NUMBER` or 0.
    """

    begins_ns: Column
    ends_ns: Column
    names: Column
    lanes: Column
    links: Column
    operators: Column
    more: Column
    kinds: Column

    def __len__(self) -> int:
        return len(self.begins_ns)

    def where(self, chosen: Any) -> Spans:
        """Those of a mask or of these indices."""
        return Spans(*(getattr(self, name)[chosen] for name in _TYPES))

    def begin_in(self, between_ns: tuple[int, int]) -> Mask:
        """Whether each begins between two moments."""
        return (self.begins_ns >= between_ns[0]) & (self.begins_ns < between_ns[1])

    def overlapping(self, between_ns: tuple[int, int]) -> Column:
        """The indices of those that have a moment between two."""
        return np.flatnonzero((self.begins_ns < between_ns[1]) & (self.ends_ns > between_ns[0]))

    def moments(self, chosen: Any = slice(None)) -> Intervals:
        """The moments in which any of them runs, or any of those of a mask or of indices."""
        return union(self.begins_ns[chosen], self.ends_ns[chosen])


@dataclass(frozen=True)
class Shapes:
    """The arguments of an operator: sizes of tensors (empty: no tensor), their types, and other values as text."""

    sizes: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Message:
    """What a collective's kernel says of it: its kind, elements in and out, their type, and the ranks of its group.

    ``group`` names these ranks, where that was recorded.
    """

    collective: str
    elements_in: int
    elements_out: int
    dtype: str
    ranks: int
    group: str = ""


@dataclass(frozen=True)
class Recording:
    """One process under a profiler: what it did on the host and on its devices."""

    names: tuple[str, ...]
    arguments: tuple[Shapes | Message, ...]
    operators: Spans
    annotations: Spans
    launches: Spans
    work: Spans
    memory: Spans  # of the allocator: kinds are 0 on the host, else 1 more than the accelerator's number; links bytes
    # allocated, operators bytes reserved
    devices: tuple[str, ...] = ()
    rank: int | None = None
    ranks: int | None = None
    recorded: frozenset[str] = frozenset()  # of record_shapes, with_stack, profile_memory: what was asked for
    malformed: int = 0
    broken_off: bool = False

    @property
    def on_device(self) -> bool:
        """Whether there is device work; else the operators themselves are the work."""
        return len(self.work) > 0

    def named(self, spans: Spans, pattern: re.Pattern[str]) -> Spans:
        """Those whose name a pattern finds."""
        return spans.where(self.has_name(spans, pattern))

    def has_name(self, spans: Spans, pattern: re.Pattern[str]) -> Mask:
        """Whether a pattern finds the name of each."""
        return np.isin(spans.names, [number for number, name in enumerate(self.names) if pattern.search(name)])

    def operators_with(self, ids: Column) -> Column:
        """The index of the operator that has each of these External ids; `NONE` where none has it."""
        return _looked_up(self.operators.operators, ids)

    @cached_property
    def launch_of_work(self) -> Column:
        """The index of the launch of each piece of device work; `NONE` where the recording has none."""
        return _looked_up(self.launches.links, self.work.links)

    @cached_property
    def callers(self) -> Column:
        """The index of the operator that called each operator; `NONE` where none did. Callers come first."""
        return _around(self.operators)

    @cached_property
    def operator_of_work(self) -> Column:
        """The index of the operator that each piece of device work was launched by; `NONE` where none is known.

        By the External id that a kernel or its launch has in common with an operator; where there is none, as in older
        traces, the innermost operator that the launch was made in. A launch outside all operators is of nobody.
        """
        launch = self.launch_of_work
        of_launch = np.append(self.launches.operators, NONE)[launch]  # `NONE` is the last one's index
        found = self.operators_with(np.where(self.work.operators != NONE, self.work.operators, of_launch))
        if (found != NONE).sum() >= _MOST_IDS * (launch != NONE).sum():
            return found
        around = np.append(_innermost(self.operators, self.callers, self.launches), NONE)[launch]
        return around if (around != NONE).sum() > (found != NONE).sum() else found

    @cached_property
    def annotations_of_launches(self) -> tuple[Column, Column]:
        """The index of the innermost annotation that each launch began in, and that of the one around each annotation;
        `NONE` where there is none."""
        around = _around(self.annotations)
        return _innermost(self.annotations, around, self.launches), around


def _innermost(spans: Spans, around: Column, asked: Spans) -> Column:
    """The index of the innermost span in which each of others begins on its lane; ``around`` is `_around` of them."""
    innermost = np.full(len(asked), NONE)
    for lane in np.unique(asked.lanes):
        own, others = np.flatnonzero(spans.lanes == lane), np.flatnonzero(asked.lanes == lane)
        if not len(own):
            continue
        when = asked.begins_ns[others]
        at = np.searchsorted(spans.begins_ns[own], when, side="right") - 1
        inner = np.where(at >= 0, own[np.maximum(at, 0)], NONE)
        while (over := (inner != NONE) & (spans.ends_ns[inner] <= when)).any():
            inner = np.where(over, around[inner], inner)
        innermost[others] = inner
    return innermost


def _around(spans: Spans) -> Column:
    """The index of the innermost span that each one begins in on its lane; `NONE` where there is none."""
    around = np.full(len(spans), NONE)
    for lane in np.unique(spans.lanes):
        indices = np.flatnonzero(spans.lanes == lane)
        ends, outer = one_by_one(spans.ends_ns[indices]), np.full(len(indices), NONE)
        into, open_ = one_by_one(outer), list[int]()
        for at, begin in enumerate(one_by_one(spans.begins_ns[indices])):
            while open_ and ends[open_[-1]] <= begin:
                open_.pop()
            if open_:
                into[at] = open_[-1]
            open_.append(at)
        around[indices] = np.where(outer != NONE, indices[outer], NONE)
    return around


def _looked_up(keys: Column, asked: Column) -> Column:
    """The index of each key that is asked for, `NONE` where there is no such key; of equal keys the last one's."""
    if not len(keys):
        return np.full(len(asked), NONE)
    order = np.argsort(keys, kind="stable")
    at = np.searchsorted(keys[order], asked, side="right") - 1
    index = order[np.maximum(at, 0)]
    return np.where((at >= 0) & (keys[index] == asked) & (asked != NONE), index, NONE)


@dataclass
class Recorder:
    """Takes events one by one and makes a `Recording` of them."""

    names: dict[str, int] = field(default_factory=dict)
    lanes: dict[int, int] = field(default_factory=dict)
    arguments: dict[Any, int] = field(default_factory=dict)
    columns: dict[str, dict[str, array[int]]] = field(default_factory=dict)
    malformed: int = 0

    def add(
        self,
        group: str,
        name: str,
        times_us: tuple[float, float],
        lane: int = 0,
        *,
        link: int = NONE,
        operator: int = NONE,
        more: Any = None,
        kind: int = 0,
    ) -> None:
        """Keep an event of a group; ``times_us`` are its beginning and its length."""
        begin_ns = round(times_us[0] * 1000)
        columns = self.columns.get(group)
        if columns is None:
            columns = self.columns[group] = {each: array(code) for each, code in _TYPES.items()}
        begins = columns["begins_ns"]
        begins.append(begin_ns)
        columns["ends_ns"].append(begin_ns + round(times_us[1] * 1000))
        columns["names"].append(_number(self.names, name))
        columns["lanes"].append(_number(self.lanes, lane))
        columns["kinds"].append(kind)
        given = (link, operator, NONE if more is None else _number(self.arguments, more))
        for each, value in zip(_OFTEN_NONE, given, strict=True):
            column = columns[each]
            if value != NONE or column:
                column.extend([NONE] * (len(begins) - 1 - len(column)))
                column.append(value)

    def spans(self, group: str) -> Spans:
        """The events of a group in the order of their beginnings, the longer one first of two that begin together."""
        columns = self.columns.pop(group, None) or {each: array(code) for each, code in _TYPES.items()}
        begins, ends = (np.frombuffer(columns[each], dtype=np.int64) for each in ("begins_ns", "ends_ns"))
        order = np.lexsort((-ends, begins))
        del begins, ends
        # Columns are popped one after the other, so that only one of them is in memory twice.
        return Spans(**{each: _sorted(columns.pop(each), order) for each in _TYPES})


def _sorted(column: array[int], order: Column) -> Column:
    if not column:
        return np.broadcast_to(np.int64(NONE), len(order))
    in_order: Column = np.frombuffer(column, dtype=np.dtype(column.typecode))[order]
    return in_order


def _number(known: dict[Any, int], value: Any) -> int:
    return known.setdefault(value, len(known))


def one_by_one(column: npt.NDArray[Any]) -> memoryview:
    """The values of a column as Python's own, made as they are asked for; a list of them is four times larger."""
    return memoryview(np.ascontiguousarray(column))  # type: ignore[arg-type]
