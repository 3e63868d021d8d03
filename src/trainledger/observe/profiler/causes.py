"""Largest parts of a step's time: the waterfall from the ideal step to the measured one; causes and remedies.

The bars sum to the step. Their names are those of a forecast's waterfall (`predict.step.CAUSES`,
`predict.forecast.RUN_CAUSES`) wherever both mean the same; a forecast's memory-bound operations include the optimizer,
its launch overhead all of the host's lateness. A cause's gain is what would be saved if its part vanished.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainledger.forecast.predict.forecast import IDEAL, UNEXPLAINED
from trainledger.forecast.predict.step import CAUSES
from trainledger.observe.profiler import step_time as times
from trainledger.observe.profiler.flops import MatmulRate
from trainledger.observe.profiler.kinds import CALLS, OTHERS, RECOMPUTATION, SENDS
from trainledger.observe.profiler.recording import COPY as A_COPY
from trainledger.observe.profiler.recording import KERNEL, NONE, Recording, Spans
from trainledger.observe.profiler.step_work import COMPUTE_PARTS, Split
from trainledger.spec.plain import table_beside
from trainledger.spec.units import NANOSECONDS_PER_SECOND, format_count, format_percent, format_seconds, round_up

_, _, KERNELS, MEMORY_BOUND, LAUNCH, _, BUBBLE, STRAGGLERS = CAUSES  # the forecast's
COMPUTE = "compute"
COUNTED = "FLOPs counted otherwise"
MOVING_MEMORY = ("norm", "loss", "embedding", "reduction", "elementwise", "optimizer")
_WORST = 4  # shapes that have a bar of their own


# A cause's gain is what is saved where its part vanishes, which nothing reaches: another part may come in its place. A
# matmul below the peak is compared with `REACHABLE` of it, as data sheets' peaks are out of reach.
@dataclass(frozen=True)
class MeasuredBar:
    """What one cause adds to a step, which part of it, and how long that is; it may take away."""

    cause: str
    detail: str
    nanoseconds: int

    @property
    def title(self) -> str:
        """A short name: what of the cause it is, where there is more to say than the cause."""
        before = {KERNELS: "below peak: ", times.EXPOSED: "exposed ", BUBBLE: "bubble: "}.get(self.cause, "")
        return f"{before if self.detail != times.COPY else ''}{self.detail}" if self.detail else self.cause


def measured_waterfall(
    step: times.StepTime,
    parts: Split,
    rates: Sequence[MatmulRate],
    peaks: Mapping[str, float],
    *,
    model_at_peak_ns: float | None = None,
    pipeline: bool | None = None,
    waiting_for_others_ns: Mapping[str, int] | None = None,
) -> tuple[MeasuredBar, ...]:
    """The bars of a step; they sum to its nanoseconds.

    ``peaks`` are FLOP/s by format. ``model_at_peak_ns`` are the model FLOPs of an account at the peak; None: those that
    were counted by shape. ``pipeline`` says whether there are stages that wait for each other; None: where the step has
    sends and receives. ``waiting_for_others_ns`` is what of exposed communication waits for the slowest rank, by kind
    of collective.
    """
    bars = [
        *_computing(step, parts, rates, peaks, model_at_peak_ns),
        *(MeasuredBar(MEMORY_BOUND, each, step.parts_ns[each]) for each in MOVING_MEMORY),
        MeasuredBar(RECOMPUTATION, "", step.parts_ns[RECOMPUTATION]),
        *(
            MeasuredBar(LAUNCH, each, step.parts_ns[each])
            for each in (times.LAUNCH_GAPS, times.HOST, times.AFTER_SYNC, times.OUTSIDE, CALLS)
        ),
        *_waiting(step, parts, pipeline, waiting_for_others_ns or {}),
        MeasuredBar("data", "", step.parts_ns[times.WAIT_FOR_DATA]),
        *(MeasuredBar(each, "", step.parts_ns[each]) for each in (times.EVALUATION, times.CHECKPOINTS)),
        MeasuredBar(UNEXPLAINED, "kernels of no known kind", step.parts_ns["other"]),
    ]
    assert sum(bar.nanoseconds for bar in bars) == step.nanoseconds
    return tuple(bar for bar in bars if bar.nanoseconds)


def _computing(
    step: times.StepTime, parts: Split, rates: Sequence[MatmulRate], peaks: Mapping[str, float], model_ns: float | None
) -> Iterator[MeasuredBar]:
    """Model FLOPs at the peak, then what matmuls, attention and convolutions take beyond it."""
    at_peak: dict[tuple[str, str, str, bool], int] = {}
    for rate in rates:
        if not rate.recomputed and (ideal := rate.model_at_peak_ns(peaks)) is not None:
            at_peak[rate.key] = at_peak.get(rate.key, 0) + round(ideal)
    counted = sum(at_peak.values())
    if not counted and model_ns is None:
        yield from (MeasuredBar(COMPUTE, compute_part, step.parts_ns[compute_part]) for compute_part in COMPUTE_PARTS)
        return
    useful = counted if model_ns is None else round(model_ns)
    rounded = counted - useful if abs(counted - useful) <= len(at_peak) else 0  # each matmul's share was rounded
    yield MeasuredBar(IDEAL, "", useful)
    yield MeasuredBar(KERNELS, COUNTED, counted - useful - rounded)
    lost = {key: parts.matmuls.get(key, 0) - ideal for key, ideal in at_peak.items()}
    worst = sorted((key for key in lost if lost[key] > 0), key=lambda key: -lost[key])[:_WORST]
    for kind, shape, dtype, again in worst:
        yield MeasuredBar(KERNELS, f"{shape} {dtype}", lost[kind, shape, dtype, again])
    for part in COMPUTE_PARTS:
        own = [key for key in at_peak if key[0] == part]
        named = sum(parts.matmuls.get(key, 0) for key in own if key in worst)
        ideal = sum(at_peak[key] for key in own if key not in worst)
        other = "other " if any(key in worst for key in own) else ""
        yield MeasuredBar(KERNELS, f"{other}{part}", step.parts_ns[part] - named - ideal + rounded)
        rounded = 0


def _waiting(
    step: times.StepTime, parts: Split, pipeline: bool | None, for_others: Mapping[str, int]
) -> Iterator[MeasuredBar]:
    """Exposed communication by kind of collective, copies, and what waits for other ranks."""
    sends = parts.collectives.get(SENDS, 0)
    bubbles = bool(sends) if pipeline is None else pipeline
    rest = step.parts_ns[times.EXPOSED] - sum(parts.collectives.values())
    by_kind = {**parts.collectives, OTHERS: parts.collectives.get(OTHERS, 0) + rest}
    for kind, nanoseconds in sorted(by_kind.items(), key=lambda each: -each[1]):
        cause = BUBBLE if bubbles and kind == SENDS else times.EXPOSED
        yield MeasuredBar(cause, kind, nanoseconds - for_others.get(kind, 0))
    yield MeasuredBar(times.EXPOSED, times.COPY, step.parts_ns[times.COPY])
    yield MeasuredBar(BUBBLE if bubbles else UNEXPLAINED, times.QUEUED, step.parts_ns[times.QUEUED])
    yield MeasuredBar(STRAGGLERS, "", sum(for_others.values()))


REACHABLE = 0.75  # of a data sheet's peak: what large matmuls of 16 bits reach on A100 and H100 (assumed)
MEMORY_BOUND_KERNELS, BELOW_PEAK = "memory-bound kernels", "matmuls below the peak"
_WORTH_A_SENTENCE = 0.02  # of the step
_OF_COMPILER = re.compile(r"^(triton_|Torch-Compiled Region|## Call CompiledFxGraph|CompiledFunction)")
_PAGEABLE = re.compile(r"Memcpy HtoD \(Pageable|Memcpy DtoH .*Pageable")
_WORST_SHAPES = 2
_ALIGNED, _FULL = 8, 64  # elements: rows that are no multiple of these fall back to slower kernels, or fill tiles badly


@dataclass(frozen=True)
class Rule:
    """A cause: the parts of a step that it has, what changes it as a sentence and as code, the fields of a run too."""

    parts: Sequence[str]
    sentence: str
    code: str = ""
    fields: Sequence[str] = ()


_WRITTEN: dict[str, dict[str, Any]] = table_beside(__file__)
RULES = {cause: Rule(**row) for cause, row in _WRITTEN.items()}
_CODE_OF_COMPILED = {times.HOST: 'torch.compile(model, mode="reduce-overhead")', MEMORY_BOUND_KERNELS: ""}


@dataclass(frozen=True)
class Cause:
    """A reason, in a sentence that says what changes it, and the nanoseconds of the step that are at stake.

    ``code`` is that change in a program of plain PyTorch, where there is one that most programs can make.
    """

    name: str
    nanoseconds: int
    sentence: str
    code: str = ""


def causes(
    recording: Recording, step: times.StepTime, rates: Sequence[MatmulRate], peaks: Mapping[str, float]
) -> tuple[Cause, ...]:
    """The causes that are worth a sentence, the one with most at stake first."""
    compiled = any(map(_OF_COMPILER.match, recording.names))
    inside = recording.work.where(recording.work.begin_in(step.step.device_ns))
    lengths = (inside.ends_ns - inside.begins_ns)[inside.kinds == KERNEL]
    facts = {
        "kernels": "Kernels" if recording.on_device else "Operators",
        "launches": format_count(len(lengths)),
        "usual": format_seconds(float(np.median(lengths)) / NANOSECONDS_PER_SECOND) if len(lengths) else "",
        "fewer": "" if compiled else "torch.compile makes fewer, ",
        "less": "fused kernels for what torch.compile left apart" if compiled else "torch.compile or fused kernels",
        "hidden": format_percent(step.overlapped_ns / max(step.communication_ns, 1)),
        "waits": _waits(recording, step),
        "copies": _copies(recording, inside),
    }
    skipped = () if len(lengths) else (times.HOST,)
    all_causes = [
        Cause(
            name,
            sum(step.parts_ns[part] for part in rule.parts),
            rule.sentence.format(**facts),
            _CODE_OF_COMPILED.get(name, rule.code) if compiled else rule.code,
        )
        for name, rule in RULES.items()
        if name not in skipped
    ]
    all_causes += _of_matmuls(rates, peaks)
    least = max(_WORTH_A_SENTENCE * step.nanoseconds, 1)
    worth = (cause for cause in all_causes if cause.nanoseconds >= least)
    return tuple(sorted(worth, key=lambda cause: -cause.nanoseconds))


def _waits(recording: Recording, step: times.StepTime) -> str:
    """How often the host waited for the device, and in which operator most."""
    waits = recording.named(recording.launches, times.SYNC)
    waits = waits.where(waits.begin_in(step.step.host_ns))
    of = recording.operators_with(waits.operators)
    by = Counter(recording.names[recording.operators.names[at]] for at in of.tolist() if at != NONE)
    return f"{format_count(len(waits))} times" + (f", most of them in {by.most_common(1)[0][0]}" if by else "")


def _copies(recording: Recording, inside: Spans) -> str:
    names = Counter(recording.names[number] for number in inside.names[inside.kinds == A_COPY].tolist())
    if not names:
        return "Memory was set outside computation."
    pageable = sum(count for name, count in names.items() if _PAGEABLE.search(name))
    how = (
        f"{pageable} of them from pageable memory (pin_memory=True, non_blocking=True)" if pageable else "none pageable"
    )
    return f"{names.total()} copies lay outside computation, most of them {names.most_common(1)[0][0]}; {how}."


def _of_matmuls(rates: Sequence[MatmulRate], peaks: Mapping[str, float]) -> Iterator[Cause]:
    known = [(rate, at_peak) for rate in rates if (at_peak := rate.at_peak_ns(peaks)) is not None]
    lost = [(rate.nanoseconds - at_peak / REACHABLE, at_peak, rate) for rate, at_peak in known]
    worst = sorted((each for each in lost if each[0] > 0), key=lambda each: -each[0])
    if not worst:
        return
    some = "; ".join(
        f"{rate.shape} in {rate.dtype} reaches {format_percent(at_peak / rate.nanoseconds)}"
        for _, at_peak, rate in worst[:_WORST_SHAPES]
    )
    sentence, code = f"Matmuls and attention are below {format_percent(REACHABLE)} of the peak: {some}.", ""
    sizes = {size for _, _, rate in worst[:_WORST_SHAPES] if rate.kind == "matmul" for size in rate.sizes[1:]}
    size = max((size for size in sizes if size % _ALIGNED and size > _FULL), default=None)
    if size is not None:
        full = round_up(size, _FULL)
        sentence += f" {size:,} is no multiple of {_ALIGNED}, as fast kernels need it: fill it up to {full:,}."
        code = f"size = {_FULL} * -(-{size} // {_FULL})  # {full}, of the vocabulary or the layer that has it"
    sentence += f" Larger sizes, multiples of {_FULL}, and formats of fewer bits, come closer."
    yield Cause(BELOW_PEAK, round(sum(nanoseconds for nanoseconds, *_ in worst)), sentence, code)
