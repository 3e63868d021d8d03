"""All operations of many published steps in columns, so that one device's constants are tried on all at once.

A step is timed exactly by `layout_time`; around that, its seconds are taken to follow what its slowest stage computes
and launches: (computed x bubble + exposed), or launched x bubble where that is longer, all of it longer by the
stragglers. A fit moves on those and is then timed exactly again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from throughput_case import TimeCase
from throughput_times import predicted, ranks_of

from trainledger.forecast.predict.roofline import Roofline
from trainledger.ledger.entry import Entry
from trainledger.spec.device import Device, Efficiency

Array = Any  # of numpy


@dataclass(frozen=True)
class Kernels:
    """Different operations of one name, kind and dtype on one device; their sizes are arrays."""

    device: Device
    entry: Entry
    places: Array


class Columns:
    """The operations of the slowest stage of each case, and how often each runs."""

    def __init__(self, cases: Sequence[TimeCase]) -> None:
        self.cases = tuple(cases)
        known: dict[tuple[Any, ...], int] = {}
        sizes: dict[tuple[Any, ...], list[tuple[int, Entry]]] = {}
        devices: dict[str, Device] = {}
        self._runs: list[tuple[Array, Array]] = []
        for each in self.cases:
            stages = {id(rank.ledger): rank.ledger for rank in ranks_of(each)}.values()
            slowest = max(stages, key=lambda ledger: ledger.matmul_flops)
            device = f"{each.device.name} {each.device.peak_flops_per_second} {each.device.memory_bytes_per_second}"
            devices[device] = each.device
            counts: dict[int, int] = {}
            for entry in slowest:
                if entry.kind in ("transfer", "collective", "allocate"):
                    continue
                family = (device, entry.name, entry.kind, entry.dtype, len(entry.shape), len(entry.fused),
                          entry.shape[-1] if entry.kind == "attention" else None)  # fmt: skip
                key = (*family, entry.flops, entry.read, entry.written, entry.shape, entry.fused)
                if key not in known:
                    known[key] = len(known)
                    sizes.setdefault(family, []).append((known[key], entry))
                counts[known[key]] = counts.get(known[key], 0) + entry.times
            self._runs.append((np.array(list(counts)), np.array(list(counts.values()), dtype=float)))
        self.kernels = tuple(_together(devices[family[0]], found) for family, found in sizes.items())
        self.count = len(known)

    def times(self, efficiency: Efficiency) -> tuple[Array, Array]:
        """Seconds that each case's slowest stage computes, and that its program launches."""
        seconds, launches = np.zeros(self.count), np.zeros(self.count)
        for each in self.kernels:
            time = Roofline(replace(each.device, efficiency=efficiency)).time(each.entry)
            seconds[each.places], launches[each.places] = time.seconds, time.launch_seconds
        computed = np.array([float(seconds[places] @ counts) for places, counts in self._runs])
        launched = np.array([float(launches[places] @ counts) for places, counts in self._runs])
        blocking = np.array([each.run.recipe.launch_blocking for each in self.cases])
        return computed + blocking * launched, launched


def _together(device: Device, found: list[tuple[int, Entry]]) -> Kernels:
    """One entry of arrays."""
    first = found[0][1]
    entries = [entry for _, entry in found]

    def array(values: list[Any]) -> Array:
        return np.array(values, dtype=float) if isinstance(values[0], float) else np.array(values)

    shape = tuple(array([each.shape[at] for each in entries]) for at in range(len(first.shape)))
    if first.kind == "attention":
        shape = (*shape[:-1], first.shape[-1])
    entry = replace(
        first, loop=(), flops=array([each.flops for each in entries]), read=array([each.read for each in entries]),
        written=array([each.written for each in entries]), shape=shape,
        fused=tuple(array([each.fused[at] for each in entries]) for at in range(len(first.fused))),
    )  # fmt: skip
    return Kernels(device, entry, np.array([place for place, _ in found]))


@dataclass(frozen=True)
class Around:
    """How steps follow what they compute and launch, around constants with which they were timed exactly."""

    columns: Columns
    efficiency: Efficiency
    exact: Array
    computed: Array
    launched: Array
    bubble: Array
    exposed: Array
    waiting: Array
    contended: Array
    networked: Array
    doublings: Array

    def seconds(self, efficiency: Efficiency) -> Array:
        """The seconds of all steps with other constants."""
        computed, launched = self.columns.times(efficiency)
        more = efficiency.contention_share - self.efficiency.contention_share
        longer = 1 / efficiency.network_share - 1 / self.efficiency.network_share
        step = computed * self.bubble + self.exposed + more * self.contended + longer * self.networked
        step = np.maximum(step, launched * self.waiting)
        return step * (1 + efficiency.straggler_share * self.doublings)


CONTENTION_STEP = 0.05
NETWORK_STEP = 0.1  # more seconds of collectives between nodes


def around(columns: Columns, efficiency: Efficiency, contended: Array | None = None) -> Around:
    """All steps timed exactly, and how they move from there; ``contended`` as it was found before."""
    computed, launched = columns.times(efficiency)
    steps = [predicted(each, efficiency) for each in columns.cases]
    other = replace(efficiency, contention_share=efficiency.contention_share + CONTENTION_STEP)
    exact = np.array([float(each.seconds or 0) for each in steps])
    stragglers = np.array([float(each.causes["stragglers"]) for each in steps])
    exposed = np.array([float(each.causes["exposed communication"]) for each in steps])
    waited = np.array([float(each.causes["launch overhead"]) for each in steps])
    doublings = np.array([_doublings(each) for each in columns.cases])
    own = np.array([_own_overhead(each) for each in steps])
    waiting = np.maximum(waited - own, 0.0)
    alone = exact - stragglers
    bubble = (alone - exposed - waiting) / computed
    slow = replace(efficiency, network_share=efficiency.network_share / (1 + NETWORK_STEP))
    slower = np.array([float(predicted(each, slow).seconds or 0) for each in columns.cases])
    networked = (slower - exact) / NETWORK_STEP * efficiency.network_share / (exact / alone)
    if contended is None:
        more = np.array([float(predicted(each, other).seconds or 0) for each in columns.cases])
        contended = (more - exact) / CONTENTION_STEP / (exact / alone)
    queued = np.where(waiting > 1e-9 * alone, alone / np.maximum(launched, 1e-12), bubble)
    return Around(
        columns=columns, efficiency=efficiency, exact=exact, computed=computed, launched=launched, bubble=bubble,
        exposed=exposed, waiting=queued, contended=contended, networked=networked, doublings=doublings,
    )  # fmt: skip


def _own_overhead(step: Any) -> float:
    """The part of the launch overhead that is the kernels' own, not waiting."""
    return float(step.causes["launch overhead"] - step.by_kind.get("other", 0.0))


def _doublings(case: TimeCase) -> int:
    from trainledger import catalog

    fabric = catalog.fabric(case.device, case.run.cluster)
    assert fabric is not None
    nodes: int = -(-case.run.layout.devices // fabric.devices_per_node)
    return (nodes - 1).bit_length()
