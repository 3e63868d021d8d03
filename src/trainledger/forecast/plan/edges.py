"""The last that holds and the first that does not, along indices and along the runs of a sweep."""

from __future__ import annotations

from collections.abc import Callable

from trainledger.forecast.plan.sizes import Sweep
from trainledger.spec.run import Run

Holds = Callable[[int], bool]  # of an index
Guess = Callable[[int, int], int | None]  # a place between two others; None where it gives none


def first_failing(holds: Holds, low: int, high: int, guess: Guess | None = None) -> int:
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


def straight(over: Callable[[int], float | None]) -> Guess:
    """Where a straight line between what two indices have ``over`` a limit meets it: most amounts are nearly straight.

    Every third time it gives the middle, as a line may be far off.
    """
    tries = 0

    def guess(low: int, high: int) -> int | None:
        nonlocal tries
        tries += 1
        ends = over(low), over(high)
        if tries % 3 == 0 or ends[0] is None or ends[1] is None or not ends[0] * ends[1] < 0:
            return None
        return low + int((high - low) * ends[0] / (ends[0] - ends[1])) + (tries % 3 == 2)

    return guess


def last_holding(holds: Holds, end: int, start: int = 0, least: int = 0, guess: Guess | None = None) -> int | None:
    """The last index below ``end`` that holds, doubled from ``start`` on where that holds, then by ``guess``.

    None where neither ``start`` nor ``least`` holds.

    >>> last_holding(lambda index: index < 7, 100, start=50), last_holding(lambda index: False, 100)
    (6, None)
    """
    if not holds(start):
        return None if start == least or not holds(least) else first_failing(holds, least, start, guess) - 1
    low, step = start, max(1, start - least)
    while low < end - 1:
        further = min(low + step, end - 1)
        if not holds(further):
            return first_failing(holds, low, further, guess) - 1
        low, step = further, 2 * step
    return low


Place = tuple[int, Run] | None


def edge(sweep: Sweep, fits: Callable[[Run], bool], over: Callable[[Run], float] | None = None) -> tuple[Place, Place]:
    """The last run that ``fits`` and the next one, which does not; None where there is none.

    ``over`` is by how much a run does not fit, or does; about a straight line along the sweep.
    """

    def holds(index: int) -> bool:
        place = sweep.allowed(index)
        return place is not None and fits(place[1])

    def lacking(index: int) -> float | None:
        place = sweep.allowed(index)
        return None if place is None or over is None else over(place[1])

    index = last_holding(holds, len(sweep.values), sweep.start, guess=straight(lacking))
    last = None if index is None else sweep.allowed(index)
    beyond = tried = sweep.allowed(0 if last is None else last[0] + 1)
    for _ in range(sweep.ahead):
        tried = sweep.allowed(tried[0] + 1) if tried is not None else None
        if tried is not None and beyond is not None and not _larger(tried[1], beyond[1]) and fits(tried[1]):
            last, beyond = tried, sweep.allowed(tried[0] + 1)
    while last is not None and beyond is not None and fits(beyond[1]):  # a later one fits, and so may its neighbour
        last, beyond = beyond, sweep.allowed(beyond[0] + 1)
    return last, beyond


def _larger(run: Run, than: Run) -> bool:
    """Whether a model is at least as wide and as deep as another of its family."""
    return run.model.d_model >= than.model.d_model and run.model.n_layers >= than.model.n_layers
