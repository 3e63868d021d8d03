"""The figures of a profile: its waterfall, what runs when, its matmuls under their roofs, and its memory."""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.answers.pages.einsum_figures import roof
from trainledger.answers.pages.plan_figures import waterfall
from trainledger.forecast.predict.forecast import UNEXPLAINED, Bar
from trainledger.observe.profiler.causes import LAUNCH, MEMORY_BOUND, MOVING_MEMORY, MeasuredBar
from trainledger.observe.profiler.kinds import CALLS, RECOMPUTATION
from trainledger.observe.profiler.profile import Profile
from trainledger.observe.profiler.step_time import (
    AFTER_SYNC,
    CHECKPOINTS,
    COPY,
    EVALUATION,
    EXPOSED,
    HOST,
    LAUNCH_GAPS,
    OUTSIDE,
    WAIT_FOR_DATA,
)
from trainledger.observe.profiler.step_work import COMPUTE_PARTS
from trainledger.report.chart import AXIS, COLOURS, FAINT, PALE, Area, Axis, Band, Chart, Line, Mark
from trainledger.spec.units import GIGA, TERA, format_flops_per_second

GROUPS = (
    ("matmuls, attention, convolutions", COLOURS[0], COMPUTE_PARTS), (RECOMPUTATION, COLOURS[2], (RECOMPUTATION,)),
    (MEMORY_BOUND, COLOURS[4], MOVING_MEMORY), ("communication and copies", COLOURS[1], (EXPOSED, COPY)),
    ("data, evaluation, checkpoints", COLOURS[3], (WAIT_FOR_DATA, EVALUATION, CHECKPOINTS)),
    (LAUNCH, FAINT, (LAUNCH_GAPS, HOST, AFTER_SYNC, OUTSIDE, CALLS)),
)  # fmt: skip
_ROOM = 4  # a factor around the matmuls of a roofline
_DASHES = ("solid", "dash", "dot", "dashdot")


def figures(found: Profile, bars: Sequence[MeasuredBar]) -> list[Chart]:
    """The charts of a profile; ``bars`` are those of its waterfall."""
    step = found.step.step.name
    charts = [
        waterfall([Bar(each.title, each.nanoseconds) for each in bars], f"Where step {step} goes"),
        _timeline(found, f"What runs when in step {step}"),
        _roofline(found, f"The matmuls of step {step}"),
        _memory(found, f"Memory over step {step}"),
    ]
    return [each for each in charts if each is not None]


def _timeline(found: Profile, title: str) -> Chart | None:
    """Of each piece of the step, how much of it each cause has."""
    if not found.pieces or not found.step.nanoseconds:
        return None
    count = len(next(iter(found.pieces.values())))
    width_ms = found.step.nanoseconds / count / 1e6
    shares = {
        name: [sum(found.pieces[part][at] for part in parts) / 1e6 / width_ms for at in range(count)]
        for name, _, parts in GROUPS
    }
    shares[UNEXPLAINED] = [max(1 - sum(each), 0.0) for each in zip(*shares.values(), strict=True)]
    colour_of = {name: colour for name, colour, _ in GROUPS} | {UNEXPLAINED: PALE}
    layers = {name: [*each, each[-1]] for name, each in shares.items() if max(each) > 1e-6}
    xs = [at * width_ms for at in range(count + 1)]
    said = [
        "\n".join(
            [f"at {x:.4g} ms", *(f"{name}: {each[at]:.0%}" for name, each in layers.items() if each[at] >= 0.005)]
        )
        for at, x in enumerate(xs)
    ]
    mark = Area(xs, layers, [colour_of[name] for name in layers], said, step=True)
    return Chart(title, (mark,), Axis("milliseconds of the step"), Axis("share", ends=(0, 1)))


def _roofline(found: Profile, title: str) -> Chart | None:
    """FLOP/s over FLOPs per byte of each matmul whose sizes are known, under the roofs of its device."""
    known = [each for each in found.matmuls if each.intensity and each.flops_per_second]
    if not known:
        return None
    values = [each.intensity or 0.0 for each in known]
    ends = min(values) / _ROOM, max(values) * _ROOM
    dtypes = list(dict.fromkeys(each.dtype for each in known))
    rate = None if found.device is None else found.device.memory_bytes_per_second
    marks = []
    for at, dtype in enumerate(each for each in dtypes if each in found.peaks and rate is not None):
        dash = _DASHES[at % len(_DASHES)]
        marks.append(
            roof(f"peak in {dtype}", dtype, found.peaks[dtype], rate or 0.0, ends, COLOURS[at % len(COLOURS)], dash)
        )
    for at, dtype in enumerate(dtypes):
        own = [each for each in known if each.dtype == dtype]
        said = [
            f"{each.kind} {each.shape}: {format_flops_per_second(each.flops_per_second or 0)}, {each.count} runs"
            for each in own
        ]
        name = f"matmuls in {dtype or 'an unknown format'}"
        rates = [(each.flops_per_second or 0) / TERA for each in own]
        colour = COLOURS[at % len(COLOURS)]
        marks.append(Line([each.intensity for each in own], rates, name, colour, width=0, symbol="circle", said=said))
    x = Axis("FLOPs per byte, each operand read and written once", log=True)
    return Chart(title, tuple(marks), x, Axis("TFLOP/s", log=True))


def _memory(found: Profile, title: str) -> Chart | None:
    """What PyTorch's allocator has handed out, and what it has reserved, over the step."""
    memory = found.memory
    if memory is None:
        return None
    at = [each / 1e6 for each in memory.times_ns]
    marks: list[Mark] = [
        Line(at, [each / GIGA for each in nbytes], name, colour)
        for name, nbytes, colour in (
            ("allocated", memory.allocated_nbytes, COLOURS[0]), ("reserved", memory.reserved_nbytes, COLOURS[1])
        )
        if any(nbytes)
    ]  # fmt: skip
    marks.append(Band("y", memory.peak_nbytes / GIGA, colour=AXIS, dash="dot"))
    return Chart(title, tuple(marks), Axis("milliseconds of the step, on the host"), Axis("GB", zero=True))
