"""Two profiles compared: the parts of their median steps, their kernels, matmuls and collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from trainledger.observe.profiler.profile import Profile
from trainledger.report.document import Answer

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
