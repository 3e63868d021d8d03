"""The longest of some rows of uneven length, to which padding fills the others of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, lgamma

LengthLaw = Sequence[tuple[int, float]]  # tokens and their probability, ascending
USUAL = 0.9  # of the micro-batches, whose longest row is the usual one


def longest_of(rows: Sequence[tuple[int, int]], drawn: int) -> LengthLaw:
    """The law of the longest of ``drawn`` rows, without replacement: none is above x with C(N(x), b) / C(n, b), where
    N(x) of n rows are not (David and Nagaraja 2003, Order Statistics, section 3.7).

    ``rows`` are tokens and how many rows have them, ascending.

    >>> longest_of([(1, 1), (2, 1), (4, 1)], 2)
    [(2, 0.333...), (4, 0.666...)]
    """
    n = sum(count for _, count in rows)
    drawn, within, before, law = min(drawn, n), 0, 0.0, list[tuple[int, float]]()
    for tokens, count in rows:
        within += count
        if within < drawn:
            continue
        log = sum(sign * lgamma(of + 1) for sign, of in ((1, within), (-1, within - drawn), (-1, n), (1, n - drawn)))
        share = 1.0 if within == n else exp(log)
        law.append((tokens, share - before))
        before = share
    return law


def usual_of(law: LengthLaw) -> int:
    """The tokens that `USUAL` of the micro-batches do not exceed."""
    within = 0.0
    for tokens, share in law:
        within += share
        if within >= USUAL - 1e-9:
            return tokens
    return law[-1][0]
