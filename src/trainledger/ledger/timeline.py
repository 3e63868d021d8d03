"""Memory over the operations of a step: live bytes by category, and their peak.

Loops are not unrolled. An iteration changes each category by the same amount every time, so the live bytes
at a place in the loop are linear in the iteration and are largest in the first or in the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby

from trainledger.ledger.entry import Amounts, Entry, Int, Ledger

Live = dict[str, Int]


@dataclass(frozen=True, eq=False, repr=False)
class Moment:
    """Live bytes by category while one entry runs, its scratch included."""

    entry: Entry
    index: int
    iteration: tuple[int, ...]
    live: Live

    @property
    def nbytes(self) -> Int:
        return sum(self.live.values())


@dataclass(frozen=True, eq=False, repr=False)
class Peak:
    """The moment with the most live bytes."""

    nbytes: int
    by_category: Live
    entry: Entry
    index: int


def _add(live: Live, amounts: Amounts, sign: int = 1) -> None:
    for category, nbytes in amounts:
        live[category] = live.get(category, 0) + sign * nbytes


def timeline(ledger: Ledger) -> tuple[Moment, ...]:
    """The moments of a step in order; of each loop, the first and the last iteration."""
    live: Live = dict(ledger.resident)
    return tuple(_walk(list(enumerate(ledger.entries)), live, 0, ()))


def _walk(entries: Sequence[tuple[int, Entry]], live: Live, depth: int, iteration: tuple[int, ...]) -> Iterator[Moment]:
    """The moments of a run of entries; ``live`` is moved to the state after it."""
    for loop, group in groupby(entries, key=lambda each: each[1].loop[depth : depth + 1]):
        body = list(group)
        if not loop:
            for index, entry in body:
                _add(live, entry.allocated)
                during = dict(live)
                if _is_nonzero(entry.scratch):
                    _add(during, (("scratch", entry.scratch),))
                yield Moment(entry, index, iteration, during)
                _add(live, entry.freed, -1)
            continue
        count = loop[0][1]
        before = dict(live)
        yield from _walk(body, live, depth + 1, (*iteration, 0))
        if count == 1:
            continue
        change = {key: live[key] - before.get(key, 0) for key in live}
        for key, step in change.items():
            live[key] = before.get(key, 0) + (count - 1) * step
        yield from _walk(body, live, depth + 1, (*iteration, count - 1))


def peak_nbytes(ledger: Ledger) -> Int:
    """The most live bytes of the step, for ints, arrays (one peak per element) and symbols."""
    return reduce(larger, (each.nbytes for each in timeline(ledger)))


def larger(a: Int, b: Int) -> Int:
    """The larger of two sizes, whatever their kind."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    if any(hasattr(each, "free_symbols") for each in (a, b)):
        import sympy

        return sympy.Max(a, b)
    import numpy

    return numpy.maximum(a, b)


def _is_nonzero(amount: Int) -> bool:
    return not isinstance(amount, int) or amount != 0


def peak(ledger: Ledger) -> Peak:
    """The most live bytes of the step, by category, and the entry that runs then.

    Of equal moments the first is given; integers only.
    """
    moments = timeline(ledger)
    highest = max(moments, key=lambda each: each.nbytes)
    return Peak(highest.nbytes, {k: v for k, v in highest.live.items() if v}, highest.entry, highest.index)
