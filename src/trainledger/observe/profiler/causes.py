"""Largest parts of a step's time: the waterfall from the ideal step to the measured one; causes and remedies.

The bars sum to the step. Their names are those of a forecast's waterfall (`predict.step.CAUSES`,
`predict.forecast.RUN_CAUSES`) wherever both mean the same; a forecast's memory-bound operations include the optimizer,
its launch overhead all of the host's lateness. A cause's gain is what would be saved if its part vanished.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainledger.forecast.predict.forecast import UNEXPLAINED
from trainledger.forecast.predict.step import IDEAL
from trainledger.observe.profiler.collectives import OTHERS, SENDS
from trainledger.observe.profiler.flops import MatmulRate
from trainledger.observe.profiler.kinds import CALLS, RECOMPUTATION
from trainledger.observe.profiler.recording import COPY as A_COPY
from trainledger.observe.profiler.recording import KERNEL, NONE, Recording
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
    SYNC,
    WAIT_FOR_DATA,
    StepTime,
)
from trainledger.observe.profiler.step_work import COMPUTE_PARTS, Split
from trainledger.spec.units import NANOSECONDS_PER_SECOND, format_count, format_percent, format_seconds, round_up

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


REACHABLE = 0.75  # of a data sheet's peak: what large matmuls of 16 bits reach on A100 and H100 (assumed)
_WORTH_A_SENTENCE = 0.02  # of the step
_OF_COMPILER = re.compile(r"^(triton_|Torch-Compiled Region|## Call CompiledFxGraph|CompiledFunction)")
_MOVING_MEMORY = ("elementwise", "reduction", "norm", "embedding")
_PAGEABLE = re.compile(r"Memcpy HtoD \(Pageable|Memcpy DtoH .*Pageable")
_WORST_SHAPES = 2
_ALIGNED, _FULL = 8, 64  # elements: rows that are no multiple of these fall back to slower kernels, or fill tiles badly
_CODE = {
    HOST: 'model.compile()  # or torch.compile(model, mode="reduce-overhead")',
    OUTSIDE: "model.compile()",
    AFTER_SYNC: "losses.append(loss.detach())  # and .item() of them once in many steps",
    WAIT_FOR_DATA: "DataLoader(data, num_workers=8, prefetch_factor=4, persistent_workers=True, pin_memory=True)",
    COPY: "batch = batch.to(device, non_blocking=True)  # from a DataLoader(..., pin_memory=True)",
    RECOMPUTATION: "context = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])\n"
                   "checkpoint(block, x, use_reentrant=False, context_fn=context)",
    "optimizer": "torch.optim.AdamW(model.parameters(), fused=True)",
}  # fmt: skip


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
    recording: Recording, step: StepTime, rates: Sequence[MatmulRate], peaks: Mapping[str, float]
) -> tuple[Cause, ...]:
    """The causes that are worth a sentence, the one with most at stake first."""
    least = _WORTH_A_SENTENCE * step.nanoseconds
    found = [
        replace(each, code=each.code or _CODE.get(each.name, ""))
        for each in _causes(recording, step, rates, peaks)
        if each.nanoseconds >= least
    ]
    return tuple(sorted(found, key=lambda each: -each.nanoseconds))


def _causes(
    recording: Recording, step: StepTime, rates: Sequence[MatmulRate], peaks: Mapping[str, float]
) -> Iterator[Cause]:
    parts, work = step.parts_ns, recording.work
    begin, end = step.step.device_ns
    inside = work.where((work.begins_ns >= begin) & (work.begins_ns < end))
    kernels = inside.where(inside.kinds == KERNEL)
    compiled = any(map(_OF_COMPILER.match, recording.names))
    late = parts[HOST] + parts[LAUNCH_GAPS]
    if late and len(kernels):
        usual = format_seconds(float(np.median(kernels.ends_ns - kernels.begins_ns)) / NANOSECONDS_PER_SECOND)
        yield Cause(
            HOST, late,
            f"The device had nothing to do while the host came to the next of {format_count(len(kernels))} launches "
            f"(half of the kernels take less than {usual}): {'' if compiled else 'torch.compile makes fewer, '}graphs "
            "(mode=reduce-overhead) make them at once, a larger micro-batch gives each more to do.",
            'torch.compile(model, mode="reduce-overhead")' if compiled else _CODE[HOST],
        )  # fmt: skip
    if parts[AFTER_SYNC]:
        yield Cause(AFTER_SYNC, parts[AFTER_SYNC], _of_synchronizations(recording, step))
    if parts[WAIT_FOR_DATA]:
        yield Cause(
            WAIT_FOR_DATA, parts[WAIT_FOR_DATA],
            "The step waited for its batch: more workers (num_workers, prefetch_factor), tokens made before the run.",
        )  # fmt: skip
    if parts[EXPOSED]:
        yield Cause(EXPOSED, parts[EXPOSED], _of_communication(step))
    if parts[OUTSIDE]:
        yield Cause(
            OUTSIDE, parts[OUTSIDE],
            "The program was in Python, or in a library that the profiler does not see, and no operator ran.",
        )  # fmt: skip
    if parts[QUEUED]:
        yield Cause(
            QUEUED, parts[QUEUED],
            "Work was launched and did not begin, with nothing else on the device: it waited for an event of another "
            "stream, a callback, or another program on the device.",
        )  # fmt: skip
    if parts[COPY]:
        names = Counter(recording.names[each] for each in inside.names[inside.kinds == A_COPY].tolist())
        pageable = sum(count for name, count in names.items() if _PAGEABLE.search(name))
        how = (
            f"{pageable} of them from pageable memory (pin_memory=True, non_blocking=True)"
            if pageable
            else "none pageable"
        )
        yield Cause(
            COPY, parts[COPY],
            f"{sum(names.values())} copies lay outside computation, most of them {names.most_common(1)[0][0]}; {how}."
            if names else "Memory was set outside computation.",
        )  # fmt: skip
    moving = sum(parts[each] for each in _MOVING_MEMORY)
    if moving and recording.on_device:
        less = "fused kernels for what torch.compile left apart" if compiled else "torch.compile or fused kernels"
        yield Cause(
            "memory-bound kernels", moving,
            "Kernels that only move memory (elementwise, reductions, norms, embeddings) have that time for themselves: "
            f"{less} write and read less of it.",
            "" if compiled else "model.compile()",
        )  # fmt: skip
    if parts[RECOMPUTATION]:
        yield Cause(
            RECOMPUTATION, parts[RECOMPUTATION],
            "Activation checkpointing runs operators of the forward again: keep what attention and matmuls give "
            "(selective checkpointing), or checkpoint fewer layers, as far as memory goes.",
        )  # fmt: skip
    if parts["optimizer"]:
        yield Cause(
            "optimizer", parts["optimizer"],
            "The update of the parameters: fused=True makes it one kernel, sharding divides it, accumulation makes it "
            "rare.",
        )  # fmt: skip
    yield from _of_matmuls(rates, peaks)


def _of_synchronizations(recording: Recording, step: StepTime) -> str:
    begin, end = step.step.host_ns
    waits = recording.named(recording.launches, SYNC)
    waits = waits.where((waits.begins_ns >= begin) & (waits.begins_ns < end))
    of = recording.operators_with(waits.operators)
    by = Counter(recording.names[recording.operators.names[each]] for each in of.tolist() if each != NONE)
    who = f", most of them in {by.most_common(1)[0][0]}" if by else ""
    return (
        f"The host waited for the device {format_count(len(waits))} times{who}, and then had nothing launched ahead: "
        "read losses and norms less often or a step later (.item(), print, .cpu(), torch.nonzero wait)."
    )


def _of_communication(step: StepTime) -> str:
    hidden = format_percent(step.overlapped_ns / max(step.communication_ns, 1))
    return (
        f"{hidden} of communication lie beside computation, the rest is exposed. Where the other ranks' kernels of the "
        "same collective are shorter, this rank was early and waited for them (stragglers); else fewer or larger "
        "messages, more accumulation, or another layout have less of it."
    )


def _of_matmuls(rates: Sequence[MatmulRate], peaks: Mapping[str, float]) -> Iterator[Cause]:
    known = [(each, at_peak) for each in rates if (at_peak := each.at_peak_ns(peaks)) is not None]
    lost = [(each.nanoseconds - at_peak / REACHABLE, at_peak, each) for each, at_peak in known]
    worst = sorted((each for each in lost if each[0] > 0), key=lambda each: -each[0])
    if not worst:
        return
    some = "; ".join(
        f"{each.shape} in {each.dtype} reaches {format_percent(at_peak / each.nanoseconds)}"
        for _, at_peak, each in worst[:_WORST_SHAPES]
    )
    sentence = f"Matmuls and attention are below {format_percent(REACHABLE)} of the peak: {some}."
    odd = {size for _, _, each in worst[:_WORST_SHAPES] if each.kind == "matmul" for size in each.sizes[1:]}
    odd = {size for size in odd if size % _ALIGNED and size > _FULL}
    code = ""
    if odd:
        size = max(odd)
        full = round_up(size, _FULL)
        sentence += f" {size:,} is no multiple of {_ALIGNED}, as fast kernels need it: fill it up to {full:,}."
        code = f"size = {_FULL} * -(-{size} // {_FULL})  # {full}, of the vocabulary or the layer that has it"
    sentence += f" Larger sizes, multiples of {_FULL}, and formats of fewer bits, come closer."
    yield Cause("matmuls below the peak", round(sum(nanoseconds for nanoseconds, *_ in worst)), sentence, code)
