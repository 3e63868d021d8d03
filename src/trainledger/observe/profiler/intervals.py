"""Sets of moments, as sorted disjoint intervals of whole nanoseconds: arrays [N, 2] of beginnings and ends."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Intervals = npt.NDArray[np.int64]


def union(begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> Intervals:
    """The moments that lie in any of these, whose beginnings are sorted; empty ones are left out.

    >>> union(np.array([0, 2, 8]), np.array([4, 3, 9])).tolist()
    [[0, 4], [8, 9]]
    """
    there = ends > begins
    begins, ends = begins[there], ends[there]
    if not len(begins):
        return np.zeros((0, 2), dtype=np.int64)
    furthest = np.maximum.accumulate(ends)
    first = np.concatenate([[True], begins[1:] > furthest[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([begins[first], furthest[last]], axis=1)


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


def _where(some: Intervals, others: Intervals, chosen) -> Intervals:  # type: ignore[no-untyped-def]
    """The pieces, between any two ends that follow each other, of which a choice by both sets is true."""
    ends = np.unique(np.concatenate([some.ravel(), others.ravel()]))
    if len(ends) < 2:
        return np.zeros((0, 2), dtype=np.int64)
    begins = ends[:-1]
    kept = chosen(inside(some, begins), inside(others, begins))
    return union(begins[kept], ends[1:][kept])


def inside(some: Intervals, moments: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Whether each moment lies in one of them (at its beginning: yes, at its end: no)."""
    if not len(some):
        return np.zeros(len(moments), dtype=bool)
    at = np.searchsorted(some[:, 0], moments, side="right") - 1
    found: npt.NDArray[np.bool_] = (at >= 0) & (moments < some[np.maximum(at, 0), 1])
    return found
