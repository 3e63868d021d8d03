"""Seconds of one run of an entry on a device of a cluster: kernels by the roofline, collectives by where ranks are.

Sizes may be arrays; then seconds are arrays too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from trainledger.forecast.predict.collective import Placement, collective_seconds, placement
from trainledger.forecast.predict.measured_links import MeasuredLinks, link_fits, rank_contention
from trainledger.forecast.predict.overlap import (
    bucket_elements,
    in_buckets,
    matmuls_overlapping_sum,
    overlaps_input_gradient_sums,
    times_of,
)
from trainledger.forecast.predict.roofline import EntryTime, Machine, NoRate, Roofline
from trainledger.forecast.predict.step import host_seconds
from trainledger.forecast.predict.stream_ops import Timed
from trainledger.ledger.core.sizes import greater, is_one, is_zero
from trainledger.ledger.entry import Entry
from trainledger.ledger.model.parameters import after_blocks, before_blocks, block
from trainledger.spec.cluster import Fabric
from trainledger.spec.device import Device
from trainledger.spec.layers import segments
from trainledger.spec.run import Run
from trainledger.spec.units import ceil_div

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
            found = self._known[key] = self.roofline.once(entry)
        return key, found

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
                    sends = sends + seconds if entry.group == "expert" else sends
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
