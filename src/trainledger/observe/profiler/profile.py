"""What a recording says: where the time of its steps went, what its kernels reached, and what is doubtful."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainledger.catalog import device_of_driver
from trainledger.observe.profiler.causes import Cause, causes
from trainledger.observe.profiler.flops import MatmulRate, multiplied
from trainledger.observe.profiler.memory import MemoryCurve, memory_of
from trainledger.observe.profiler.quality import doubts
from trainledger.observe.profiler.read import Advance, read_profile
from trainledger.observe.profiler.recording import Recording
from trainledger.observe.profiler.split import Split, split
from trainledger.observe.profiler.step_time import StepTime, Timeline, moments_of, pieces_of, step_time, timeline
from trainledger.observe.profiler.step_work import KernelTime, Sent, collectives_of, work_of
from trainledger.observe.profiler.steps import Steps, steps_of
from trainledger.observe.profiler.waterfall import MeasuredBar, measured_waterfall
from trainledger.report.document import Answer
from trainledger.spec.cluster import Device

PIECES = 120


@dataclass(frozen=True)
class Profile(Answer, report="profile"):
    """A profiler's recording, read: all its steps in parts, and of the median one (``at``) its kernels.

    ``pieces`` are how long each part has of each of `PIECES` equal pieces of that step (nanoseconds).
    """

    path: str
    device_name: str
    device: Device | None
    rank: int | None
    ranks: int | None
    found_by: str
    steps: tuple[StepTime, ...]
    at: int
    kernels: tuple[KernelTime, ...]
    matmuls: tuple[MatmulRate, ...]
    collectives: tuple[Sent, ...]
    split: Split
    causes: tuple[Cause, ...] = ()
    doubts: tuple[str, ...] = ()
    on_device: bool = True
    pieces: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    memory: MemoryCurve | None = None

    @property
    def step(self) -> StepTime:
        """The step of the median length (of an even number the shorter of the two)."""
        return self.steps[self.at]

    @property
    def flops(self) -> int:
        """FLOPs of matmuls, attention and convolutions in that step, recomputed ones included."""
        return sum(each.flops for each in self.matmuls)

    @property
    def model_flops(self) -> int:
        """The same without what runs again: checkpointed regions, scores in the backward of a fused attention."""
        return sum(each.model_flops for each in self.matmuls)

    @property
    def hfu(self) -> float | None:
        """The share of the peak that the step reaches, each format's FLOPs against its own peak.

        None where shapes were not recorded or the device, or a format's peak on it, is not in the catalog.
        """
        return self._of_peak(lambda each, peaks: each.at_peak_ns(peaks))

    @property
    def mfu(self) -> float | None:
        """The same of model FLOPs: nothing that runs again counts."""
        return self._of_peak(lambda each, peaks: each.model_at_peak_ns(peaks))

    @property
    def peaks(self) -> Mapping[str, float]:
        """FLOP/s of the device by format; none where the catalog does not know it."""
        return {} if self.device is None else self.device.peak_flops_per_second

    @property
    def waterfall(self) -> tuple[MeasuredBar, ...]:
        """From the counted model FLOPs at the peak to the step, bar by bar."""
        return measured_waterfall(self.step, self.split, self.matmuls, self.peaks)

    def _of_peak(self, at_peak: Callable[[MatmulRate, Mapping[str, float]], float | None]) -> float | None:
        if self.device is None or not self.flops or not self.step.nanoseconds:
            return None
        peaks = self.device.peak_flops_per_second
        found = [at_peak(each, peaks) for each in self.matmuls if each.flops]
        known = [each for each in found if each is not None]
        return sum(known) / self.step.nanoseconds if len(known) == len(found) else None


def profile_of(path: str | os.PathLike[str], advance: Advance = lambda nbytes: None) -> Profile:
    """What the recording in a file says; raises `InvalidInput` as `read_profile` does."""
    return profile(read_profile(path, advance), Path(path).name)


def profile(recording: Recording, path: str = "") -> Profile:
    """What a recording says."""
    return profile_and_timeline(recording, path)[0]


def profile_and_timeline(recording: Recording, path: str = "") -> tuple[Profile, Timeline, Steps]:
    """What a recording says, and the moments that it was found from."""
    steps, times = steps_of(recording), timeline(recording)
    each = tuple(step_time(times, step) for step in steps.steps)
    at = sorted(range(len(each)), key=lambda number: each[number].nanoseconds)[(len(each) - 1) // 2]
    name = recording.devices[0] if recording.devices else ""
    matmuls = multiplied(recording)
    kernels, rates = work_of(recording, times, matmuls, steps.steps[at])
    device = device_of_driver(name)
    peaks = {} if device is None else device.peak_flops_per_second
    found = Profile(
        path=path, device_name=name, device=device, rank=recording.rank, ranks=recording.ranks,
        found_by=steps.found_by, steps=each, at=at, kernels=kernels, matmuls=rates,
        collectives=collectives_of(times, steps.steps[at]), split=split(recording, times, matmuls, steps.steps[at]),
        causes=causes(recording, each[at], rates, peaks), doubts=(*doubts(recording, steps), *times.recomputed.doubts),
        on_device=recording.on_device, memory=memory_of(recording, steps.steps[at]),
        pieces=pieces_of(moments_of(times, steps.steps[at]), steps.steps[at], PIECES),
    )  # fmt: skip
    return found, times, steps
