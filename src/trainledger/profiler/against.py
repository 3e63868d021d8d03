"""Two profiles compared: the parts of their median steps, their kernels, products and collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trainledger.document import Answer
from trainledger.profiler.profile import Profile

Runs = tuple[int, int]  # how often, and nanoseconds in all


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
class Against(Answer, report="profile_against"):
    """A profile (``after``) and another one that it is compared with (``before``).

    The differences of ``parts`` sum to that of the steps. Those of the others do not, as kernels overlap. Of each kind
    the largest differences come first; the counts of parts are 0.
    """

    before: Profile
    after: Profile
    parts: tuple[Changed, ...]
    kernels: tuple[Changed, ...]
    products: tuple[Changed, ...]
    collectives: tuple[Changed, ...]
    notes: tuple[str, ...] = ()

    @property
    def difference_ns(self) -> int:
        return self.after.step.nanoseconds - self.before.step.nanoseconds


def against(after: Profile, before: Profile) -> Against:
    """What changed from one profile to another."""
    both = (before, after)
    parts, kernels, products, sent = (
        _changes(*(found(each) for each in both)) for found in (_parts, _kernels, _products, _collectives)
    )
    return Against(before, after, parts, kernels, products, sent, tuple(_notes(before, after)))


def _parts(found: Profile) -> Iterable[tuple[str, Runs]]:
    return ((name, (0, each)) for name, each in found.step.parts_ns.items())


def _kernels(found: Profile) -> Iterable[tuple[str, Runs]]:
    return ((each.name, (each.count, each.nanoseconds)) for each in found.kernels)


def _products(found: Profile) -> Iterable[tuple[str, Runs]]:
    for each in found.products:
        again = ", recomputed" if each.recomputed else ""
        yield f"{each.kind} {each.shape} in {each.dtype}{again}", (each.count, each.nanoseconds)


def _collectives(found: Profile) -> Iterable[tuple[str, Runs]]:
    for each in found.collectives:
        size = max(each.elements_in, each.elements_out)
        yield f"{each.collective} of {size:,} {each.dtype} over {each.ranks}", (each.count, each.nanoseconds)


def _changes(before: Iterable[tuple[str, Runs]], after: Iterable[tuple[str, Runs]]) -> tuple[Changed, ...]:
    a, b = _summed(before), _summed(after)
    found = []
    for name in dict.fromkeys((*a, *b)):
        (before_count, before_ns), (after_count, after_ns) = a.get(name, (0, 0)), b.get(name, (0, 0))
        if before_ns or after_ns:
            found.append(Changed(name, before_count, after_count, before_ns, after_ns))
    return tuple(sorted(found, key=lambda each: -abs(each.difference_ns)))


def _summed(found: Iterable[tuple[str, Runs]]) -> dict[str, Runs]:
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
            yield f"Only {name} has shapes, so products are not compared."
