"""Two directories of ranks compared: medians over ranks of parts and kernels, the slowest rank, the stragglers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trainledger.observe.profiler.against import Changes, Runs, Times, changes, times_of
from trainledger.observe.profiler.rank_timeline import WAITS
from trainledger.observe.profiler.ranks import RankProfile, Ranks
from trainledger.observe.profiler.step_time import EXPOSED
from trainledger.report.document import Answer
from trainledger.spec.units import format_count


@dataclass(frozen=True)
class RanksAgainst(Answer, report="profile_ranks_against"):
    """The traces of several ranks (``after``), and those that they are compared with (``before``).

    All counts and times are medians over the ranks (of an even number the lower of the two), in their median steps;
    medians of parts do not sum to that of the steps.
    """

    before: Ranks
    after: Ranks
    changes: Changes
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
    return RanksAgainst(before, after, changes(_medians(before), _medians(after)), tuple(_notes(before, after)))


def _medians(found: Ranks) -> Times:
    """The median over ranks of how often each runs, and of its time."""
    return tuple(_median(each) for each in zip(*(_times_and_waits(rank) for rank in found.ranks), strict=True))


def _times_and_waits(rank: RankProfile) -> Times:
    parts, *others = times_of(rank.profile)
    waits = sum(rank.waited_in_median_ns.values())
    exposed = {EXPOSED: (0, parts[EXPOSED][1] - waits)} if EXPOSED in parts else {}
    return ({**parts, **exposed, WAITS: (0, waits)}, *others)


def _median(every: tuple[Mapping[str, Runs], ...]) -> dict[str, Runs]:
    """A rank that has none of something counts as 0."""
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
