"""The document of measured collectives: time and bus bandwidth by size and group, latency and bandwidth fitted."""

from __future__ import annotations

from trainledger.answers.pages.plain_data import plain
from trainledger.forecast.predict.clock import LinkFit, bus_factor, link_fits
from trainledger.observe.measure.rates import CollectiveTimes
from trainledger.report.chart import COLOURS, Axis, Chart, Line
from trainledger.report.document import Cell, Document, Table, section, sections
from trainledger.spec.calibration import CollectiveTime
from trainledger.spec.units import GIGA, format_percent

BUS = "Bus bandwidth over the bytes of a collective"
DEFINED = (
    "Bus bandwidth as nccl-tests defines it (NVIDIA/nccl-tests, doc/PERFORMANCE.md): bytes over time, times "
    "2 (n - 1) / n of an all-reduce, (n - 1) / n of the others over n ranks, 1 of a broadcast."
)


def document(found: CollectiveTimes) -> Document:
    """Each collective by size and group, then the fit of latency + bytes / bandwidth."""
    backends = ", ".join(dict.fromkeys(each.backend for each in found.times))
    fits = link_fits(found.times)
    worst = max((each.worst for each in fits), default=0.0)
    return Document(
        title=f"Collectives on {found.title}",
        sections=sections(
            f"{found.title}, {backends}, ranks on this machine, threads of each: {found.threads}",
            times_table(found),
            section(
                "Latency and bandwidth, fitted", fits_table(fits),
                f"Time = latency + bytes / bandwidth; the farthest sample is {format_percent(worst)} off.",
            ),
            DEFINED,
            (f"Note: {each}." for each in found.notes),
        ),
        data=lambda: plain(found)
        | {"times": [plain(each) | {"bus_bytes_per_second": _bus(each)} for each in found.times]}
        | {"fits": plain(fits, more={LinkFit: ("bus_bytes_per_second",)})},
        figures=lambda: [_chart(found)],
    )  # fmt: skip


def times_table(found: CollectiveTimes) -> Table:
    """Time, bytes over time and bus bandwidth."""
    rows: list[tuple[Cell, ...]] = [
        (_words(each.name), each.ranks, each.nbytes, each.seconds, each.nbytes / each.seconds, _bus(each))
        for each in found.times
    ]
    columns = ("collective", "ranks", "bytes", "time", "bytes/time", "bus bandwidth")
    units = ("", "integer", "nbytes", "seconds", "nbytes_per_second", "nbytes_per_second")
    return Table("collectives", columns, tuple(rows), units, align="lrrrrr")


def fits_table(fits: list[LinkFit]) -> Table:
    """Latency and bandwidth of each collective over each group."""
    rows = tuple((_words(each.name), each.ranks, each.latency_seconds, each.bus_bytes_per_second) for each in fits)
    columns = ("collective", "ranks", "latency", "bus bandwidth")
    return Table("fits", columns, rows, ("", "integer", "seconds", "nbytes_per_second"), align="lrrr")


def _bus(each: CollectiveTime) -> float:
    return each.nbytes / each.seconds * bus_factor(each.name, each.ranks)


def _words(name: str) -> str:
    return name.replace("_", "-")


def _chart(found: CollectiveTimes) -> Chart:
    """GB/s over bytes, a line for each collective over each group."""
    marks = []
    for at, (name, ranks) in enumerate(dict.fromkeys((each.name, each.ranks) for each in found.times)):
        own = [each for each in found.times if (each.name, each.ranks) == (name, ranks)]
        title, colour = f"{_words(name)}, {ranks} ranks", COLOURS[at % len(COLOURS)]
        rates = [_bus(each) / GIGA for each in own]
        marks.append(Line([each.nbytes for each in own], rates, title, colour, symbol="circle"))
    return Chart(BUS, tuple(marks), Axis("bytes", log=True), Axis("GB/s", zero=True))
