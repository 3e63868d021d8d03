"""Two profiles compared: the parts of their median steps, their kernels, products and collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
    parts, kernels, products, sent = (
        changes(summed(found(before)), summed(found(after)))
        for found in (parts_of, kernels_of, products_of, collectives_of)
    )
    return Against(before, after, parts, kernels, products, sent, tuple(_notes(before, after)))


def parts_of(found: Profile) -> Iterable[tuple[str, Runs]]:
    """The parts of the median step."""
    return ((name, (0, each)) for name, each in found.step.parts_ns.items())


def kernels_of(found: Profile) -> Iterable[tuple[str, Runs]]:
    """Its kernels by name."""
    return ((each.name, (each.count, each.nanoseconds)) for each in found.kernels)


def products_of(found: Profile) -> Iterable[tuple[str, Runs]]:
    """Its matmuls, attention and convolutions by shape, format, and whether they run again."""
    for each in found.products:
        again = ", recomputed" if each.recomputed else ""
        yield f"{each.kind} {each.shape} in {each.dtype}{again}", (each.count, each.nanoseconds)


def collectives_of(found: Profile) -> Iterable[tuple[str, Runs]]:
    """Its collectives by size, format and ranks."""
    for each in found.collectives:
        size = max(each.elements_in, each.elements_out)
        yield f"{each.collective} of {size:,} {each.dtype} over {each.ranks}", (each.count, each.nanoseconds)


def changes(before: Mapping[str, Runs], after: Mapping[str, Runs]) -> tuple[Changed, ...]:
    """What takes time in any of the two, the largest difference first."""
    found = []
    for name in dict.fromkeys((*before, *after)):
        (before_count, before_ns), (after_count, after_ns) = before.get(name, (0, 0)), after.get(name, (0, 0))
        if before_ns or after_ns:
            found.append(Changed(name, before_count, after_count, before_ns, after_ns))
    return tuple(sorted(found, key=lambda each: -abs(each.difference_ns)))


def summed(found: Iterable[tuple[str, Runs]]) -> dict[str, Runs]:
    """What has the same name as one."""
    sums: dict[str, Runs] = {}
    for name, (count, nanoseconds) in found:
        before = sums.get(name, (0, 0))
        sums[name] = before[0] + count, before[1] + nanoseconds
    return sums


def _notes(before: Profile, after: Profile) -> Iterator[str]:
    if before.device_name != after.device_name:
        yield f"They ran on different devices: {before.device_name or 'a host'} and {after.device_name or 'a host'}."
    if before.rank != after.rank:
        yield f"They are of different ranks: {before.rank} and {after.rank}."
    for name, one, other in ((before.path, before, after), (after.path, after, before)):
        if one.flops and not other.flops:
            yield f"Only {name} has shapes, so products are not compared."
