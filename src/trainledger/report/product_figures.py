"""A product of tensors drawn: its point under the roofs of devices, and how tiles and waves make steps over a size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainledger.document import Figure, Table
from trainledger.predict.product import ProductTime
from trainledger.report.style import COLOURS, arranged, line, points
from trainledger.units import TERA, format_flops_per_second

_LEAST, _MOST = 1.0, 4096.0  # FLOPs per byte that the roofline shows at least
_ROOM = 4  # a factor around the product's own
Sweep = Sequence[tuple[int, float]]


def roofline_figure(intensity: float, times: Sequence[ProductTime], title: str) -> Figure:
    """FLOP/s over FLOPs per byte: the roof of each device, and under it the product: its bound and its prediction.

    Below the ridge point of a device the roof is its memory's rate, above it the peak (Williams et al. 2009).
    """
    low, high = min(_LEAST, intensity / _ROOM), max(_MOST, intensity * _ROOM)
    data = []
    for at, each in enumerate(times):
        if each.ridge is None or each.peak_flops_per_second is None or each.memory_bytes_per_second is None:
            continue
        peak, colour = each.peak_flops_per_second, COLOURS[at % len(COLOURS)]
        corners = sorted({low, min(max(each.ridge, low), high), high})
        roof = [min(peak, each.memory_bytes_per_second * corner) / TERA for corner in corners]
        said = f"{each.title}: {format_flops_per_second(peak)} from {each.ridge:.4g} FLOPs per byte on<extra></extra>"
        data.append(points(each.device, corners, roof, "lines", line={"color": colour}, hovertemplate=said))
        bound = min(peak, each.memory_bytes_per_second * intensity)
        for rate, symbol, words in ((bound, "circle-open", "at most"), (each.flops_per_second, "circle", "predicted")):
            if rate:
                said = f"{each.title}: {words} {format_flops_per_second(rate)}<extra></extra>"
                marker = {"color": colour, "size": 10, "symbol": symbol}
                data.append(
                    points(words, [intensity], [rate / TERA], marker=marker, showlegend=False, hovertemplate=said)
                )
    layout = arranged(title, "FLOPs per byte", "TFLOP/s")
    for axis in ("xaxis", "yaxis"):
        layout[axis] |= {"type": "log"}
    layout["shapes"].append(line("v", intensity, "#999999", "x", "y domain", dash="dot"))
    return {"data": data, "layout": layout}


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
