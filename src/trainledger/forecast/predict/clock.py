"""Seconds of one run of an entry on a device of a cluster: kernels by the roofline, collectives by where ranks are.

Sizes may be arrays; then seconds are arrays too. Links of a machine are as its measured collectives show them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from trainledger.forecast.predict.collective import Placement, collective_seconds, placement
from trainledger.forecast.predict.overlap import (
    bucket_elements,
    in_buckets,
    matmuls_overlapping_sum,
    overlaps_input_gradient_sums,
    times_of,
)
from trainledger.forecast.predict.roofline import EntryTime, Machine, NoRate, Roofline
from trainledger.forecast.predict.step import host_seconds, update_rate_of
from trainledger.forecast.predict.stream_ops import Timed
from trainledger.ledger.core.sizes import greater, is_one, is_zero
from trainledger.ledger.entry import TO_EXPERTS, Entry
from trainledger.ledger.model.parameters import after_blocks, before_blocks, block
from trainledger.spec.calibration import Calibration, CollectiveTime
from trainledger.spec.cluster import Fabric, Link
from trainledger.spec.device import Device
from trainledger.spec.frozen import frozen
from trainledger.spec.layers import segments
from trainledger.spec.run import Run
from trainledger.spec.units import ceil_div

STANDS_FOR = {"send": "all_to_all", "recv": "all_to_all"}  # between two ranks the same bytes go over the same link

# Bus bandwidth is that of nccl-tests (NVIDIA/nccl-tests, doc/PERFORMANCE.md): bytes over seconds times 2 (n - 1) / n of
# an all-reduce, (n - 1) / n of an all-gather, a reduce-scatter and an all-to-all, 1 of a broadcast; it is what a link
# carries, for any number of ranks.


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
    rows = [(1 / time.seconds, time.nbytes / time.seconds) for time in times]
    aa, bb = sum(a * a for a, _ in rows), sum(b * b for _, b in rows)
    ab, ya, yb = sum(a * b for a, b in rows), sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    latency = (ya * bb - yb * ab) / determinant if determinant > 1e-9 * aa * bb else 0.0
    slope = (yb - max(0.0, latency) * ab) / bb
    if latency < 0 or slope <= 0:
        latency, slope = (0.0, yb / bb) if latency < 0 else (min(time.seconds for time in times), 0.0)
    if slope <= 0:  # a large message that was no slower than a small one
        largest = max(times, key=lambda time: time.nbytes)
        latency, slope = 0.0, largest.seconds / largest.nbytes
    worst = max(abs((latency + slope * time.nbytes) / time.seconds - 1) for time in times)
    return LinkFit(times[0].name, times[0].ranks, latency, 1 / slope, worst)


def link_fits(times: Sequence[CollectiveTime]) -> list[LinkFit]:
    """The fit of each collective over each group that has two sizes or more, in their order."""
    groups: dict[tuple[str, int], list[CollectiveTime]] = {}
    for time in times:
        groups.setdefault((time.name, time.ranks), []).append(time)
    return [link_fit(group) for group in groups.values() if len({one.nbytes for one in group}) > 1]


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
    """A machine as each of so many ranks has it: of a CPU its share of the cores and of the memory."""
    # Each rank has as many threads as `train --ranks` gives it, and a kernel takes as much longer as it has fewer of
    # them than the calibration had; assumed also of kernels that memory bounds. Each rank has its own accelerator.
    if machine.backend != "cpu" or ranks == 1:
        return machine
    slower = rank_slowdown(machine, ranks)
    memory = None if machine.memory_nbytes is None else machine.memory_nbytes // ranks
    kernels = tuple(replace(kernel, seconds=kernel.seconds * slower) for kernel in machine.kernels)
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


BUFFERING = ("split_with_sizes_copy", "chunk_cat")  # copies out of what FSDP gathers, and into what it reduces


class LeastSeconds(NamedTuple):
    """Seconds of entries with perfect overlap.

    ``total`` is the compute stream with what must be exposed; of it, ``matmuls`` are those of a backward and ``sends``
    those in which tokens go to experts and back. ``copies`` go into and out of the buffers of sharded parameters, and
    ``launches`` are what the program needs to launch all other operations: neither is in ``total``.
    """

    total: Any
    matmuls: Any
    copies: Any
    launches: Any
    sends: Any


class Clock:
    """Times entries of a run's ledgers on a machine whose devices ``fabric`` joins; equal ones are timed once.

    ``unreachable`` as in `collective_seconds`.
    """

    def __init__(self, run: Run, machine: Machine, fabric: Fabric | None, *, unreachable: float | None = None) -> None:
        self.run = run
        self.unreachable = unreachable
        self.machine = machine
        self.fabric = fabric
        self.roofline = Roofline(machine, blocking=run.recipe.launch_blocking)
        cluster = run.cluster
        self.update_rate = update_rate_of(machine, cluster.count, cluster.host_update_bytes_per_second)
        self.links = None
        if isinstance(machine, Device):
            self.contention = machine.contention_share
        else:
            self.contention = rank_contention(machine, run.layout.devices)
            self.links = MeasuredLinks(tuple(link_fits(machine.collectives)))
        self._known: dict[tuple[Any, ...], Any] = {}

    def of_run(self, run: Run) -> Clock:
        """The clock of another layout of the run; it shares the operations that were timed."""
        other = Clock(run, self.machine, self.fabric, unreachable=self.unreachable)
        other._known = self._known
        return other

    def forget(self) -> None:
        """Drop all operations that were timed, before those of other sizes."""
        self._known.clear()

    def time(self, entry: Entry) -> tuple[tuple[Any, ...], EntryTime]:
        """Of one run of an operation on the device itself, with the key that it shares with equal operations."""
        sizes = (entry.flops, entry.read, entry.written, *entry.shape, *entry.fused)
        key = (entry.name, entry.kind, entry.phase, entry.dtype, len(entry.fused), *map(_content, sizes))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._once(entry)
        return key, found

    def _once(self, entry: Entry) -> EntryTime:
        if entry.kind != "host":
            return self.roofline.once(entry)
        seconds = host_seconds(entry, self.machine, self.update_rate)
        if seconds is None:
            raise NoRate("how fast this host updates an optimizer is not known (cluster.host_update_bytes_per_second)")
        return EntryTime(entry, seconds, "host")

    def message(self, entry: Entry) -> Timed:
        """Of one collective or transfer; raises NoRate where the link that it takes is not known."""
        sizes = _content(entry.ranks), _content(entry.payload), _content(entry.read)
        key = (entry.name, entry.group, entry.overlap, entry.path, *sizes)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._message(entry)
        seconds, pieces = found
        return Timed(entry, seconds, pieces)

    def _message(self, entry: Entry) -> tuple[Any, int]:
        if entry.kind == "transfer":
            return float(host_seconds(entry, self.machine) or 0.0), 1
        if is_zero(entry.payload) or is_one(entry.ranks):
            return 0.0, 1
        if self.fabric is None:
            raise NoRate("no link between devices is known")
        per_node = self.fabric.devices_per_node
        place = placement(self.run.layout, entry.group, entry.ranks, per_node, self.run.model)
        pieces = self._pieces(entry)
        return pieces * self.collective(entry.name, entry.payload / pieces, place), pieces

    def collective(self, name: str, nbytes: Any, place: Placement) -> Any:
        """Seconds of a collective between ranks that are placed so."""
        if self.links is not None:
            return 0.0 if is_one(place.ranks) else self.links.seconds(name, nbytes, place.ranks)
        assert self.fabric is not None
        return collective_seconds(name, nbytes, place, self.fabric, unreachable=self.unreachable)

    def _pieces(self, entry: Entry) -> int:
        """How many messages the ledger's one is: ZeRO-1 has buckets, and parameters may be gathered one by one."""
        if entry.name == "all_gather" and entry.phase != "optimizer" and self.run.layout.gather == "tensor":
            return self._tensors.get(entry.path, 1)
        if entry.overlap != "compute" or entry.loop or entry.group == "tensor" or not in_buckets(self.run):
            return 1
        return int(ceil_div(entry.payload, 4 * bucket_elements(entry.ranks)))

    def least(self, entries: Sequence[Entry], depth: int, *, hidden: Sequence[str]) -> LeastSeconds:
        """Entries one after the other, one round of the ``depth`` loops around them, with perfect overlap.

        Collectives over the groups in ``hidden``, and sends between stages, are left out. A sum that overlaps matmuls
        (`predict.overlap`) counts for what is longer than those, and a ring of keys and values for what is longer than
        the attention that it feeds (`forecast.predict.streams`).
        """
        total: Any = 0.0
        matmuls: Any = 0.0
        copies: Any = 0.0
        launches: Any = 0.0
        sends: Any = 0.0
        rings: dict[str, tuple[Any, Any]] = {}  # by phase: seconds, and how many rounds
        attention: dict[str, Any] = {}
        hides = overlaps_input_gradient_sums(self.run.layout)
        for at, entry in enumerate(entries):
            times = times_of(entry, depth)
            if entry.kind == "collective":
                if entry.group in hidden or entry.group == "pipeline":
                    continue
                seconds = self.message(entry).seconds * times
                if hides and (overlapping := matmuls_overlapping_sum(entries, at)):
                    compute = sum(self.time(entries[index])[1].seconds for index in overlapping) / 2
                    seconds = greater(0.0, seconds - compute * times)
                if entry.overlap != "compute":
                    total = total + seconds
                    sends = sends + seconds if entry.group in TO_EXPERTS else sends
                elif entry.name == "send":
                    sent, rounds = rings.get(entry.phase, (0.0, 0))
                    rings[entry.phase] = (sent + seconds, greater(rounds, times))
            elif entry.kind != "transfer":
                one = self.time(entry)[1]
                seconds = one.seconds * times
                if entry.name in BUFFERING:
                    copies = copies + seconds
                    continue
                launches = launches + one.launch_seconds * times
                total = total + seconds
                if entry.kind == "attention":
                    attention[entry.phase] = attention.get(entry.phase, 0.0) + seconds
                elif entry.kind == "matmul" and entry.phase == "backward":
                    matmuls = matmuls + seconds
        # Where attention is not recomputed, keys and values that are sent again overlap all of the backward.
        if "recompute" in rings and "recompute" not in attention:
            total = total + greater(0.0, sum(sent for sent, _ in rings.values()) - total)
        else:
            for phase, (sent, rounds) in rings.items():
                total = total + greater(0.0, sent - attention.get(phase, 0.0) * rounds / (rounds + 1))
        return LeastSeconds(total, matmuls, copies, launches, sends)

    @cached_property
    def _tensors(self) -> Mapping[str, int]:
        """Tensors of the block that has most, and of what is outside of blocks."""
        spec = self.run.model
        blocks = (sum(1 for _ in block(spec, kind)) for segment in segments(spec) for kind in segment.kinds)
        outside = sum(1 for _ in (*before_blocks(spec), *after_blocks(spec)))
        return {"layers.*": max(blocks), "": outside}


def _content(size: Any) -> Any:
    """What makes sizes equal: of arrays all of their elements."""
    return size.tobytes() if hasattr(size, "tobytes") else size
