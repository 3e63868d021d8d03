"""A step with the seconds of its kernels left open: built once, then timed for many constants of a device.

The same functions as `layout_time` has build it, on amounts that are sums of so many runs of so many kernels; a test
compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from throughput_case import TimeCase
from throughput_times import ranks_of

from trainledger import catalog
from trainledger.ledger.entry import Entry
from trainledger.predict import layout_time as of_layout
from trainledger.predict import stage_time as of_stage
from trainledger.predict.rank_time import Act, Loop, Program
from trainledger.predict.roofline import EntryTime, Roofline
from trainledger.spec.cluster import Device
from trainledger.spec.efficiency import Efficiency


class Runs:
    """So many runs of each kernel, added up and multiplied like a number of seconds."""

    __slots__ = ("counts",)

    def __init__(self, counts: dict[int, float]) -> None:
        self.counts = counts

    def __add__(self, other: Runs | float) -> Runs:
        if not isinstance(other, Runs):
            assert other == 0
            return self
        counts = dict(self.counts)
        for kernel, count in other.counts.items():
            counts[kernel] = counts.get(kernel, 0.0) + count
        return Runs(counts)

    __radd__ = __add__

    def __mul__(self, times: float) -> Runs:
        return Runs({kernel: count * times for kernel, count in self.counts.items()})

    __rmul__ = __mul__

    def __bool__(self) -> bool:
        return True

    def at(self, seconds: list[float]) -> float:
        return sum(seconds[kernel] * count for kernel, count in self.counts.items())


class OpenClock(of_stage.Clock):
    """Numbers a run's kernels instead of timing them; messages are timed, as links are not fitted."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.kernels: list[Entry] = []

    def time(self, entry: Entry) -> EntryTime:
        key = (
            entry.name, entry.kind, entry.phase, entry.dtype, entry.flops, entry.read, entry.written, entry.shape,
            entry.fused,
        )  # fmt: skip
        found = self._known.get(key)
        if found is None:
            number = len(self.kernels)
            self.kernels.append(replace(entry, loop=()))
            one: Any = Runs({number: 1.0})
            found = self._known[key] = EntryTime(entry, one, "", 0.0, 0.0, one)
        return found


@dataclass(frozen=True)
class OpenStep:
    """A case whose kernels' seconds are open."""

    case: TimeCase
    stages: tuple[Any, ...]
    launches: tuple[Runs, ...]
    kernels: tuple[Entry, ...]
    device: Device

    def seconds(self, efficiency: Efficiency) -> float:
        """The seconds of the step with other constants of its device."""
        run = self.case.run
        device = replace(self.device, efficiency=efficiency)
        roofline = Roofline(device)
        times = [roofline.time(each) for each in self.kernels]
        each_seconds = [float(each.seconds) for each in times]
        launch = [float(each.launch_seconds) for each in times]
        launches = max(each.at(launch) for each in self.launches)
        if run.layout.alone:
            step = self.stages[0].at(each_seconds)
            return max(step, launches)
        known: dict[int, Any] = {}
        stages = []
        for stage in self.stages:
            if id(stage.ledger) not in known:
                known[id(stage.ledger)] = _closed(stage, each_seconds)
            stages.append(replace(known[id(stage.ledger)], number=stage.number))
        step = of_layout.step_seconds(run, stages, efficiency.contention_share)
        step += max(0.0, of_layout.launching(run, launches) - step)
        assert device.fabric is not None
        return step * (1 + of_layout.straggling(run, device, device.fabric))


def _closed(stage: Any, seconds: list[float]) -> Any:
    def closed(acts: Program) -> Program:
        found: list[Act | Loop] = []
        for each in acts:
            if isinstance(each, Loop):
                found.append(Loop(each.name, each.count, closed(each.body)))
            elif isinstance(each.seconds, Runs):
                found.append(Act(each.kind, each.seconds.at(seconds), each.name, each.backward, each.pieces))
            else:
                found.append(each)
        return tuple(found)

    return replace(
        stage, whole=closed(stage.whole), begin=closed(stage.begin), end=closed(stage.end), close=closed(stage.close),
        chunks=tuple((closed(forward), closed(backward), weights) for forward, backward, weights in stage.chunks),
    )  # fmt: skip


def open_step(case: TimeCase) -> OpenStep:
    """The step of a case with its kernels' seconds left open."""
    device = replace(case.device, fabric=catalog.fabric(case.device, case.run.cluster))
    clock = OpenClock(case.run, device, device.fabric)
    ranks = ranks_of(case)
    if case.run.layout.alone:
        total = Runs({})
        for entry in ranks[0].ledger:
            if entry.kind not in ("transfer", "collective"):
                total = total + clock.time(entry).seconds * entry.times
        return OpenStep(case, (total,), (total,), tuple(clock.kernels), device)
    known: dict[int, Any] = {}
    stages, launches = [], {}
    for each in ranks:
        if id(each.ledger) not in known:
            found = of_stage._stage(case.run, each.stage, each.count, each.ledger, clock)
            counts: dict[int, float] = {}
            for time in found.times:
                for kernel, count in time.launch_seconds.counts.items():
                    counts[kernel] = counts.get(kernel, 0.0) + count
            launches[id(each.ledger)] = Runs(counts)
            known[id(each.ledger)] = replace(found, times=())
        stages.append(replace(known[id(each.ledger)], number=each.stage))
    return OpenStep(case, tuple(stages), tuple(launches.values()), tuple(clock.kernels), device)
