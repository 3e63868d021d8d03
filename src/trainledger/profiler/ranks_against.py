"""Two directories of ranks compared: medians over ranks of parts and kernels, the slowest rank, the stragglers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from trainledger.document import Answer
from trainledger.profiler.against import (
    Changed,
    Runs,
    changes,
    collectives_of,
    kernels_of,
    parts_of,
    products_of,
    summed,
)
from trainledger.profiler.rank_timeline import WAITS
from trainledger.profiler.ranks import RankProfile, Ranks
from trainledger.profiler.step_time import EXPOSED
from trainledger.units import format_count


@dataclass(frozen=True)
class RanksAgainst(Answer, report="profile_ranks_against"):
    """The traces of several ranks (``after``), and those that they are compared with (``before``).

    All counts and times are medians over the ranks (of an even number the lower of the two), in their median steps;
    medians of parts do not sum to that of the steps. The largest differences come first.
    """

    before: Ranks
    after: Ranks
    parts: tuple[Changed, ...]
    kernels: tuple[Changed, ...]
    products: tuple[Changed, ...]
    collectives: tuple[Changed, ...]
    notes: tuple[str, ...] = ()

    @property
    def difference_ns(self) -> int:
        return self.after.step_ns - self.before.step_ns

    @property
    def shared(self) -> tuple[tuple[RankProfile, RankProfile], ...]:
        """Each rank that both have, before and after."""
        then = {each.rank: each for each in self.before.ranks}
        return tuple((then[each.rank], each) for each in self.after.ranks if each.rank in then)


def ranks_against(after: Ranks, before: Ranks) -> RanksAgainst:
    """What changed from the ranks of one program to those of another."""
    parts, kernels, products, sent = (
        changes(_medians(before, found), _medians(after, found))
        for found in (
            _parts_and_waits,
            *(_of_profile(each) for each in (kernels_of, products_of, collectives_of)),
        )
    )
    return RanksAgainst(before, after, parts, kernels, products, sent, tuple(_notes(before, after)))


def _of_profile(
    found: Callable[..., Iterable[tuple[str, Runs]]],
) -> Callable[[RankProfile], Iterable[tuple[str, Runs]]]:
    return lambda rank: found(rank.profile)


def _parts_and_waits(rank: RankProfile) -> Iterator[tuple[str, Runs]]:
    waits = sum(rank.waited_in_median_ns.values())
    for name, (count, nanoseconds) in parts_of(rank.profile):
        yield name, (count, nanoseconds - waits if name == EXPOSED else nanoseconds)
    yield WAITS, (0, waits)


def _medians(found: Ranks, of: Callable[[RankProfile], Iterable[tuple[str, Runs]]]) -> dict[str, Runs]:
    """The median over ranks of how often each runs, and of its time; a rank that has none of it counts as 0."""
    every = [summed(of(each)) for each in found.ranks]
    middle = (len(every) - 1) // 2
    medians = {}
    for name in dict.fromkeys(name for each in every for name in each):
        counts, times = zip(*(each.get(name, (0, 0)) for each in every), strict=True)
        medians[name] = sorted(counts)[middle], sorted(times)[middle]
    return medians


def _notes(before: Ranks, after: Ranks) -> Iterator[str]:
    one, other = ({each.profile.device_name or "a host" for each in some.ranks} for some in (before, after))
    if one != other:
        yield f"They ran on different devices: {', '.join(sorted(one))} and {', '.join(sorted(other))}."
    if {each.rank for each in before.ranks} != {each.rank for each in after.ranks}:
        counts = f"{format_count(len(before.ranks))} and {format_count(len(after.ranks))}"
        yield f"They are not of the same ranks ({counts}): only those that both have stand side by side."
    for which, found in (("Before", before), ("After", after)):
        for doubt in found.doubts:
            yield f"{which}: {doubt}"
