"""The documents of measured rates: matmuls under the roofline, copies, collectives, the data loader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from trainledger.answers.copies import EVIDENCE, table
from trainledger.answers.pages.einsum_figures import INTENSITY, LEAST, MOST, RATE, ROOM, roof, sweep_chart
from trainledger.answers.pages.plain_data import plain
from trainledger.catalog.host_copies import host_copies, measured
from trainledger.forecast.predict.clock import LinkFit, bus_factor, link_fits
from trainledger.observe.measure.rates import CollectiveTimes, CopyTimes, LoaderTimes, MatmulTimes
from trainledger.report.chart import COLOURS, Axis, Chart, Line
from trainledger.report.document import Cell, Document, Facts, Section, Table, section, sections
from trainledger.report.table import sentence
from trainledger.spec.calibration import STRAIGHT, CollectiveTime, CopyTime, LoaderTime, MatmulTime
from trainledger.spec.units import GIGA, TERA, format_count, format_flops_per_second, format_nbytes, format_percent

ROOFLINE, SWEEP = "Measured matmuls under the roofline", "The rate over the size"
_NEAR = 0.03  # cubes of two sizes as near as this are compared: 1001 and 1024


def page(found: MatmulTimes | CopyTimes | CollectiveTimes | LoaderTimes) -> Document:
    """Every measurement with its rate, what differs as sentences, and the rates over sizes as charts."""
    if isinstance(found, MatmulTimes):
        return _of_matmuls(found)
    if isinstance(found, CopyTimes):
        return _of_copies(found)
    return _of_collectives(found) if isinstance(found, CollectiveTimes) else _of_loader(found)


def _of_matmuls(times: MatmulTimes) -> Document:
    rates = ("flops_per_second", "bytes_per_second", "intensity")
    best = {dtype: times.best(dtype) for dtype in _dtypes(times)}
    return Document(
        title=f"Matmuls on {times.title}",
        sections=sections(
            f"{times.title}, {times.backend}, threads: {times.threads}",
            _matmul_table(times),
            Facts(tuple(_peaks(times))),
            section("", *_costs(times)),
            (f"Note: {note}." for note in times.notes),
        ),
        data=lambda: plain(times, more={MatmulTime: rates}) | {"best_flops_per_second": best},
        figures=lambda: matmul_charts(times),
    )


def _matmul_table(times: MatmulTimes) -> Table:
    """FLOP/s, bytes/s, FLOPs per byte and the share of the best of its dtype, matmul by matmul."""
    columns = ("m x n x k", "dtype", "factors", "one call", "GFLOP/s", "of best", "GB/s", "FLOP/B")
    rows: list[tuple[Cell, ...]] = []
    for matmul in times.matmuls:
        rates = (matmul.flops_per_second / times.best(matmul.dtype), f"{matmul.bytes_per_second / GIGA:,.2f}")
        what = ("x".join(map(str, matmul.shape)), matmul.dtype, matmul.factors, matmul.seconds)
        rows.append((*what, f"{matmul.flops_per_second / GIGA:,.1f}", *rates, f"{matmul.intensity:.3g}"))
    return Table("matmuls", columns, tuple(rows), ("", "", "", "seconds", "", "share"), align="lllrrrrr")


def matmul_charts(times: MatmulTimes) -> list[Chart]:
    """The roofline with the measured points, and of a sweep the rate over the size."""
    charts = [_roofline(times)]
    swept = _swept(times)
    if swept is not None:
        dim, at = swept
        rates = {
            dtype: sorted((matmul.shape[at], matmul.flops_per_second) for matmul in _straight(times, dtype))
            for dtype in _dtypes(times)
        }
        best = max(_straight(times, _dtypes(times)[0]), key=lambda matmul: matmul.flops_per_second)
        charts.append(sweep_chart(rates, dim, best.shape[at], SWEEP))
    return charts


def _roofline(times: MatmulTimes) -> Chart:
    """FLOP/s over FLOPs per byte of measured matmuls, under the roof of each dtype: its best matmul, a large copy."""
    low = min(LEAST, *(matmul.intensity / ROOM for matmul in times.matmuls))
    high = max(MOST, *(matmul.intensity * ROOM for matmul in times.matmuls))
    marks = []
    for at, dtype in enumerate(dict.fromkeys(matmul.dtype for matmul in times.matmuls)):
        colour = COLOURS[at % len(COLOURS)]
        marks.append(roof(dtype, times.title, times.best(dtype), times.memory_bytes_per_second, (low, high), colour))
        for name, straight, symbol in (("factors by rows", True, "circle"), ("others", False, "circle-open")):
            own = [
                matmul for matmul in times.matmuls if matmul.dtype == dtype and (matmul.factors == STRAIGHT) == straight
            ]
            if own:
                said = [
                    f"{' x '.join(map(str, matmul.shape))}, {matmul.factors}: "
                    f"{format_flops_per_second(matmul.flops_per_second)}"
                    for matmul in own
                ]
                rates = [matmul.flops_per_second / TERA for matmul in own]
                places = [matmul.intensity for matmul in own]
                marks.append(Line(places, rates, f"{dtype}, {name}", colour, 0, symbol=symbol, said=said))
    return Chart(ROOFLINE, tuple(marks), INTENSITY, RATE)


def _dtypes(times: MatmulTimes) -> list[str]:
    return list(dict.fromkeys(matmul.dtype for matmul in times.matmuls))


def _straight(times: MatmulTimes, dtype: str) -> list[MatmulTime]:
    return [matmul for matmul in times.matmuls if matmul.dtype == dtype and matmul.factors == STRAIGHT]


def _swept(times: MatmulTimes) -> tuple[str, int] | None:
    """The one size that differs among all matmuls with straight factors, and its place in the shape."""
    shapes = {matmul.shape for matmul in times.matmuls if matmul.factors == STRAIGHT}
    differ = [at for at in range(3) if len({shape[at] for shape in shapes}) == len(shapes)]
    if len(shapes) < 3 or not differ or len({shape[0] for shape in shapes}) not in (1, len(shapes)):
        return None
    if differ == [0]:
        return "m", 0
    return ("n = k", 1) if differ == [1, 2] and all(shape[1] == shape[2] for shape in shapes) else None


def _peaks(times: MatmulTimes) -> Iterator[tuple[str, str]]:
    for dtype in _dtypes(times):
        best, memory = times.best(dtype), times.memory_bytes_per_second
        ridge = f"the roofline turns at {best / memory:.3g} FLOPs per byte"
        yield f"best {dtype}", f"{format_flops_per_second(best)}; {ridge}"
    yield "memory", f"{format_nbytes(times.memory_bytes_per_second)}/s copied, read and write"


def _costs(times: MatmulTimes) -> Iterator[str]:
    """What shape, layout and dtype cost, each as a sentence."""
    for dtype in _dtypes(times):
        straight = {matmul.shape: matmul for matmul in _straight(times, dtype)}
        cubes = {shape[0]: matmul for shape, matmul in straight.items() if len(set(shape)) == 1}
        for size, cube in cubes.items():
            good = [other for other in cubes if other > size and other % 64 == 0 and other <= size * (1 + _NEAR)]
            if size % 64 and good:
                share = cube.flops_per_second / cubes[good[0]].flops_per_second
                yield f"{dtype}: {size} cubed runs at {format_percent(share)} of the rate of {good[0]} cubed."
        for matmul in times.matmuls:
            if matmul.dtype == dtype and matmul.factors != STRAIGHT and matmul.shape in straight:
                share = matmul.flops_per_second / straight[matmul.shape].flops_per_second
                shape = "x".join(map(str, matmul.shape))
                yield f"{dtype}: {matmul.factors} runs at {format_percent(share)} of {STRAIGHT} ({shape})."
    if {"fp32", "bf16"} <= set(_dtypes(times)):
        wide, narrow = ({matmul.shape: matmul for matmul in _straight(times, name)} for name in ("fp32", "bf16"))
        largest = max(wide.keys() & narrow.keys(), key=lambda each: (prod(each), each))
        faster = narrow[largest].flops_per_second / wide[largest].flops_per_second
        yield f"bf16 runs at {faster:.2f} times the rate of fp32 ({'x'.join(map(str, largest))})."


IN_MEMORY = "Copies in memory over their bytes"


def _of_copies(times: CopyTimes) -> Document:
    """Every copy with its bytes, seconds and rate; pinned over pageable, strided against contiguous as sentences."""
    return Document(
        title=f"Copies on {times.title}",
        sections=sections(
            f"{times.title}, {times.backend}, threads: {times.threads}",
            section(
                "In memory (bytes read and written)", _copy_table("memory", times.memory), *_compared(times.memory)
            ),
            section("Host and device", _copy_table("device", times.device), *_pinned(times.device)),
            None if any(copy.seconds for copy in times.device) else _of_evidence(),
            section("Disk", _copy_table("disk", times.disk)),
            (f"Note: {note}." for note in times.notes),
        ),
        data=lambda: plain(times, more={CopyTime: ("bytes_per_second",)}),
        figures=lambda: [_copy_chart(times.memory)],
    )


def _of_evidence() -> Section:
    """What the catalog has of another machine, where this one has no accelerator."""
    entry = host_copies()[EVIDENCE]
    said = f"Not of this machine, which has no accelerator: {entry['source']} ({entry['date']})."
    return section(f"Host and device of an {EVIDENCE}", table(EVIDENCE), *_pinned(measured(EVIDENCE)), said)


def _copy_table(name: str, rows: Sequence[CopyTime]) -> Table:
    cells = tuple((row.what, row.nbytes, row.seconds, row.bytes_per_second, row.note) for row in rows)
    units = ("", "nbytes", "seconds", "nbytes_per_second")
    return Table(name, ("", "bytes", "one", "rate", ""), cells, units, align="lrrrl")


def _compared(rows: Sequence[CopyTime]) -> Iterator[str]:
    """Copies of strided tensors against those of contiguous ones, where the bytes are most; and the price of a view."""
    most = max(row.nbytes for row in rows)
    largest = {row.what: row for row in rows if row.nbytes == most and row.seconds is not None}
    contiguous = largest.pop("copy, contiguous", None)
    if contiguous is None or contiguous.seconds is None:
        return
    for what, copy in largest.items():
        if copy.seconds is not None:
            times = copy.seconds / contiguous.seconds
            yield f"{what} takes {times:.2f} times as long as a contiguous copy of {format_nbytes(most)}."
    views = [row.seconds for row in rows if not row.nbytes and row.seconds is not None]
    if views:
        yield f"A view moves nothing: {1e6 * min(views):.2g} us, whatever its size."


def _pinned(rows: Sequence[CopyTime]) -> Iterator[str]:
    seconds = {row.what: row.seconds for row in rows}
    for way in ("to device", "to host"):
        pageable, pinned = seconds.get(f"{way}, pageable"), seconds.get(f"{way}, pinned")
        if pageable is not None and pinned is not None:
            yield f"From pinned memory {way} is {pageable / pinned:.2f} times as fast as from pageable memory."


def _copy_chart(rows: Sequence[CopyTime]) -> Chart:
    """GB/s over bytes, a line for each layout: caches are steps down."""
    marks = []
    for at, what in enumerate(dict.fromkeys(row.what for row in rows if row.nbytes)):
        own = [row for row in rows if row.what == what and row.bytes_per_second is not None]
        rates = [(copy.bytes_per_second or 0.0) / GIGA for copy in own]
        marks.append(Line([copy.nbytes for copy in own], rates, what, COLOURS[at % len(COLOURS)], symbol="circle"))
    return Chart(IN_MEMORY, tuple(marks), Axis("bytes read and written", log=True), Axis("GB/s", zero=True))


BUS = "Bus bandwidth over the bytes of a collective"
DEFINED = (
    "Bus bandwidth as nccl-tests defines it (NVIDIA/nccl-tests, doc/PERFORMANCE.md): bytes over time, times "
    "2 (n - 1) / n of an all-reduce, (n - 1) / n of the others over n ranks, 1 of a broadcast."
)


def _of_collectives(times: CollectiveTimes) -> Document:
    backends = ", ".join(dict.fromkeys(time.backend for time in times.times))
    fits = link_fits(times.times)
    worst = format_percent(max((fit.worst for fit in fits), default=0.0))
    farthest = f"Time = latency + bytes / bandwidth; the farthest sample is {worst} off."
    return Document(
        title=f"Collectives on {times.title}",
        sections=sections(
            f"{times.title}, {backends}, ranks on this machine, threads of each: {times.threads}",
            _collective_table(times),
            section("Latency and bandwidth, fitted", _fits_table(fits), farthest),
            DEFINED,
            (f"Note: {note}." for note in times.notes),
        ),
        data=lambda: {
            **plain(times),
            "times": [plain(time) | {"bus_bytes_per_second": _bus(time)} for time in times.times],
            "fits": plain(fits, more={LinkFit: ("bus_bytes_per_second",)}),
        },
        figures=lambda: [_collective_chart(times)],
    )


def _collective_table(times: CollectiveTimes) -> Table:
    """Time, bytes over time and bus bandwidth."""
    rows: list[tuple[Cell, ...]] = [
        (_words(time.name), time.ranks, time.nbytes, time.seconds, time.nbytes / time.seconds, _bus(time))
        for time in times.times
    ]
    columns = ("collective", "ranks", "bytes", "time", "bytes/time", "bus bandwidth")
    units = ("", "integer", "nbytes", "seconds", "nbytes_per_second", "nbytes_per_second")
    return Table("collectives", columns, tuple(rows), units, align="lrrrrr")


def _fits_table(fits: list[LinkFit]) -> Table:
    """Latency and bandwidth of each collective over each group."""
    rows = tuple(
        (_words(link_fit.name), link_fit.ranks, link_fit.latency_seconds, link_fit.bus_bytes_per_second)
        for link_fit in fits
    )
    columns = ("collective", "ranks", "latency", "bus bandwidth")
    return Table("fits", columns, rows, ("", "integer", "seconds", "nbytes_per_second"), align="lrrr")


def _bus(each: CollectiveTime) -> float:
    return each.nbytes / each.seconds * bus_factor(each.name, each.ranks)


def _words(name: str) -> str:
    return name.replace("_", "-")


def _collective_chart(times: CollectiveTimes) -> Chart:
    """GB/s over bytes, a line for each collective over each group."""
    marks = []
    for at, (name, ranks) in enumerate(dict.fromkeys((time.name, time.ranks) for time in times.times)):
        own = [time for time in times.times if (time.name, time.ranks) == (name, ranks)]
        title, colour = f"{_words(name)}, {ranks} ranks", COLOURS[at % len(COLOURS)]
        rates = [_bus(time) / GIGA for time in own]
        marks.append(Line([time.nbytes for time in own], rates, title, colour, symbol="circle"))
    return Chart(BUS, tuple(marks), Axis("bytes", log=True), Axis("GB/s", zero=True))


def _of_loader(loader_times: LoaderTimes) -> Document:
    """Tokens per second by workers, and how often that is what the steps need."""
    needed = loader_times.needed_tokens_per_second
    read = [time.tokens_per_second for time in loader_times.times if time.what.startswith("read ahead")]
    return Document(
        title="The data loader",
        sections=sections(
            f"{loader_times.data}: batches of {loader_times.global_batch:,} sequences of "
            f"{loader_times.seq_len:,} tokens",
            _loader_table(loader_times),
            _verdict(needed, max(read)) if needed is not None and read else None,
            (f"Note: {note}." for note in loader_times.notes),
        ),
        data=lambda: plain(loader_times, more={LoaderTime: ("tokens_per_second",)}),
    )


def _loader_table(loader_times: LoaderTimes) -> Table:
    needed = loader_times.needed_tokens_per_second
    rows: list[tuple[Cell, ...]] = []
    for time in loader_times.times:
        share = None if needed is None or time.what.startswith("tokenize") else time.tokens_per_second / needed
        rows.append((time.what, time.workers, time.tokens, time.seconds, time.tokens_per_second, share))
    columns = ("", "workers", "tokens", "time", "tokens/s", "" if needed is None else "of need")
    return Table("loader", columns, tuple(rows), ("", "integer", "count", "seconds", "count", "factor"), "lrrrrr")


def _verdict(needed: float, read: float) -> str:
    what = f"steps take {format_count(needed)} tokens/s by the forecast"
    if read >= needed:
        return sentence(f"{what}, and the loader reads {read / needed:,.1f} times as many ahead: they do not wait")
    return sentence(f"{what}, and the loader reads {format_count(read)} ahead: steps wait for tokens")
