"""An einsum drawn: its point under the roofs of devices, and how tiles and waves make steps over a size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainledger.forecast.predict.einsum_time import EinsumTime
from trainledger.observe.measure.rates import MatmulTimes
from trainledger.report.document import Figure, Table
from trainledger.report.style import COLOURS, arranged, line, points
from trainledger.spec.calibration import STRAIGHT
from trainledger.spec.units import TERA, format_flops_per_second

_LEAST, _MOST = 1.0, 4096.0  # FLOPs per byte that the roofline shows at least
_ROOM = 4  # a factor around the einsum's own
Sweep = Sequence[tuple[int, float]]


def roofline_figure(intensity: float, times: Sequence[EinsumTime], title: str) -> Figure:
    """FLOP/s over FLOPs per byte: the roof of each device, and under it the einsum: its bound and its prediction.

    Below the ridge point of a device the roof is its memory's rate, above it the peak (Williams et al. 2009).
    """
    low, high = min(_LEAST, intensity / _ROOM), max(_MOST, intensity * _ROOM)
    data = []
    for at, each in enumerate(times):
        peak, memory, colour = each.peak_flops_per_second, each.memory_bytes_per_second, COLOURS[at % len(COLOURS)]
        if each.ridge is None or peak is None or memory is None:
            continue
        data.append(roof(each.device, each.title, peak, memory, (low, high), colour))
        bound = min(peak, memory * intensity)
        for rate, symbol, words in ((bound, "circle-open", "at most"), (each.flops_per_second, "circle", "predicted")):
            if rate:
                said = f"{each.title}: {words} {format_flops_per_second(rate)}<extra></extra>"
                marker = {"color": colour, "size": 10, "symbol": symbol}
                data.append(
                    points(words, [intensity], [rate / TERA], marker=marker, showlegend=False, hovertemplate=said)
                )
    layout = roofline_layout(title)
    layout["shapes"].append(line("v", intensity, "#999999", "x", "y domain", dash="dot"))
    return {"data": data, "layout": layout}


def measured_roofline(found: MatmulTimes, title: str) -> Figure:
    """FLOP/s over FLOPs per byte of measured matmuls, under the roof of each dtype: its best matmul, a large copy."""
    low = min(_LEAST, *(each.intensity / _ROOM for each in found.matmuls))
    high = max(_MOST, *(each.intensity * _ROOM for each in found.matmuls))
    data = []
    for at, dtype in enumerate(dict.fromkeys(each.dtype for each in found.matmuls)):
        colour, own = COLOURS[at % len(COLOURS)], [each for each in found.matmuls if each.dtype == dtype]
        data.append(roof(dtype, found.title, found.best(dtype), found.memory_bytes_per_second, (low, high), colour))
        for name, straight, symbol in (("factors by rows", True, "circle"), ("others", False, "circle-open")):
            some = [each for each in own if (each.factors == STRAIGHT) == straight]
            if some:
                said = [
                    f"{' x '.join(map(str, each.shape))}, {each.factors}: "
                    f"{format_flops_per_second(each.flops_per_second)}"
                    for each in some
                ]
                data.append(
                    points(
                        f"{dtype}, {name}", [each.intensity for each in some],
                        [each.flops_per_second / TERA for each in some], marker={"color": colour, "symbol": symbol},
                        text=said, hovertemplate="%{text}<extra></extra>",
                    )
                )  # fmt: skip
    return {"data": data, "layout": roofline_layout(title)}


def roof(
    name: str, title: str, peak: float, memory_bytes_per_second: float, ends: tuple[float, float], colour: str
) -> dict[str, Any]:
    """The roof of a device between two intensities: the rate of its memory up to the ridge point, then its peak."""
    ridge = peak / memory_bytes_per_second
    corners = sorted({ends[0], min(max(ridge, ends[0]), ends[1]), ends[1]})
    roof = [min(peak, memory_bytes_per_second * corner) / TERA for corner in corners]
    said = f"{title}: {format_flops_per_second(peak)} from {ridge:.4g} FLOPs per byte on<extra></extra>"
    return points(name, corners, roof, "lines", line={"color": colour}, hovertemplate=said)


def roofline_layout(title: str) -> dict[str, Any]:
    """The axes of a roofline: both logarithmic."""
    layout = arranged(title, "FLOPs per byte", "TFLOP/s")
    for axis in ("xaxis", "yaxis"):
        layout[axis] |= {"type": "log"}
    return layout


def sweep_figure(sweeps: Mapping[str, Sweep], dim: str, size: int, title: str) -> Figure:
    """Predicted TFLOP/s over the size of one dim, for each device: each new wave of tiles is a step down."""
    data = [
        points(
            name, [at for at, _ in found], [rate / TERA for _, rate in found], "lines",
            line={"color": COLOURS[number % len(COLOURS)]},
            hovertemplate=f"{name}: {dim} = %{{x:,}}, %{{y:.4g}} TFLOP/s<extra></extra>",
        )
        for number, (name, found) in enumerate(sweeps.items())
    ]  # fmt: skip
    layout = arranged(title, dim, "TFLOP/s")
    layout["yaxis"] |= {"rangemode": "tozero"}
    layout["shapes"].append(line("v", size, "#999999", "x", "y domain", dash="dot"))
    return {"data": data, "layout": layout}


def sweep_table(sweeps: Mapping[str, Sweep], dim: str) -> Table:
    """The same in numbers."""
    sizes = [at for at, _ in next(iter(sweeps.values()))]
    rates = [[rate for _, rate in found] for found in sweeps.values()]
    rows = tuple((size, *(rate[at] for rate in rates)) for at, size in enumerate(sizes))
    return Table("sweep", (dim, *sweeps), rows, ("integer", *("flops_per_second" for _ in sweeps)))
