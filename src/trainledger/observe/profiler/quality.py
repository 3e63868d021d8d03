"""What a recording can say and what it cannot, before any number is taken from it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainledger.observe.profiler.collectives import ON_HOST
from trainledger.observe.profiler.kinds import COLLECTIVE
from trainledger.observe.profiler.recording import NONE, Message, Recording, Shapes
from trainledger.observe.profiler.steps import Steps
from trainledger.spec.units import format_percent

_GRAPH = re.compile(r"GraphLaunch")
_FEW = 0.02  # of the work: not worth a sentence


def doubts(recording: Recording, steps: Steps) -> tuple[str, ...]:
    """A sentence for each thing that numbers of this recording lack or hide, the gravest first."""
    return tuple(_doubts(recording, steps))


def _doubts(recording: Recording, steps: Steps) -> Iterator[str]:
    if recording.broken_off:
        yield "The file breaks off: what comes after its last whole event is not here, nor perhaps the devices' names."
    if recording.malformed:
        yield f"{recording.malformed:,} events without a time, a name or a possible length are left out."
    if not recording.on_device:
        yield (
            "There is no work of a device: the program ran on the host, or its device was not recorded "
            "(activities of the profiler). Times are those of operators."
        )
    else:
        yield from _of_device(recording, steps)
    if not recording.on_device and (recording.ranks or 0) > 2 and len(recording.named(recording.annotations, ON_HOST)):
        yield "Collectives of a host do not say which ranks take part: they are taken to be all of them."
    with_arguments = [each for each in recording.operators.more.tolist() if each != NONE]
    if not any(isinstance(recording.arguments[each], Shapes) for each in set(with_arguments)):
        yield "Shapes were not recorded (record_shapes=True): no FLOPs, and no MFU."
    if "with_stack" in recording.recorded:
        yield "Python stacks were recorded (with_stack), which makes the host slower than it is without the profiler."
    if len(steps.steps) < 3:
        count = len(steps.steps)
        yield f"There {'is one step' if count == 1 else 'are two steps'}: nothing says how far steps differ."


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
    empty = [each.name for each in steps.steps if not _works_in(recording, each.device_ns)]
    if empty:
        yield f"Steps without device work: {', '.join(empty)}."
    sent = recording.named(work, COLLECTIVE)
    if len(sent) and not any(
        each != NONE and isinstance(recording.arguments[each], Message) for each in sent.more.tolist()
    ):
        yield "Collectives do not say what they send (PyTorch 2.2 and newer record it): their bytes are not known."
    if len(sent):
        yield "A collective's kernel runs from when this rank is there: its time has the wait for the others in it."


def _works_in(recording: Recording, between: tuple[int, int]) -> bool:
    begin, end = between
    return bool(((recording.work.begins_ns >= begin) & (recording.work.begins_ns < end)).any())
