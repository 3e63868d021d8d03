"""Two profiles compared, or two directories of ranks (medians over ranks): parts, kernels, matmuls, collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from trainledger.observe.profiler.profile import Profile
from trainledger.observe.profiler.ranks import WAITS, RankProfile, Ranks
from trainledger.observe.profiler.step_time import EXPOSED
from trainledger.report.document import Answer
from trainledger.spec.units import format_count

Runs = tuple[int, int]  # how often, and nanoseconds in all
Times = tuple[Mapping[str, Runs], ...]  # by name: parts, kernels, matmuls, collectives


@dataclass(frozen=True)
class Changed:
    """Something that takes time in the step of one profile or of both: how often it runs, and nanoseconds in all."""

    name: str
    before_count: int
    after_count: int
    before_ns: int
    after_ns: int

    @property
    def difference_ns(self) -> int:
        return self.after_ns - self.before_ns


@dataclass(frozen=True)
class Changes:
    """What takes time in two steps, of each kind the largest difference first; the counts of parts are 0."""

    parts: tuple[Changed, ...]
    kernels: tuple[Changed, ...]
    matmuls: tuple[Changed, ...]
    collectives: tuple[Changed, ...]


@dataclass(frozen=True)
class Against(Answer, report="profile_against"):
    """A profile (``after``) and another one that it is compared with (``before``).

    The differences of parts sum to that of the steps. Those of the others do not, as kernels overlap.
    """

    before: Profile
    after: Profile
    changes: Changes
    notes: tuple[str, ...] = ()

    @property
    def difference_ns(self) -> int:
        return self.after.step.nanoseconds - self.before.step.nanoseconds


def against(after: Profile, before: Profile) -> Against:
    """What changed from one profile to another."""
    return Against(before, after, changes(times_of(before), times_of(after)), tuple(_notes(before, after)))


def times_of(found: Profile) -> Times:
    """What takes time in the median step by name, of each kind in the order of `Changes`."""
    return (
        _summed((name, (0, each)) for name, each in found.step.parts_ns.items()),
        _summed((each.name, (each.count, each.nanoseconds)) for each in found.kernels),
        _summed(_matmuls(found)),
        _summed(_collectives(found)),
    )


def changes(before: Times, after: Times) -> Changes:
    """What changed from one step to another."""
    return Changes(*(_changed(*each) for each in zip(before, after, strict=True)))


def _matmuls(found: Profile) -> Iterator[tuple[str, Runs]]:
    """Matmuls, attention and convolutions by shape, format, and whether they run again."""
    for each in found.matmuls:
        again = ", recomputed" if each.recomputed else ""
        yield f"{each.kind} {each.shape} in {each.dtype}{again}", (each.count, each.nanoseconds)


def _collectives(found: Profile) -> Iterator[tuple[str, Runs]]:
    """Collectives by size, format and ranks."""
    for each in found.collectives:
        size = max(each.elements_in, each.elements_out)
        yield f"{each.collective} of {size:,} {each.dtype} over {each.ranks}", (each.count, each.nanoseconds)


def _changed(before: Mapping[str, Runs], after: Mapping[str, Runs]) -> tuple[Changed, ...]:
    """What takes time in any of the two, the largest difference first."""
    found = []
    for name in dict.fromkeys((*before, *after)):
        (before_count, before_ns), (after_count, after_ns) = before.get(name, (0, 0)), after.get(name, (0, 0))
        if before_ns or after_ns:
            found.append(Changed(name, before_count, after_count, before_ns, after_ns))
    return tuple(sorted(found, key=lambda each: -abs(each.difference_ns)))


def _summed(found: Iterable[tuple[str, Runs]]) -> dict[str, Runs]:
    """What has the same name as one."""
    summed: dict[str, Runs] = {}
    for name, (count, nanoseconds) in found:
        before = summed.get(name, (0, 0))
        summed[name] = before[0] + count, before[1] + nanoseconds
    return summed


def _notes(before: Profile, after: Profile) -> Iterator[str]:
    if before.device_name != after.device_name:
        yield f"They ran on different devices: {before.device_name or 'a host'} and {after.device_name or 'a host'}."
    if before.rank != after.rank:
        yield f"They are of different ranks: {before.rank} and {after.rank}."
    for name, one, other in ((before.path, before, after), (after.path, after, before)):
        if one.flops and not other.flops:
            yield f"Only {name} has shapes, so matmuls are not compared."


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
    return RanksAgainst(
        before, after, changes(_medians(before), _medians(after)), tuple(_notes_on_ranks(before, after))
    )


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


def _notes_on_ranks(before: Ranks, after: Ranks) -> Iterator[str]:
    one, other = ({each.profile.device_name or "a host" for each in some.ranks} for some in (before, after))
    if one != other:
        yield f"They ran on different devices: {', '.join(sorted(one))} and {', '.join(sorted(other))}."
    if {each.rank for each in before.ranks} != {each.rank for each in after.ranks}:
        counts = f"{format_count(len(before.ranks))} and {format_count(len(after.ranks))}"
        yield f"They are not of the same ranks ({counts}): only those that both have stand side by side."
    for which, found in (("Before", before), ("After", after)):
        for doubt in found.doubts:
            yield f"{which}: {doubt}"
