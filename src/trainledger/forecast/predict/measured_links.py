"""Links of a machine as its measured collectives show them: latency and bandwidth, fitted.

Bus bandwidth is that of nccl-tests (NVIDIA/nccl-tests, doc/PERFORMANCE.md): bytes over seconds times 2 (n - 1) / n of
an all-reduce, (n - 1) / n of an all-gather, a reduce-scatter and an all-to-all, 1 of a broadcast; it is what a link
carries, for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainledger.forecast.predict.roofline import NoRate
from trainledger.spec.calibration import Calibration, CollectiveTime
from trainledger.spec.cluster import Fabric, Link
from trainledger.spec.frozen import frozen

STANDS_FOR = {"send": "all_to_all", "recv": "all_to_all"}  # between two ranks the same bytes go over the same link


@frozen
class LinkFit:
    """Seconds of a collective over bytes: ``latency_seconds`` + bytes / ``bytes_per_second`` (Hockney 1994).

    ``bus_bytes_per_second`` is the second number as a bus bandwidth. ``worst`` is the largest error of a sample.
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


# Ranks of this machine


@frozen
class MeasuredLinks:
    """The collectives of a machine as they were measured between its own ranks."""

    fits: tuple[LinkFit, ...]

    def seconds(self, name: str, nbytes: float, ranks: int) -> float:
        """Seconds of a collective by the fit over as many ranks, or by that over most, at the same bus bandwidth.

        Latency grows with the steps round a ring. Raises NoRate where the collective was not measured.
        """
        name = STANDS_FOR.get(name, name)
        own = [each for each in self.fits if each.name == name]
        if not own:
            raise NoRate(f"no {name.replace('_', '-')} between ranks of this machine was measured")
        fit = next((each for each in own if each.ranks == ranks), max(own, key=lambda each: each.ranks))
        steps = (ranks - 1) / (fit.ranks - 1)
        return fit.latency_seconds * steps + nbytes * bus_factor(name, ranks) / fit.bus_bytes_per_second


def measured_fabric(machine: Calibration, devices: int) -> Fabric | None:
    """The links between ranks of a machine, all of them one node; None where no collective was measured."""
    fits = link_fits(machine.collectives)
    if not fits:
        return None
    rate = max(each.bus_bytes_per_second for each in fits)
    title = f"links of this machine ({machine.collectives[0].backend}, measured {machine.date})"
    return Fabric(
        devices_per_node=devices,
        node=Link(name="this-machine", title=title, bytes_per_second=rate, basis="measured", date=machine.date),
    )


def of_each_rank(machine: Calibration, ranks: int) -> Calibration:
    """A machine as each of so many ranks has it: of a CPU its share of the cores and of the memory.

    Each rank has as many threads as `train --ranks` gives it, and a kernel takes as much longer as it has fewer of them
    than the calibration had; assumed also of kernels that memory bounds. Each rank has its own accelerator.
    """
    if machine.backend != "cpu" or ranks == 1:
        return machine
    slower = rank_slowdown(machine, ranks)
    memory = None if machine.memory_nbytes is None else machine.memory_nbytes // ranks
    kernels = tuple(replace(each, seconds=each.seconds * slower) for each in machine.kernels)
    return replace(machine, kernels=kernels, memory_nbytes=memory)


def rank_slowdown(machine: Calibration, ranks: int) -> float:
    """How much longer a kernel takes on one of so many ranks of a CPU than alone."""
    cores = machine.cores or machine.threads
    threads = machine.threads if machine.threads < cores else max(1, cores // ranks)
    return machine.threads / threads * max(1.0, ranks * threads / cores)


def rank_contention(machine: Calibration, ranks: int) -> float:
    """The share of an overlapped collective's time that compute loses to it: all of it on a CPU with no idle core."""
    cores = machine.cores or machine.threads
    threads = machine.threads if machine.threads < cores else max(1, cores // ranks)
    return 1.0 if machine.backend == "cpu" and ranks * threads >= cores else 0.0
