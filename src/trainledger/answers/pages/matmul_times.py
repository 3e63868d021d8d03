"""The document of matmuls measured side by side: rates, what shape and layout cost, the roofline with the points."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from trainledger.answers.pages.einsum_figures import INTENSITY, LEAST, MOST, RATE, ROOM, roof, sweep_chart
from trainledger.answers.pages.plain_data import plain
from trainledger.observe.measure.rates import MatmulTimes
from trainledger.report.chart import COLOURS, Chart, Line
from trainledger.report.document import Cell, Document, Facts, Table, section, sections
from trainledger.spec.calibration import STRAIGHT, MatmulTime
from trainledger.spec.units import GIGA, TERA, format_flops_per_second, format_nbytes, format_percent

ROOFLINE, SWEEP = "Measured matmuls under the roofline", "The rate over the size"
_NEAR = 0.03  # cubes of two sizes as near as this are compared: 1001 and 1024


def document(found: MatmulTimes) -> Document:
    """Every matmul with its rate, intensity and share of the best; what a bad shape or layout costs; the roofline."""
    return Document(
        title=f"Matmuls on {found.title}",
        sections=sections(
            f"{found.title}, {found.backend}, threads: {found.threads}",
            times_table(found),
            Facts(tuple(_peaks(found))),
            section("", *_compared(found)),
            (f"Note: {each}." for each in found.notes),
        ),
        data=lambda: plain(
            found, more={MatmulTime: ("flops_per_second", "bytes_per_second", "intensity")}
        ) | {"best_flops_per_second": {each: found.best(each) for each in _dtypes(found)}},
        figures=lambda: figures(found),
    )  # fmt: skip


def times_table(found: MatmulTimes) -> Table:
    """FLOP/s, bytes/s, FLOPs per byte and the share of the best of its dtype, matmul by matmul."""
    columns = ("m x n x k", "dtype", "factors", "one call", "GFLOP/s", "of best", "GB/s", "FLOP/B")
    rows: list[tuple[Cell, ...]] = [
        (
            "x".join(map(str, each.shape)), each.dtype, each.factors, each.seconds,
            f"{each.flops_per_second / GIGA:,.1f}", each.flops_per_second / found.best(each.dtype),
            f"{each.bytes_per_second / GIGA:,.2f}", f"{each.intensity:.3g}",
        )
        for each in found.matmuls
    ]  # fmt: skip
    return Table("matmuls", columns, tuple(rows), ("", "", "", "seconds", "", "share"), align="lllrrrrr")


def figures(found: MatmulTimes) -> list[Chart]:
    """The roofline with the measured points, and of a sweep the rate over the size."""
    charts = [_roofline(found)]
    swept = _swept(found)
    if swept is not None:
        dim, at = swept
        rates = {
            dtype: sorted((each.shape[at], each.flops_per_second) for each in _straight(found, dtype))
            for dtype in _dtypes(found)
        }
        best = max(_straight(found, _dtypes(found)[0]), key=lambda each: each.flops_per_second)
        charts.append(sweep_chart(rates, dim, best.shape[at], SWEEP))
    return charts


def _roofline(found: MatmulTimes) -> Chart:
    """FLOP/s over FLOPs per byte of measured matmuls, under the roof of each dtype: its best matmul, a large copy."""
    low = min(LEAST, *(each.intensity / ROOM for each in found.matmuls))
    high = max(MOST, *(each.intensity * ROOM for each in found.matmuls))
    marks = []
    for at, dtype in enumerate(dict.fromkeys(each.dtype for each in found.matmuls)):
        colour = COLOURS[at % len(COLOURS)]
        marks.append(roof(dtype, found.title, found.best(dtype), found.memory_bytes_per_second, (low, high), colour))
        for name, straight, symbol in (("factors by rows", True, "circle"), ("others", False, "circle-open")):
            own = [each for each in found.matmuls if each.dtype == dtype and (each.factors == STRAIGHT) == straight]
            if own:
                said = [
                    f"{' x '.join(map(str, each.shape))}, {each.factors}: "
                    f"{format_flops_per_second(each.flops_per_second)}"
                    for each in own
                ]
                rates = [each.flops_per_second / TERA for each in own]
                places = [each.intensity for each in own]
                marks.append(Line(places, rates, f"{dtype}, {name}", colour, 0, symbol=symbol, said=said))
    return Chart(ROOFLINE, tuple(marks), INTENSITY, RATE)


def _dtypes(found: MatmulTimes) -> list[str]:
    return list(dict.fromkeys(each.dtype for each in found.matmuls))


def _straight(found: MatmulTimes, dtype: str) -> list[MatmulTime]:
    return [each for each in found.matmuls if each.dtype == dtype and each.factors == STRAIGHT]


def _swept(found: MatmulTimes) -> tuple[str, int] | None:
    """The one size that differs among all matmuls with straight factors, and its place in the shape."""
    shapes = {each.shape for each in found.matmuls if each.factors == STRAIGHT}
    differ = [at for at in range(3) if len({each[at] for each in shapes}) == len(shapes)]
    if len(shapes) < 3 or not differ or len({each[0] for each in shapes}) not in (1, len(shapes)):
        return None
    if differ == [0]:
        return "m", 0
    return ("n = k", 1) if differ == [1, 2] and all(each[1] == each[2] for each in shapes) else None


def _peaks(found: MatmulTimes) -> Iterator[tuple[str, str]]:
    for dtype in _dtypes(found):
        best, memory = found.best(dtype), found.memory_bytes_per_second
        ridge = f"the roofline turns at {best / memory:.3g} FLOPs per byte"
        yield f"best {dtype}", f"{format_flops_per_second(best)}; {ridge}"
    yield "memory", f"{format_nbytes(found.memory_bytes_per_second)}/s copied, read and write"


def _compared(found: MatmulTimes) -> Iterator[str]:
    """What shape, layout and dtype cost, each as a sentence."""
    for dtype in _dtypes(found):
        straight = {each.shape: each for each in _straight(found, dtype)}
        cubes = {shape[0]: each for shape, each in straight.items() if len(set(shape)) == 1}
        for size, each in cubes.items():
            good = [other for other in cubes if other > size and other % 64 == 0 and other <= size * (1 + _NEAR)]
            if size % 64 and good:
                share = each.flops_per_second / cubes[good[0]].flops_per_second
                yield f"{dtype}: {size} cubed runs at {format_percent(share)} of the rate of {good[0]} cubed."
        for each in found.matmuls:
            if each.dtype == dtype and each.factors != STRAIGHT and each.shape in straight:
                share = each.flops_per_second / straight[each.shape].flops_per_second
                shape = "x".join(map(str, each.shape))
                yield f"{dtype}: {each.factors} runs at {format_percent(share)} of {STRAIGHT} ({shape})."
    if {"fp32", "bf16"} <= set(_dtypes(found)):
        wide, narrow = ({each.shape: each for each in _straight(found, name)} for name in ("fp32", "bf16"))
        largest = max(wide.keys() & narrow.keys(), key=lambda each: (prod(each), each))
        times = narrow[largest].flops_per_second / wide[largest].flops_per_second
        yield f"bf16 runs at {times:.2f} times the rate of fp32 ({'x'.join(map(str, largest))})."
