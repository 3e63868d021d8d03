"""An einsum drawn: its point under the roofs of devices, and how tiles and waves make steps over a size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainledger.forecast.predict.einsum_time import EinsumTime
from trainledger.report.chart import AXIS, COLOURS, Axis, Band, Chart, Line, Mark, bar_chart, beside
from trainledger.report.document import Table
from trainledger.spec.units import TERA, format_flops_per_second, format_seconds

LEAST, MOST = 1.0, 4096.0  # FLOPs per byte that a roofline shows at least
ROOM = 4  # a factor around the einsum's own
Sweep = Sequence[tuple[int, float]]
INTENSITY, RATE = Axis("FLOPs per byte", log=True), Axis("TFLOP/s", log=True)


def roofline_chart(intensity: float, times: Sequence[EinsumTime], title: str) -> Chart:
    """FLOP/s over FLOPs per byte: the roof of each device, and under it the einsum: its bound and its prediction.

    Below the ridge point of a device the roof is its memory's rate, above it the peak (Williams et al. 2009).
    """
    ends = min(LEAST, intensity / ROOM), max(MOST, intensity * ROOM)
    marks: list[Mark] = []
    for at, time in enumerate(times):
        peak, memory, colour = time.peak_flops_per_second, time.memory_bytes_per_second, COLOURS[at % len(COLOURS)]
        if time.ridge is None or peak is None or memory is None:
            continue
        marks.append(roof(time.device, time.title, peak, memory, ends, colour))
        bound = min(peak, memory * intensity)
        for rate, symbol, words in ((bound, "circle-open", "at most"), (time.flops_per_second, "circle", "predicted")):
            if rate:
                said = [f"{time.title}: {words} {format_flops_per_second(rate)}"]
                marks.append(Line([intensity], [rate / TERA], "", colour, 0, symbol=symbol, size=10, said=said))
    return Chart(title, (*marks, Band("x", intensity, colour=AXIS, dash="dot")), INTENSITY, RATE)


def roof(
    name: str, title: str, peak: float, memory_bytes_per_second: float, ends: tuple[float, float], colour: str,
    dash: str = "",
) -> Line:  # fmt: skip
    """The roof of a device between two intensities: the rate of its memory up to the ridge point, then its peak."""
    ridge = peak / memory_bytes_per_second
    corners = sorted({ends[0], min(max(ridge, ends[0]), ends[1]), ends[1]})
    rates = [min(peak, memory_bytes_per_second * corner) / TERA for corner in corners]
    said = f"{title}: {format_flops_per_second(peak)} from {ridge:.4g} FLOPs per byte on"
    return Line(corners, rates, name, colour, dash=dash, said=[said] * len(corners))


def sweep_chart(sweeps: Mapping[str, Sweep], dim: str, size: int, title: str) -> Chart:
    """Predicted TFLOP/s over the size of one dim, for each device: each new wave of tiles is a step down."""
    curves = [
        Line([at for at, _ in rates], [rate / TERA for _, rate in rates], name, COLOURS[number % len(COLOURS)])
        for number, (name, rates) in enumerate(sweeps.items())
    ]
    marker = Band("x", size, colour=AXIS, dash="dot")
    return Chart(title, (*curves, marker), Axis(dim), Axis("TFLOP/s", zero=True))


def sweep_table(sweeps: Mapping[str, Sweep], dim: str) -> Table:
    """The same in numbers."""
    sizes = [at for at, _ in next(iter(sweeps.values()))]
    rates = [[rate for _, rate in found] for found in sweeps.values()]
    rows = tuple((size, *(rate[at] for rate in rates)) for at, size in enumerate(sizes))
    return Table("sweep", (dim, *sweeps), rows, ("integer", *("flops_per_second" for _ in sweeps)))


def formats_chart(times: Mapping[str, Sequence[EinsumTime]], title: str) -> Chart:
    """The time of one einsum on each device, a bar for each number format."""
    devices = [time.title for time in next(iter(times.values()))]
    seconds = {
        dtype: [1e3 * (time.seconds or time.bound_seconds or 0.0) for time in own] for dtype, own in times.items()
    }

    def said(dtype: str, row: int) -> str:
        return f"{dtype} on {devices[row]}: {format_seconds(seconds[dtype][row] / 1e3)}"

    return bar_chart(title, "time (ms)", devices, beside(seconds, said))


def formats_table(times: Mapping[str, Sequence[EinsumTime]]) -> Table:
    """The same times with the rates that they are."""
    rows = tuple(
        (time.title, dtype, time.bound_seconds, time.seconds, time.peak_flops_per_second, time.flops_per_second)
        for own in zip(*times.values(), strict=True)
        for dtype, time in zip(times, own, strict=True)
    )
    columns = ("device", "format", "at least", "predicted", "peak", "reached")
    units = ("", "", "seconds", "seconds", "flops_per_second", "flops_per_second")
    return Table("formats", columns, rows, units=units, align="llrrrr")
