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


def _of_matmuls(found: MatmulTimes) -> Document:
    rates = ("flops_per_second", "bytes_per_second", "intensity")
    best = {dtype: found.best(dtype) for dtype in _dtypes(found)}
    return Document(
        title=f"Matmuls on {found.title}",
        sections=sections(
            f"{found.title}, {found.backend}, threads: {found.threads}",
            _matmul_table(found),
            Facts(tuple(_peaks(found))),
            section("", *_costs(found)),
            (f"Note: {note}." for note in found.notes),
        ),
        data=lambda: plain(found, more={MatmulTime: rates}) | {"best_flops_per_second": best},
        figures=lambda: matmul_charts(found),
    )


def _matmul_table(found: MatmulTimes) -> Table:
    """FLOP/s, bytes/s, FLOPs per byte and the share of the best of its dtype, matmul by matmul."""
    columns = ("m x n x k", "dtype", "factors", "one call", "GFLOP/s", "of best", "GB/s", "FLOP/B")
    rows: list[tuple[Cell, ...]] = []
    for each in found.matmuls:
        rates = (each.flops_per_second / found.best(each.dtype), f"{each.bytes_per_second / GIGA:,.2f}")
        what = ("x".join(map(str, each.shape)), each.dtype, each.factors, each.seconds)
        rows.append((*what, f"{each.flops_per_second / GIGA:,.1f}", *rates, f"{each.intensity:.3g}"))
    return Table("matmuls", columns, tuple(rows), ("", "", "", "seconds", "", "share"), align="lllrrrrr")


def matmul_charts(found: MatmulTimes) -> list[Chart]:
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


def _costs(found: MatmulTimes) -> Iterator[str]:
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


IN_MEMORY = "Copies in memory over their bytes"


def _of_copies(found: CopyTimes) -> Document:
    """Every copy with its bytes, seconds and rate; pinned over pageable, strided against contiguous as sentences."""
    return Document(
        title=f"Copies on {found.title}",
        sections=sections(
            f"{found.title}, {found.backend}, threads: {found.threads}",
            section(
                "In memory (bytes read and written)", _copy_table("memory", found.memory), *_compared(found.memory)
            ),
            section("Host and device", _copy_table("device", found.device), *_pinned(found.device)),
            None if any(each.seconds for each in found.device) else _of_evidence(),
            section("Disk", _copy_table("disk", found.disk)),
            (f"Note: {each}." for each in found.notes),
        ),
        data=lambda: plain(found, more={CopyTime: ("bytes_per_second",)}),
        figures=lambda: [_copy_chart(found.memory)],
    )


def _of_evidence() -> Section:
    """What the catalog has of another machine, where this one has no accelerator."""
    entry = host_copies()[EVIDENCE]
    said = f"Not of this machine, which has no accelerator: {entry['source']} ({entry['date']})."
    return section(f"Host and device of an {EVIDENCE}", table(EVIDENCE), *_pinned(measured(EVIDENCE)), said)


def _copy_table(name: str, rows: Sequence[CopyTime]) -> Table:
    cells = tuple((each.what, each.nbytes, each.seconds, each.bytes_per_second, each.note) for each in rows)
    units = ("", "nbytes", "seconds", "nbytes_per_second")
    return Table(name, ("", "bytes", "one", "rate", ""), cells, units, align="lrrrl")


def _compared(rows: Sequence[CopyTime]) -> Iterator[str]:
    """Copies of strided tensors against those of contiguous ones, where the bytes are most; and the price of a view."""
    most = max(each.nbytes for each in rows)
    largest = {each.what: each for each in rows if each.nbytes == most and each.seconds is not None}
    contiguous = largest.pop("copy, contiguous", None)
    if contiguous is None or contiguous.seconds is None:
        return
    for what, each in largest.items():
        if each.seconds is not None:
            times = each.seconds / contiguous.seconds
            yield f"{what} takes {times:.2f} times as long as a contiguous copy of {format_nbytes(most)}."
    views = [each.seconds for each in rows if not each.nbytes and each.seconds is not None]
    if views:
        yield f"A view moves nothing: {1e6 * min(views):.2g} us, whatever its size."


def _pinned(rows: Sequence[CopyTime]) -> Iterator[str]:
    seconds = {each.what: each.seconds for each in rows}
    for way in ("to device", "to host"):
        pageable, pinned = seconds.get(f"{way}, pageable"), seconds.get(f"{way}, pinned")
        if pageable is not None and pinned is not None:
            yield f"From pinned memory {way} is {pageable / pinned:.2f} times as fast as from pageable memory."


def _copy_chart(rows: Sequence[CopyTime]) -> Chart:
    """GB/s over bytes, a line for each layout: caches are steps down."""
    marks = []
    for at, what in enumerate(dict.fromkeys(each.what for each in rows if each.nbytes)):
        own = [each for each in rows if each.what == what and each.bytes_per_second is not None]
        rates = [(each.bytes_per_second or 0.0) / GIGA for each in own]
        marks.append(Line([each.nbytes for each in own], rates, what, COLOURS[at % len(COLOURS)], symbol="circle"))
    return Chart(IN_MEMORY, tuple(marks), Axis("bytes read and written", log=True), Axis("GB/s", zero=True))


BUS = "Bus bandwidth over the bytes of a collective"
DEFINED = (
    "Bus bandwidth as nccl-tests defines it (NVIDIA/nccl-tests, doc/PERFORMANCE.md): bytes over time, times "
    "2 (n - 1) / n of an all-reduce, (n - 1) / n of the others over n ranks, 1 of a broadcast."
)


def _of_collectives(found: CollectiveTimes) -> Document:
    backends = ", ".join(dict.fromkeys(time.backend for time in found.times))
    fits = link_fits(found.times)
    worst = format_percent(max((fit.worst for fit in fits), default=0.0))
    farthest = f"Time = latency + bytes / bandwidth; the farthest sample is {worst} off."
    return Document(
        title=f"Collectives on {found.title}",
        sections=sections(
            f"{found.title}, {backends}, ranks on this machine, threads of each: {found.threads}",
            _collective_table(found),
            section("Latency and bandwidth, fitted", _fits_table(fits), farthest),
            DEFINED,
            (f"Note: {note}." for note in found.notes),
        ),
        data=lambda: {
            **plain(found),
            "times": [plain(time) | {"bus_bytes_per_second": _bus(time)} for time in found.times],
            "fits": plain(fits, more={LinkFit: ("bus_bytes_per_second",)}),
        },
        figures=lambda: [_collective_chart(found)],
    )


def _collective_table(found: CollectiveTimes) -> Table:
    """Time, bytes over time and bus bandwidth."""
    rows: list[tuple[Cell, ...]] = [
        (_words(each.name), each.ranks, each.nbytes, each.seconds, each.nbytes / each.seconds, _bus(each))
        for each in found.times
    ]
    columns = ("collective", "ranks", "bytes", "time", "bytes/time", "bus bandwidth")
    units = ("", "integer", "nbytes", "seconds", "nbytes_per_second", "nbytes_per_second")
    return Table("collectives", columns, tuple(rows), units, align="lrrrrr")


def _fits_table(fits: list[LinkFit]) -> Table:
    """Latency and bandwidth of each collective over each group."""
    rows = tuple((_words(each.name), each.ranks, each.latency_seconds, each.bus_bytes_per_second) for each in fits)
    columns = ("collective", "ranks", "latency", "bus bandwidth")
    return Table("fits", columns, rows, ("", "integer", "seconds", "nbytes_per_second"), align="lrrr")


def _bus(each: CollectiveTime) -> float:
    return each.nbytes / each.seconds * bus_factor(each.name, each.ranks)


def _words(name: str) -> str:
    return name.replace("_", "-")


def _collective_chart(found: CollectiveTimes) -> Chart:
    """GB/s over bytes, a line for each collective over each group."""
    marks = []
    for at, (name, ranks) in enumerate(dict.fromkeys((each.name, each.ranks) for each in found.times)):
        own = [each for each in found.times if (each.name, each.ranks) == (name, ranks)]
        title, colour = f"{_words(name)}, {ranks} ranks", COLOURS[at % len(COLOURS)]
        rates = [_bus(each) / GIGA for each in own]
        marks.append(Line([each.nbytes for each in own], rates, title, colour, symbol="circle"))
    return Chart(BUS, tuple(marks), Axis("bytes", log=True), Axis("GB/s", zero=True))


def _of_loader(found: LoaderTimes) -> Document:
    """Tokens per second by workers, and how often that is what the steps need."""
    needed = found.needed_tokens_per_second
    read = [each.tokens_per_second for each in found.times if each.what.startswith("read ahead")]
    return Document(
        title="The data loader",
        sections=sections(
            f"{found.data}: batches of {found.global_batch:,} sequences of {found.seq_len:,} tokens",
            _loader_table(found),
            _verdict(needed, max(read)) if needed is not None and read else None,
            (f"Note: {each}." for each in found.notes),
        ),
        data=lambda: plain(found, more={LoaderTime: ("tokens_per_second",)}),
    )


def _loader_table(found: LoaderTimes) -> Table:
    needed = found.needed_tokens_per_second
    rows: list[tuple[Cell, ...]] = []
    for each in found.times:
        share = None if needed is None or each.what.startswith("tokenize") else each.tokens_per_second / needed
        rows.append((each.what, each.workers, each.tokens, each.seconds, each.tokens_per_second, share))
    columns = ("", "workers", "tokens", "time", "tokens/s", "" if needed is None else "of need")
    return Table("loader", columns, tuple(rows), ("", "integer", "count", "seconds", "count", "factor"), "lrrrrr")


def _verdict(needed: float, read: float) -> str:
    what = f"steps take {format_count(needed)} tokens/s by the forecast"
    if read >= needed:
        return sentence(f"{what}, and the loader reads {read / needed:,.1f} times as many ahead: they do not wait")
    return sentence(f"{what}, and the loader reads {format_count(read)} ahead: steps wait for tokens")
