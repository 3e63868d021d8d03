"""Memory over the operations of a step: live bytes by category, and their peak.

Loops are not unrolled. An iteration changes each category by the same amount every time, so the live bytes
at a place in the loop are linear in the iteration and are largest in the first or in the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any, Protocol

from trainledger.ledger.entry import ON_HOST, Amounts, Entry, Int
from trainledger.spec.frozen import frozen

Live = dict[str, Int]


class Recorded(Protocol):
    """The inputs of a memory timeline; a `Ledger` has them."""

    @property
    def entries(self) -> tuple[Entry, ...]: ...
    @property
    def resident(self) -> Amounts: ...


@frozen
class Moment:
    """Live bytes by category while one entry runs, its scratch included.

    ``happens`` is True but where the count of a loop is an array: there it says for which elements.
    """

    entry: Entry
    index: int
    iteration: tuple[Int, ...]
    live: Live
    happens: Any = True

    @property
    def nbytes(self) -> Int:
        """The sum over the categories of the device; zero where the moment does not occur."""
        nbytes = sum(self.live.values()) - sum(self.live.get(name, 0) for name in ON_HOST)
        return nbytes if self.happens is True else nbytes * self.happens


@frozen
class Peak:
    """The moment with the most live bytes."""

    nbytes: int
    by_category: Live
    entry: Entry
    index: int


def _add(live: Live, amounts: Amounts, sign: int = 1) -> None:
    for category, nbytes in amounts:
        live[category] = live.get(category, 0) + sign * nbytes


def timeline(ledger: Recorded) -> tuple[Moment, ...]:
    """The moments of a step in order; of each loop, the first and the last iteration."""
    return tuple(_moment(*moment) for moment in _moments(ledger))


# A moment before it is one: entry, index, iteration, what is live but for the entry's scratch, whether it happens. The
# dict keeps changing during the walk.
_Passing = tuple[Entry, int, tuple[Int, ...], Live, Any]


def _moments(ledger: Recorded) -> Iterator[_Passing]:
    return _walk(list(enumerate(ledger.entries)), dict(ledger.resident), (), True)


def _moment(entry: Entry, index: int, iteration: tuple[Int, ...], live: Live, happens: Any) -> Moment:
    during = dict(live)
    if not isinstance(entry.scratch, int) or entry.scratch:
        _add(during, (("scratch", entry.scratch),))
    moment = object.__new__(Moment)  # a step has thousands, and the shared ``__init__`` takes most of their time
    vars(moment).update(entry=entry, index=index, iteration=iteration, live=during, happens=happens)
    return moment


def _walk(
    entries: Sequence[tuple[int, Entry]], live: Live, iteration: tuple[Int, ...], happens: Any
) -> Iterator[_Passing]:
    """The moments of a run of entries; ``live`` is moved to the state after it."""
    depth = len(iteration)
    for loop, group in groupby(entries, key=lambda each: each[1].loop[depth : depth + 1]):
        body = list(group)
        if not loop:
            for index, entry in body:
                _add(live, entry.allocated)
                yield entry, index, iteration, live, happens
                _add(live, entry.freed, -1)
            continue
        count = loop[0][1]
        if isinstance(count, int) and count < 1:
            continue
        here = happens & (count > 0) if hasattr(count, "shape") else happens
        before = dict(live)
        yield from _walk(body, live, (*iteration, 0), here)
        if isinstance(count, int) and count == 1:
            continue
        change = {key: live[key] - before.get(key, 0) for key in live}
        for key, step in change.items():
            live[key] = before.get(key, 0) + (count - 1) * step
        # Between them live bytes are linear in the iteration, so that none has more than the larger of the two.
        yield from _walk(body, live, (*iteration, count - 1), here)


def peak_nbytes(ledger: Recorded) -> Int:
    """The most live bytes of the step, for ints, arrays (one peak per element) and symbols (an unevaluated Max)."""
    sizes: list[Int] = []
    resident = sum(nbytes for category, nbytes in ledger.resident if category not in ON_HOST)
    if any(hasattr(each, "free_symbols") for _, each in ledger.resident):
        import sympy

        _totals(ledger.entries, resident, 0, True, sizes.append)
        return sympy.Max(*dict.fromkeys(sizes), evaluate=False)
    highest: list[Int] = [0]

    def higher(nbytes: Int) -> None:
        if isinstance(nbytes, int) and isinstance(highest[0], int):
            highest[0] = max(highest[0], nbytes)
        else:
            import numpy

            highest[0] = numpy.maximum(highest[0], nbytes)

    _totals(ledger.entries, resident, 0, True, higher)
    return highest[0]


def _totals(entries: Sequence[Entry], live: Int, depth: int, happens: Any, reached: Callable[[Int], None]) -> Int:
    """The live bytes after a run of entries; those at each moment are passed to ``reached``, as `_walk` yields them."""
    for loop, group in groupby(entries, key=lambda each: each.loop[depth : depth + 1]):
        body = list(group)
        if not loop:
            for entry in body:
                for category, nbytes in entry.allocated:
                    live = live + nbytes if category not in ON_HOST else live
                during = live + entry.scratch
                reached(during if happens is True else during * happens)
                for category, nbytes in entry.freed:
                    live = live - nbytes if category not in ON_HOST else live
            continue
        count = loop[0][1]
        if isinstance(count, int) and count < 1:
            continue
        here = happens & (count > 0) if hasattr(count, "shape") else happens
        before = live
        live = _totals(body, live, depth + 1, here, reached)
        if not (isinstance(count, int) and count == 1):
            live = before + (count - 1) * (live - before)
            live = _totals(body, live, depth + 1, here, reached)
    return live


def peak(ledger: Recorded) -> Peak:
    """The most live bytes of the step, by category, and the entry that runs then.

    Of equal moments the first is given; integers only.
    """
    sizes: list[int] = []
    resident = sum(nbytes for category, nbytes in ledger.resident if category not in ON_HOST)
    _totals(ledger.entries, resident, 0, True, sizes.append)
    if not sizes:
        raise ValueError("nothing was recorded, so there is no peak")
    # Bytes of all categories together are quick to follow, and only of the largest sum is more wanted.
    highest = _moment(*next(islice(_moments(ledger), sizes.index(max(sizes)), None)))
    by_category = {name: nbytes for name, nbytes in highest.live.items() if nbytes and name not in ON_HOST}
    return Peak(highest.nbytes, by_category, highest.entry, highest.index)


def peak_on_host(ledger: Recorded) -> Live:
    """What host memory holds, by category, when it holds most: what was moved there, and states that are kept there."""
    host = ({name: live[name] for name in ON_HOST if live.get(name)} for _, _, _, live, _ in _moments(ledger))
    return max(host, key=lambda live: sum(live.values()), default={})


def peak_host_nbytes(ledger: Recorded) -> int:
    """The most bytes in host memory at once; integers only."""
    return sum(peak_on_host(ledger).values())


def highest_by_category(ledger: Recorded) -> Live:
    """The most bytes that each category has at any time of the step, each at its own time; integers only."""
    most: Live = {}
    for entry, _, _, live, _ in _moments(ledger):
        for category, nbytes in live.items():
            if nbytes > most.get(category, -1):
                most[category] = nbytes
        if entry.scratch:
            most["scratch"] = max(most.get("scratch", 0), live.get("scratch", 0) + entry.scratch)
    return most
