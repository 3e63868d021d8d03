"""Vary one size of a run until something no longer holds: the runs along the size, and the search for the edge."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainledger.spec.frozen import frozen
from trainledger.spec.rules.run import memory_problems
from trainledger.spec.run import Run

_GAP = 4096  # how far apart two runs that obey all rules may lie
Holds = Callable[[int], bool]  # of an index


@frozen
class Sweep:
    """Runs that differ in one size: ``values`` of ``field`` in order, and the run ``at`` the index of each.

    ``start`` is the index of the planned value. ``carries`` says what changes with the size. ``ahead`` further values
    are tried beyond an edge, where memory does not grow with every step. ``turns`` are indices at which amounts may be
    larger than at later ones.
    """

    field: str
    values: Sequence[int]
    at: Callable[[int], Run]
    start: int = 0
    ahead: int = 0
    carries: str = ""
    turns: Sequence[int] = ()

    def allowed(self, index: int) -> tuple[int, Run] | None:
        """The first index from here on whose run obeys the rules of memory and layout, and the run."""
        for each in range(index, min(len(self.values), index + _GAP)):
            run = self.at(each)
            if next(memory_problems(run), None) is None:
                return each, run
        return None


def first_failing(holds: Holds, low: int, high: int, guess: Callable[[int, int], int | None] | None = None) -> int:
    """The first index that does not hold, between ``low``, which does, and ``high``, which does not.

    ``guess`` may name an index between two others; the middle is tried where it gives None.

    >>> first_failing(lambda index: index < 7, 0, 100)
    7
    """
    while high - low > 1:
        middle = None if guess is None else guess(low, high)
        middle = (low + high) // 2 if middle is None else min(max(middle, low + 1), high - 1)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return high


def last_holding(holds: Holds, end: int, start: int = 0, least: int = 0) -> int | None:
    """The last index below ``end`` that holds, from ``start`` in doubled steps, then halved ones; None: not one.

    >>> last_holding(lambda index: index < 7, 100, start=50), last_holding(lambda index: False, 100)
    (6, None)
    """
    step = 1
    if holds(start):
        low = start
        while low + step < end and holds(low + step):
            low, step = low + step, 2 * step
        return first_failing(holds, low, min(low + step, end)) - 1
    high = start
    while high - step >= least and not holds(high - step):
        high, step = high - step, 2 * step
    low = max(high - step, least)
    if high - step < least and not holds(least):
        return None
    return first_failing(holds, low, high) - 1


Place = tuple[int, Run] | None


def edge(sweep: Sweep, fits: Callable[[Run], bool]) -> tuple[Place, Place]:
    """The last run that ``fits`` and the next one, which does not; None where there is none."""

    def holds(index: int) -> bool:
        found = sweep.allowed(index)
        return found is not None and fits(found[1])

    place = last_holding(holds, len(sweep.values), sweep.start)
    if place is None:
        return None, sweep.allowed(0)
    last = sweep.allowed(place)
    assert last is not None
    beyond = tried = sweep.allowed(last[0] + 1)
    for _ in range(sweep.ahead):
        tried = sweep.allowed(tried[0] + 1) if tried is not None else None
        if tried is not None and fits(tried[1]):
            last, beyond = tried, sweep.allowed(tried[0] + 1)
    while beyond is not None and fits(beyond[1]):  # a later one fits, and so may its neighbour
        last, beyond = beyond, sweep.allowed(beyond[0] + 1)
    return last, beyond
