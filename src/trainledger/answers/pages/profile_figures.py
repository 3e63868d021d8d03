"""The figures of a profile: its waterfall, what runs when, its matmuls under their roofs, and its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
from trainledger.report.document import Figure
from trainledger.report.style import COLOURS, arranged, line, points
from trainledger.spec.units import GIGA, TERA, format_flops_per_second, format_nbytes

GROUPS = (
    ("matmuls, attention, convolutions", COLOURS[0], COMPUTE_PARTS), (RECOMPUTATION, COLOURS[2], (RECOMPUTATION,)),
    (MEMORY_BOUND, COLOURS[4], MOVING_MEMORY), ("communication and copies", COLOURS[1], (EXPOSED, COPY)),
    ("data, evaluation, checkpoints", COLOURS[3], (WAIT_FOR_DATA, EVALUATION, CHECKPOINTS)),
    (LAUNCH, "#aaaaaa", (LAUNCH_GAPS, HOST, AFTER_SYNC, OUTSIDE, CALLS)),
)  # fmt: skip
UNEXPLAINED_COLOUR = "#dddddd"
_ROOM = 4  # a factor around the matmuls of a roofline
_DASHES = ("solid", "dash", "dot", "dashdot")


def figures(found: Profile, bars: Sequence[MeasuredBar]) -> dict[str, Figure]:
    """What there is to draw of a profile, by title; ``bars`` are those of its waterfall."""
    step = found.step.step.name
    title = f"Where step {step} goes"
    drawn: dict[str, Figure | None] = {
        title: waterfall([Bar(each.title, each.nanoseconds) for each in bars], title),
        f"What runs when in step {step}": _timeline(found),
        f"The matmuls of step {step}": _roofline(found),
        f"Memory over step {step}": _memory(found),
    }
    return {name: each for name, each in drawn.items() if each is not None}


def _timeline(found: Profile) -> Figure | None:
    """Of each piece of the step, how much of it each cause has."""
    if not found.pieces or not found.step.nanoseconds:
        return None
    count = len(next(iter(found.pieces.values())))
    width_ms = found.step.nanoseconds / count / 1e6
    at = [(each + 0.5) * width_ms for each in range(count)]
    left = [width_ms] * count
    data = []
    for name, colour, parts in GROUPS:
        own = [sum(found.pieces[part][each] for part in parts) / 1e6 for each in range(count)]
        left = [before - each for before, each in zip(left, own, strict=True)]
        if any(own):
            data.append(_stacked(name, colour, at, own, width_ms))
    if any(each > 1e-6 * width_ms for each in left):
        data.append(_stacked(UNEXPLAINED, UNEXPLAINED_COLOUR, at, [max(each, 0.0) for each in left], width_ms))
    layout = arranged("", "milliseconds of the step", "share", barmode="stack", bargap=0.0)
    layout["yaxis"] |= {"range": [0, 1]}
    return {"data": data, "layout": layout}


def _stacked(name: str, colour: str, at: list[float], own: list[float], width_ms: float) -> dict[str, object]:
    return {
        "type": "bar", "name": name, "x": at, "y": [each / width_ms for each in own], "width": [width_ms] * len(at),
        "marker": {"color": colour, "line": {"width": 0}},
        "hovertemplate": f"{name}: %{{y:.0%}} at %{{x:.4g}} ms<extra></extra>",
    }  # fmt: skip


def _roofline(found: Profile) -> Figure | None:
    """FLOP/s over FLOPs per byte of each matmul whose sizes are known, under the roofs of its device."""
    known = [each for each in found.matmuls if each.intensity and each.flops_per_second]
    if not known:
        return None
    values = [each.intensity or 0.0 for each in known]
    low, high = min(values) / _ROOM, max(values) * _ROOM
    data = _roofs(found, [each.dtype for each in known], low, high)
    for at, dtype in enumerate(dict.fromkeys(each.dtype for each in known)):
        own = [each for each in known if each.dtype == dtype]
        texts = [
            f"{each.kind} {each.shape}: {format_flops_per_second(each.flops_per_second or 0)}, {each.count} runs"
            for each in own
        ]
        data.append(
            points(
                f"matmuls in {dtype or 'an unknown format'}", [each.intensity for each in own],
                [(each.flops_per_second or 0) / TERA for each in own], text=texts,
                marker={"color": COLOURS[at % len(COLOURS)], "size": 8}, hovertemplate="%{text}<extra></extra>",
            )
        )  # fmt: skip
    layout = arranged("", "FLOPs per byte, each operand read and written once", "TFLOP/s")
    for axis in ("xaxis", "yaxis"):
        layout[axis] |= {"type": "log"}
    return {"data": data, "layout": layout}


def _roofs(found: Profile, dtypes: Sequence[str], low: float, high: float) -> list[dict[str, object]]:
    rate = None if found.device is None else found.device.memory_bytes_per_second
    if rate is None:
        return []
    roofs = []
    for at, dtype in enumerate(each for each in dict.fromkeys(dtypes) if each in found.peaks):
        peak = found.peaks[dtype]
        corners = sorted({low, min(max(peak / rate, low), high), high})
        said = f"{dtype}: {format_flops_per_second(peak)}, memory {format_nbytes(rate)}/s<extra></extra>"
        style = {"color": COLOURS[at % len(COLOURS)], "dash": _DASHES[at % len(_DASHES)]}
        roof = [min(peak, rate * each) / TERA for each in corners]
        roofs.append(points(f"peak in {dtype}", corners, roof, "lines", line=style, hovertemplate=said))
    return roofs


def _memory(found: Profile) -> Figure | None:
    """What PyTorch's allocator has handed out, and what it has reserved, over the step."""
    memory = found.memory
    if memory is None:
        return None
    curves: Mapping[str, Sequence[int]] = {"allocated": memory.allocated_nbytes, "reserved": memory.reserved_nbytes}
    at = [each / 1e6 for each in memory.times_ns]
    data = [
        points(
            name, at, [each / GIGA for each in nbytes], "lines", line={"color": COLOURS[number]},
            hovertemplate=f"{name}: %{{y:.4g}} GB at %{{x:.4g}} ms<extra></extra>",
        )
        for number, (name, nbytes) in enumerate(curves.items())
        if any(nbytes)
    ]  # fmt: skip
    layout = arranged("", "milliseconds of the step, on the host", "GB")
    layout["yaxis"] |= {"rangemode": "tozero"}
    layout["shapes"].append(line("h", memory.peak_nbytes / GIGA, "#999999", "x domain", "y", dash="dot"))
    return {"data": data, "layout": layout}
