"""The bars from a step at the peak of its device to the step as it was: each says what it adds, and they sum to it.

Causes are those of a forecast's waterfall (`predict.step.CAUSES`, `predict.forecast.RUN_CAUSES`) wherever both mean the
same; a forecast's memory-bound operations have the optimizer in them, its launch overhead all that the host was late.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainledger.forecast.predict.forecast import UNEXPLAINED
from trainledger.forecast.predict.step import IDEAL
from trainledger.observe.profiler.collectives import OTHERS, SENDS
from trainledger.observe.profiler.flops import MatmulRate
from trainledger.observe.profiler.kinds import CALLS, RECOMPUTATION
from trainledger.observe.profiler.split import COMPUTE_PARTS, Split
from trainledger.observe.profiler.step_time import (
    AFTER_SYNC,
    CHECKPOINTS,
    COPY,
    EVALUATION,
    EXPOSED,
    HOST,
    LAUNCH_GAPS,
    OUTSIDE,
    QUEUED,
    WAIT_FOR_DATA,
    StepTime,
)

KERNELS, COMPUTE = "kernel efficiency", "compute"
MEMORY_BOUND, LAUNCH, BUBBLE, STRAGGLERS = "memory-bound operations", "launch overhead", "pipeline bubble", "stragglers"
COUNTED = "FLOPs counted otherwise"
MOVING_MEMORY = ("norm", "loss", "embedding", "reduction", "elementwise", "optimizer")
_WORST = 4  # shapes that have a bar of their own


@dataclass(frozen=True)
class MeasuredBar:
    """What one cause adds to a step, which part of it, and how long that is; it may take away."""

    cause: str
    detail: str
    nanoseconds: int

    @property
    def title(self) -> str:
        """A short name: what of the cause it is, where there is more to say than the cause."""
        before = {KERNELS: "below peak: ", EXPOSED: "exposed ", BUBBLE: "bubble: "}.get(self.cause, "")
        return f"{before if self.detail != COPY else ''}{self.detail}" if self.detail else self.cause


def measured_waterfall(
    step: StepTime,
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
        *(MeasuredBar(LAUNCH, each, step.parts_ns[each]) for each in (LAUNCH_GAPS, HOST, AFTER_SYNC, OUTSIDE, CALLS)),
        *_waiting(step, parts, pipeline, waiting_for_others_ns or {}),
        MeasuredBar("data", "", step.parts_ns[WAIT_FOR_DATA]),
        *(MeasuredBar(each, "", step.parts_ns[each]) for each in (EVALUATION, CHECKPOINTS)),
        MeasuredBar(UNEXPLAINED, "kernels of no known kind", step.parts_ns["other"]),
    ]
    assert sum(each.nanoseconds for each in bars) == step.nanoseconds
    return tuple(each for each in bars if each.nanoseconds)


def _computing(
    step: StepTime, parts: Split, rates: Sequence[MatmulRate], peaks: Mapping[str, float], model_ns: float | None
) -> Iterator[MeasuredBar]:
    """Model FLOPs at the peak, then what matmuls, attention and convolutions take beyond it."""
    at_peak: dict[tuple[str, str, str, bool], int] = {}
    for each in rates:
        if not each.recomputed and (ideal := each.model_at_peak_ns(peaks)) is not None:
            at_peak[each.key] = at_peak.get(each.key, 0) + round(ideal)
    counted = sum(at_peak.values())
    if not counted and model_ns is None:
        yield from (MeasuredBar(COMPUTE, each, step.parts_ns[each]) for each in COMPUTE_PARTS)
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
    step: StepTime, parts: Split, pipeline: bool | None, for_others: Mapping[str, int]
) -> Iterator[MeasuredBar]:
    """Exposed communication by kind of collective, copies, and what waits for other ranks."""
    sends = parts.collectives.get(SENDS, 0)
    bubbles = bool(sends) if pipeline is None else pipeline
    rest = step.parts_ns[EXPOSED] - sum(parts.collectives.values())
    by_kind = {**parts.collectives, OTHERS: parts.collectives.get(OTHERS, 0) + rest}
    for kind, nanoseconds in sorted(by_kind.items(), key=lambda each: -each[1]):
        cause = BUBBLE if bubbles and kind == SENDS else EXPOSED
        yield MeasuredBar(cause, kind, nanoseconds - for_others.get(kind, 0))
    yield MeasuredBar(EXPOSED, COPY, step.parts_ns[COPY])
    yield MeasuredBar(BUBBLE if bubbles else UNEXPLAINED, QUEUED, step.parts_ns[QUEUED])
    yield MeasuredBar(STRAGGLERS, "", sum(for_others.values()))
