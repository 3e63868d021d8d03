"""What several ranks do when in the same step, on one time axis.

Each rank's clock is its own. As a collective ends on all ranks at once, the ends of those that two ranks have in common
say how far their clocks are apart (the median of the differences).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

Ends = Mapping[object, int]  # when each collective ended, by what tells that it is the same one on several ranks
WAITS = "waiting for other ranks"  # of exposed communication, what waits for the rank that comes last


@dataclass(frozen=True)
class RankRow:
    """A rank's step: when it began after the first rank's, and how long each part has of each equal piece of it.

    The parts are those of a step (`step_time.ORDER`), but that `WAITS` stands apart from exposed communication.
    """

    rank: int
    begin_ns: int
    nanoseconds: int
    pieces_ns: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class RankTimeline:
    """One step of several ranks; ``is_aligned`` says whether their clocks are set by collectives that they share.

    Else all rows begin at 0.
    """

    step: str
    rows: tuple[RankRow, ...]
    is_aligned: bool


def clocks_ahead_ns(ends: Sequence[Ends]) -> list[int | None]:
    """How far the clock of each rank is ahead of the first one's; None where no collective leads from one to the other.

    >>> clocks_ahead_ns([{"sum": 10, "gather": 20}, {"sum": 110, "gather": 120, "tensor": 7}, {"tensor": 5}, {}])
    [0, 100, 98, None]
    """
    ahead: dict[int, int] = {0: 0}
    reached = [0] if ends else []
    while reached:
        known = reached.pop()
        for at, own in enumerate(ends):
            apart = [own[each] - ends[known][each] for each in own if each in ends[known]] if at not in ahead else []
            if apart:
                ahead[at] = ahead[known] + median_low(apart)
                reached.append(at)
    return [ahead.get(at) for at in range(len(ends))]


def rank_timeline(
    step: str, ranks: Sequence[tuple[int, tuple[int, int], Mapping[str, tuple[int, ...]]]], ahead: Sequence[int | None]
) -> RankTimeline:
    """The rows of ranks: of each its number, the beginning and the end of its step, and its pieces."""
    is_aligned = len(ranks) > 1 and all(each is not None for each in ahead)
    begins = [begin - (clock or 0) if is_aligned else 0 for (_, (begin, _), _), clock in zip(ranks, ahead, strict=True)]
    first = min(begins, default=0)
    rows = tuple(
        RankRow(rank, at - first, end - begin, pieces)
        for (rank, (begin, end), pieces), at in zip(ranks, begins, strict=True)
    )
    return RankTimeline(step, rows, is_aligned)
