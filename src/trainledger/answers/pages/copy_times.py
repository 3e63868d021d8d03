"""The document of copies measured side by side: in memory by layout and size, host and device, disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainledger.answers.pages.plain_data import plain
from trainledger.observe.measure.rates import CopyTimes
from trainledger.report.chart import COLOURS, Axis, Chart, Line
from trainledger.report.document import Document, Table, section, sections
from trainledger.spec.calibration import CopyTime
from trainledger.spec.units import GIGA, format_nbytes

IN_MEMORY = "Copies in memory over their bytes"


def document(found: CopyTimes) -> Document:
    """Every copy with its bytes, seconds and rate; pinned over pageable, strided against contiguous as sentences."""
    return Document(
        title=f"Copies on {found.title}",
        sections=sections(
            f"{found.title}, {found.backend}, threads: {found.threads}",
            section("In memory (bytes read and written)", _table("memory", found.memory), *_compared(found.memory)),
            section("Host and device", _table("device", found.device), *_pinned(found.device)),
            section("Disk", _table("disk", found.disk)),
            (f"Note: {each}." for each in found.notes),
        ),
        data=lambda: plain(found, more={CopyTime: ("bytes_per_second",)}),
        figures=lambda: [_chart(found.memory)],
    )


def _table(name: str, rows: Sequence[CopyTime]) -> Table:
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


def _chart(rows: Sequence[CopyTime]) -> Chart:
    """GB/s over bytes, a line for each layout: caches are steps down."""
    marks = []
    for at, what in enumerate(dict.fromkeys(each.what for each in rows if each.nbytes)):
        own = [each for each in rows if each.what == what and each.bytes_per_second is not None]
        rates = [(each.bytes_per_second or 0.0) / GIGA for each in own]
        marks.append(Line([each.nbytes for each in own], rates, what, COLOURS[at % len(COLOURS)], symbol="circle"))
    return Chart(IN_MEMORY, tuple(marks), Axis("bytes read and written", log=True), Axis("GB/s", zero=True))
