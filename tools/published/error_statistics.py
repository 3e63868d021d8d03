"""Intervals for a source that was never seen, from the errors of others.

Rows of one source share a program, a cluster and what was assumed of both: they are not independent, and a hundred of
them say less than ten sources do. A row weighs one over the root of the rows of its source, less where the run that is
asked for is unlike it (`Like`), and a further source, which lies beyond all others, has a weight too: weighted
conformal prediction (Tibshirani et al. 2019, arXiv 1904.06019) on sources (Lee, Barber and Willett 2023, arXiv
2306.06342). Nothing is assumed of the shape of errors, only that the next source is drawn as those before it were.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import mean, median
from typing import Any, Protocol

from trainledger.spec.device import SHARE


class Row(Protocol):
    """A row: its source, and the logarithm of measured over predicted."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def error(self) -> float: ...


Bounds = tuple[float, float]


def quantile(points: Sequence[tuple[float, float]], level: float) -> float:
    """The least value below or at which points of that much weight lie; infinite where all of them weigh less.

    >>> quantile([(3.0, 1.0), (1.0, 1.0), (2.0, 1.0)], 2.0), quantile([(1.0, 1.0)], 1.5)
    (2.0, inf)
    """
    weight = 0.0
    for value, each in sorted(points):
        weight += each
        if weight >= level - 1e-9:
            return value
    return inf


def weighted(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Errors with their weights: one over the rows of the source."""
    counts = Counter(each.source for each in rows)
    return [(each.error, 1 / counts[each.source]) for each in rows]


Like = Callable[[Any], float]  # how much a row says of the run that is asked for, from 0 to 1


@dataclass(frozen=True)
class Spread:
    """Errors lie around ``middle``, `SHARE` of them at most ``reach`` away."""

    middle: float
    reach: float

    @property
    def bounds(self) -> Bounds:
        return self.middle - self.reach, self.middle + self.reach


def spread(rows: Sequence[Row], like: Like = lambda row: 1.0, *, further: float = 1.0, centred: bool = False) -> Spread:
    """How errors of a new source lie; ``further`` is the weight of that source, which lies beyond all others.

    The middle is the weighted median, or 0 where they are ``centred``: taken to lie around the prediction. Where all
    rows weigh less than `SHARE` of the whole, the reach is that of the farthest.
    """
    counts = Counter(row.source for row in rows)
    weights = [like(row) / sqrt(counts[row.source]) for row in rows]
    errors, whole = [row.error for row in rows], sum(weights)
    middle = 0.0 if centred else quantile(list(zip(errors, weights, strict=True)), whole / 2)
    off = [abs(error - middle) for error in errors]
    return Spread(middle, min(max(off), quantile(list(zip(off, weights, strict=True)), SHARE * (whole + further))))


@dataclass(frozen=True)
class Interval:
    """A row with the interval that all other sources give it."""

    row: Row
    low: float
    high: float

    @property
    def inside(self) -> bool:
        return self.low <= self.row.error <= self.high

    @property
    def score(self) -> float:
        """Winkler's score of an interval: its width, and for a miss 2 / (1 - `SHARE`) of how far off it is."""
        missed = max(0.0, self.low - self.row.error, self.row.error - self.high)
        return self.high - self.low + 2 / (1 - SHARE) * missed


Method = Callable[[Sequence[Any]], Callable[[Any], Bounds]]  # what rows say of another row


def sources_left_out(rows: Sequence[Row], method: Method) -> list[Interval]:
    """Every row with the interval that is made of all rows of other sources."""
    found = []
    for source in dict.fromkeys(each.source for each in rows):
        interval = method([each for each in rows if each.source != source])
        found += [Interval(each, *interval(each)) for each in rows if each.source == source]
    return found


@dataclass(frozen=True)
class Coverage:
    """How often intervals had the truth: of rows, and of sources alike; the median width of high over low, less 1."""

    rows: int
    sources: int
    of_rows: float
    of_sources: float
    width: float
    score: float


def coverage(predicted: Sequence[Interval]) -> Coverage:
    split: dict[str, list[Interval]] = defaultdict(list)
    for each in predicted:
        split[each.row.source].append(each)
    return Coverage(
        rows=len(predicted), sources=len(split), of_rows=mean(each.inside for each in predicted),
        of_sources=mean(mean(each.inside for each in some) for some in split.values()),
        width=median(each.high - each.low for each in predicted),
        score=mean(mean(each.score for each in some) for some in split.values()),
    )  # fmt: skip
