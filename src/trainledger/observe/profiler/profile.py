"""The profile of a recording: its steps in parts, the kernels of the median one, its memory, and doubts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trainledger.catalog import device_of_driver
from trainledger.observe.profiler.causes import Cause, MeasuredBar, causes, measured_waterfall
from trainledger.observe.profiler.flops import MatmulRate, multiplied
from trainledger.observe.profiler.kinds import COLLECTIVE, ON_HOST
from trainledger.observe.profiler.read import Advance, read_profile
from trainledger.observe.profiler.recording import NONE, Message, Recording, Shapes, Spans
from trainledger.observe.profiler.step_time import StepTime, Timeline, moments_of, pieces_of, step_time, timeline
from trainledger.observe.profiler.step_work import KernelTime, Sent, Split, collectives_of, split, work_of
from trainledger.observe.profiler.steps import Step, Steps, steps_of
from trainledger.report.document import Answer
from trainledger.spec.device import Device
from trainledger.spec.units import format_percent

_POINTS = 600  # of a curve: of more the highest of each piece is kept


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes allocated and reserved over a step, at nanoseconds from its beginning on the host."""

    times_ns: tuple[int, ...]
    allocated_nbytes: tuple[int, ...]
    reserved_nbytes: tuple[int, ...]
    peak_nbytes: int


def memory_of(recording: Recording, step: Step) -> MemoryCurve | None:
    """The memory of a step; None where it was not recorded. Of a program on a device it is the device's."""
    events = recording.memory.where(recording.memory.begin_in(step.host_ns))
    if not len(events):
        return None
    events = events.where(events.kinds == events.kinds.max())
    allocated = events.links
    if allocated.max() <= 0:
        return None
    pieces = np.array_split(np.arange(len(events)), min(_POINTS, len(events)))
    kept = events.where(np.array([piece[allocated[piece].argmax()] for piece in pieces]))
    times_ns = tuple((kept.begins_ns - step.host_ns[0]).tolist())
    return MemoryCurve(times_ns, tuple(kept.links.tolist()), tuple(kept.operators.tolist()), int(allocated.max()))


_GRAPH = re.compile(r"GraphLaunch")
BROKEN_OFF = "The file breaks off: what comes after its last whole event is not here, nor perhaps the devices' names."
_FEW = 0.02  # of the work: not worth a sentence


def doubts(recording: Recording, steps: Steps) -> Iterator[str]:
    """A sentence for each thing that numbers of this recording lack or hide, the gravest first."""
    if recording.broken_off:
        yield BROKEN_OFF
    if recording.malformed:
        yield f"{recording.malformed:,} events without a time, a name or a possible length are left out."
    if recording.on_device:
        yield from _of_device(recording, steps)
    else:
        yield (
            "There is no work of a device: the program ran on the host, or its device was not recorded "
            "(activities of the profiler). Times are those of operators."
        )
        if (recording.ranks or 0) > 2 and len(recording.named(recording.annotations, ON_HOST)):
            yield "Collectives of a host do not say which ranks take part: they are taken to be all of them."
    if not _says(recording, recording.operators, Shapes):
        yield "Shapes were not recorded (record_shapes=True): no FLOPs, and no MFU."
    if "with_stack" in recording.recorded:
        yield "Python stacks were recorded (with_stack), which makes the host slower than it is without the profiler."
    count = len(steps.steps)
    if count < 3:
        yield f"There {'is one step' if count == 1 else 'are two steps'}: nothing says how far steps differ."


def _says(recording: Recording, spans: Spans, kind: type[Shapes | Message]) -> bool:
    """Whether any of these events has arguments of a kind."""
    return any(isinstance(recording.arguments[at], kind) for at in np.unique(spans.more).tolist() if at != NONE)


def _of_device(recording: Recording, steps: Steps) -> Iterator[str]:
    work = recording.work
    alone = float((recording.launch_of_work == NONE).mean())
    if alone > _FEW:
        yield (
            f"Of {format_percent(alone)} of the device work the launch is not here (launched before the recording, or "
            "by a program that was not recorded): whether the host came too late there is told by the length of gaps."
        )
    unknown = float((recording.operator_of_work == NONE).mean())
    if unknown > _FEW:
        share = format_percent(unknown)
        yield f"Of {share} of the device work no operator is known: its kind is that of its kernel's name."
    graphs = len(recording.named(recording.launches, _GRAPH))
    if graphs:
        yield (
            f"{graphs:,} launches are graphs, which hide their operators: shapes and FLOPs within them are not known, "
            "and older profilers leave some of their kernels out, which then look like idle time."
        )
    empty = [step.name for step in steps.steps if not work.begin_in(step.device_ns).any()]
    if empty:
        yield f"Steps without device work: {', '.join(empty)}."
    sent = recording.named(work, COLLECTIVE)
    if len(sent) and not _says(recording, sent, Message):
        yield "Collectives do not say what they send (PyTorch 2.2 and newer record it): their bytes are not known."
    if len(sent):
        yield "A collective's kernel runs from when this rank is there: its time has the wait for the others in it."


PIECES = 120


@dataclass(frozen=True)
class Profile(Answer, report="pages.profile"):
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
        return sum(matmul.flops for matmul in self.matmuls)

    @property
    def model_flops(self) -> int:
        """The same without what runs again: checkpointed regions, scores in the backward of a fused attention."""
        return sum(matmul.model_flops for matmul in self.matmuls)

    @property
    def hfu(self) -> float | None:
        """The share of the peak that the step reaches, each format's FLOPs against its own peak.

        None where shapes were not recorded or the device, or a format's peak on it, is not in the catalog.
        """
        return self._of_peak(lambda matmul_rate, peaks: matmul_rate.at_peak_ns(peaks))

    @property
    def mfu(self) -> float | None:
        """The same of model FLOPs: nothing that runs again counts."""
        return self._of_peak(lambda matmul_rate, peaks: matmul_rate.model_at_peak_ns(peaks))

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
        ideals = [at_peak(rate, self.peaks) for rate in self.matmuls if rate.flops]
        known = [ideal for ideal in ideals if ideal is not None]
        return sum(known) / self.step.nanoseconds if len(known) == len(ideals) else None


def profile_of(path: str | os.PathLike[str], advance: Advance = lambda nbytes: None) -> Profile:
    """What the recording in a file says; raises `InvalidInput` as `read_profile` does."""
    return profile(read_profile(path, advance), Path(path).name)


def profile(recording: Recording, path: str = "") -> Profile:
    """What a recording says."""
    return profile_and_timeline(recording, path)[0]


def profile_and_timeline(recording: Recording, path: str = "") -> tuple[Profile, Timeline, Steps]:
    """What a recording says, and the moments that it was found from."""
    steps, times = steps_of(recording), timeline(recording)
    parts = tuple(step_time(times, step) for step in steps.steps)
    at = sorted(range(len(parts)), key=lambda number: parts[number].nanoseconds)[(len(parts) - 1) // 2]
    step, name = steps.steps[at], recording.devices[0] if recording.devices else ""
    matmuls, device = multiplied(recording), device_of_driver(name)
    kernels, rates = work_of(recording, times, matmuls, step)
    profile = Profile(
        path=path,
        device_name=name,
        device=device,
        rank=recording.rank,
        ranks=recording.ranks,
        found_by=steps.found_by,
        steps=parts,
        at=at,
        kernels=kernels,
        matmuls=rates,
        collectives=collectives_of(times, step),
        split=split(recording, times, matmuls, step),
        causes=causes(recording, parts[at], rates, {} if device is None else device.peak_flops_per_second),
        doubts=(*doubts(recording, steps), *times.recomputed.doubts),
        on_device=recording.on_device,
        pieces=pieces_of(moments_of(times, step), step, PIECES),
        memory=memory_of(recording, step),
    )
    return profile, times, steps
