"""Two profiles compared, or two directories of ranks (medians over ranks): parts, kernels, matmuls, collectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trainledger.observe.profiler.flops import MatmulRate
from trainledger.observe.profiler.profile import Profile
from trainledger.observe.profiler.ranks import WAITS, RankProfile, Ranks
from trainledger.observe.profiler.step_time import EXPOSED
from trainledger.observe.profiler.step_work import KernelTime, Runs, Sent, summed
from trainledger.report.document import Answer
from trainledger.spec.units import format_count

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
class Against(Answer, report="pages.profile_against"):
    """A profile (``after``) and another one that it is compared with (``before``).

    The differences of parts sum to that of the steps. Those of the others do not, as kernels overlap.
    """

    before: Profile
    after: Profile
    changes: Changes
    notes: tuple[str, ...] = ()

    @property
    def steps_ns(self) -> tuple[int, int]:
        return self.before.step.nanoseconds, self.after.step.nanoseconds

    @property
    def difference_ns(self) -> int:
        return self.steps_ns[1] - self.steps_ns[0]


def against(after: Profile, before: Profile) -> Against:
    """What changed from one profile to another."""
    return Against(before, after, _changes(_times_of(before), _times_of(after)), tuple(_notes(before, after)))


def _times_of(profile: Profile) -> Times:
    """What takes time in the median step by name, of each kind in the order of `Changes`."""
    matmuls = (
        (f"{rate.kind} {rate.shape} in {rate.dtype}{', recomputed' if rate.recomputed else ''}", _runs(rate))
        for rate in profile.matmuls
    )
    collectives = (
        (
            f"{sent.collective} of {max(sent.elements_in, sent.elements_out):,} {sent.dtype} over {sent.ranks}",
            _runs(sent),
        )
        for sent in profile.collectives
    )
    parts = {name: (0, nanoseconds) for name, nanoseconds in profile.step.parts_ns.items()}
    return (
        parts,
        summed((kernel.name, _runs(kernel)) for kernel in profile.kernels),
        summed(matmuls),
        summed(collectives),
    )


def _runs(ran: KernelTime | MatmulRate | Sent) -> Runs:
    return ran.count, ran.nanoseconds


def _changes(before: Times, after: Times) -> Changes:
    return Changes(*(_changed(*sides) for sides in zip(before, after, strict=True)))


def _changed(before: Mapping[str, Runs], after: Mapping[str, Runs]) -> tuple[Changed, ...]:
    """What takes time in any of the two, the largest difference first."""
    none = (0, 0)
    sides = ((name, *before.get(name, none), *after.get(name, none)) for name in dict.fromkeys((*before, *after)))
    changed = (Changed(name, count, now, then_ns, now_ns) for name, count, then_ns, now, now_ns in sides)
    took = (each for each in changed if each.before_ns or each.after_ns)
    return tuple(sorted(took, key=lambda each: -abs(each.difference_ns)))


def _notes(before: Profile, after: Profile) -> Iterator[str]:
    if before.device_name != after.device_name:
        yield f"They ran on different devices: {before.device_name or 'a host'} and {after.device_name or 'a host'}."
    if before.rank != after.rank:
        yield f"They are of different ranks: {before.rank} and {after.rank}."
    for name, one, other in ((before.path, before, after), (after.path, after, before)):
        if one.flops and not other.flops:
            yield f"Only {name} has shapes, so matmuls are not compared."


@dataclass(frozen=True)
class RanksAgainst(Answer, report="pages.profile_against"):
    """The traces of several ranks (``after``), and those that they are compared with (``before``).

    All counts and times are medians over the ranks (of an even number the lower of the two), in their median steps;
    medians of parts do not sum to that of the steps.
    """

    before: Ranks
    after: Ranks
    changes: Changes
    notes: tuple[str, ...] = ()

    @property
    def steps_ns(self) -> tuple[int, int]:
        return self.before.step_ns, self.after.step_ns

    @property
    def difference_ns(self) -> int:
        return self.steps_ns[1] - self.steps_ns[0]

    @property
    def shared(self) -> tuple[tuple[RankProfile, RankProfile], ...]:
        """Each rank that both have, before and after."""
        then = {rank.rank: rank for rank in self.before.ranks}
        return tuple((then[rank.rank], rank) for rank in self.after.ranks if rank.rank in then)


def ranks_against(after: Ranks, before: Ranks) -> RanksAgainst:
    """What changed from the ranks of one program to those of another."""
    changes = _changes(_medians(before), _medians(after))
    return RanksAgainst(before, after, changes, tuple(_notes_on_ranks(before, after)))


def _medians(ranks: Ranks) -> Times:
    """The median over ranks of how often each runs, and of its time; a rank that has none of something counts as 0."""
    middle = (len(ranks.ranks) - 1) // 2

    def median(every: tuple[Mapping[str, Runs], ...]) -> dict[str, Runs]:
        medians = {}
        for name in dict.fromkeys(name for each in every for name in each):
            counts, times = zip(*(each.get(name, (0, 0)) for each in every), strict=True)
            medians[name] = sorted(counts)[middle], sorted(times)[middle]
        return medians

    return tuple(median(every) for every in zip(*(_times_and_waits(rank) for rank in ranks.ranks), strict=True))


def _times_and_waits(rank: RankProfile) -> Times:
    parts, *others = _times_of(rank.profile)
    exposed = {EXPOSED: (0, parts[EXPOSED][1] - rank.waits_ns)} if EXPOSED in parts else {}
    return ({**parts, **exposed, WAITS: (0, rank.waits_ns)}, *others)


def _notes_on_ranks(before: Ranks, after: Ranks) -> Iterator[str]:
    one, other = ({rank.profile.device_name or "a host" for rank in some.ranks} for some in (before, after))
    if one != other:
        yield f"They ran on different devices: {', '.join(sorted(one))} and {', '.join(sorted(other))}."
    if {rank.rank for rank in before.ranks} != {rank.rank for rank in after.ranks}:
        counts = f"{format_count(len(before.ranks))} and {format_count(len(after.ranks))}"
        yield f"They are not of the same ranks ({counts}): only those that both have stand side by side."
    yield from (f"Before: {doubt}" for doubt in before.doubts)
    yield from (f"After: {doubt}" for doubt in after.doubts)
