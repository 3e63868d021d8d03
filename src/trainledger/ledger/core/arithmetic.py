"""Arithmetic on sizes: an int for one run, an array for many at once, a sympy expression for a formula."""

from __future__ import annotations

from collections.abc import Iterable

from trainledger.ledger.entry import Int


def summed(amounts: Iterable[Int]) -> Int:
    """The sum of amounts, those that are known to be zero left out: of large arrays each addition takes time."""
    total: Int = 0
    for each in amounts:
        if isinstance(each, int):
            total = total + each if each else total
        else:
            total = each if isinstance(total, int) and total == 0 else total + each
    return total
