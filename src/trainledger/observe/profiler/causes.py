"""Why a step is as slow as it is: what its largest parts come from, what changes them, and what that is worth at most.

A cause says what is gained where its part vanishes, which nothing reaches: another part may come in its place. A
matmul below the peak is compared with `REACHABLE` of it, as data sheets' peaks are out of reach.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainledger.observe.profiler.flops import MatmulRate
from trainledger.observe.profiler.kinds import RECOMPUTATION
from trainledger.observe.profiler.recording import COPY, KERNEL, NONE, Recording
from trainledger.observe.profiler.step_time import (
    AFTER_SYNC,
    EXPOSED,
    HOST,
    LAUNCH_GAPS,
    OUTSIDE,
    QUEUED,
    SYNC,
    WAIT_FOR_DATA,
    StepTime,
)
from trainledger.observe.profiler.step_time import COPY as COPIES
from trainledger.spec.units import NANOSECONDS_PER_SECOND, format_count, format_percent, format_seconds, round_up

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
    COPIES: "batch = batch.to(device, non_blocking=True)  # from a DataLoader(..., pin_memory=True)",
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
    if parts[COPIES]:
        names = Counter(recording.names[each] for each in inside.names[inside.kinds == COPY].tolist())
        pageable = sum(count for name, count in names.items() if _PAGEABLE.search(name))
        how = (
            f"{pageable} of them from pageable memory (pin_memory=True, non_blocking=True)"
            if pageable
            else "none pageable"
        )
        yield Cause(
            COPIES, parts[COPIES],
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
