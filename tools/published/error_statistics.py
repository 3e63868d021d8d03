"""Intervals for a source that was never seen, from the errors of others; each source weighs as any other.

Rows of one source share a program, a cluster and what was assumed of both: they are not independent, and a hundred of
them say less than ten sources do.

- Of many sources (steps): quantiles by hierarchical conformal prediction (Lee, Barber and Willett 2023, arXiv
  2306.06342; Dunn, Wasserman and Ramdas 2022, arXiv 1809.07441). A row weighs one over the rows of its source; the
  source to come has a weight too, and lies beyond all others. Nothing is assumed of the shape of errors, only that the
  next source is drawn as those before it were.
- Of few sources (memory: a tenth of their number is less than one): Student's t, with a variance between sources and
  one inside of them, adapters and other runs each around a middle of their own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import mean, median, variance
from typing import Any, Protocol

from trainledger.forecast.predict.interval import student_quantile
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


def conformal(rows: Sequence[Row]) -> Bounds:
    """Between which errors `SHARE` of the rows of a new source are expected, as many below as above."""
    points = weighted(rows)
    level = (1 + SHARE) / 2 * (len({each.source for each in rows}) + 1)
    return -quantile([(-value, weight) for value, weight in points], level), quantile(points, level)


@dataclass(frozen=True)
class Student:
    """Student's t of the error of a row of a new source."""

    shift: float
    spread: float
    degrees: int

    @property
    def bounds(self) -> Bounds:
        reach = self.spread * student_quantile((1 + SHARE) / 2, self.degrees)
        return self.shift - reach, self.shift + reach


def student(rows: Sequence[Any], kind: Callable[[Any], str] = lambda row: "") -> dict[str, Student]:
    """Of each kind of rows the mean of its sources, and what a row of another source may differ from it by.

    The variance of the sources' means around those of their kinds, less what rows alone make of it, is that between
    sources, and all kinds share it; that inside of sources is each kind's own (the mean of theirs). The square of the
    spread is their sum, with the error of the kind's mean; its degrees of freedom are Satterthwaite's (1946, Biometrics
    Bulletin 2).
    """
    split: dict[tuple[str, str], list[float]] = defaultdict(list)
    for each in rows:
        split[kind(each), each.source].append(each.error)
    kinds = sorted({name for name, _ in split})
    inside = {
        each: mean(variance(some) for (name, _), some in split.items() if name == each and len(some) > 1)
        for each in kinds
    }
    means = {key: mean(some) for key, some in split.items()}
    shifts = {each: mean(value for (name, _), value in means.items() if name == each) for each in kinds}
    free = len(means) - len(kinds)
    apart = sum((value - shifts[name]) ** 2 for (name, _), value in means.items()) / free
    between = max(0.0, apart - mean(inside[name] / len(some) for (name, _), some in split.items()))
    found = {}
    for each in kinds:
        sources = [some for (name, _), some in split.items() if name == each]
        of_source, of_row = between * (1 + 1 / len(sources)), inside[each]
        rows_free = sum(len(some) - 1 for some in sources)
        degrees = (of_source + of_row) ** 2 / (of_source**2 / free + of_row**2 / rows_free)
        found[each] = Student(shifts[each], sqrt(of_source + of_row), max(1, round(degrees)))
    return found


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
