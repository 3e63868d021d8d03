"""Links of a machine as its measured collectives show them: latency and bandwidth, fitted.

Bus bandwidth is that of nccl-tests (NVIDIA/nccl-tests, doc/PERFORMANCE.md): bytes over seconds times 2 (n - 1) / n of
an all-reduce, (n - 1) / n of an all-gather, a reduce-scatter and an all-to-all, 1 of a broadcast; it is what a link
carries, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.frozen import frozen
from trainledger.spec.rates import CollectiveTime


@frozen
class LinkFit:
    """Seconds of a collective over bytes: ``latency_seconds`` + bytes / ``bytes_per_second`` (Hockney 1994).

    ``bus_bytes_per_second`` is the second number as a bus bandwidth. ``worst`` is how far the farthest sample lies off.
    """

    name: str
    ranks: int
    latency_seconds: float
    bytes_per_second: float
    worst: float

    @property
    def bus_bytes_per_second(self) -> float:
        return self.bytes_per_second * bus_factor(self.name, self.ranks)


def bus_factor(name: str, ranks: int) -> float:
    """Bus bandwidth over bytes per second of a collective.

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    if name == "broadcast":
        return 1.0
    return (2 if name == "all_reduce" else 1) * (ranks - 1) / ranks


def link_fit(times: Sequence[CollectiveTime]) -> LinkFit:
    """The fit of one collective over one group, least squares of relative errors; neither number is negative.

    >>> samples = [CollectiveTime(name="broadcast", backend="gloo", ranks=2, nbytes=n, seconds=1e-4 + n / 1e9)
    ...            for n in (10**3, 10**5, 10**7)]
    >>> fit = link_fit(samples)
    >>> round(fit.latency_seconds, 9), round(fit.bytes_per_second)
    (0.0001, 1000000000)
    """
    # Of t = a + b n the weights 1 / t^2 make all sizes count alike.
    rows = [(1 / each.seconds, each.nbytes / each.seconds) for each in times]
    aa, bb = sum(a * a for a, _ in rows), sum(b * b for _, b in rows)
    ab, ya, yb = sum(a * b for a, b in rows), sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    latency = (ya * bb - yb * ab) / determinant if determinant > 1e-9 * aa * bb else 0.0
    slope = (yb - max(0.0, latency) * ab) / bb
    if latency < 0 or slope <= 0:
        latency, slope = (0.0, yb / bb) if latency < 0 else (min(each.seconds for each in times), 0.0)
    if slope <= 0:  # a large message that was no slower than a small one
        largest = max(times, key=lambda each: each.nbytes)
        latency, slope = 0.0, largest.seconds / largest.nbytes
    worst = max(abs((latency + slope * each.nbytes) / each.seconds - 1) for each in times)
    return LinkFit(times[0].name, times[0].ranks, latency, 1 / slope, worst)


def link_fits(times: Sequence[CollectiveTime]) -> list[LinkFit]:
    """The fit of each collective over each group that has two sizes or more, in their order."""
    groups: dict[tuple[str, int], list[CollectiveTime]] = {}
    for each in times:
        groups.setdefault((each.name, each.ranks), []).append(each)
    return [link_fit(each) for each in groups.values() if len({one.nbytes for one in each}) > 1]
