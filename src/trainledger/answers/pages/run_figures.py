"""Figures and tables of a run's recorded step: its operations under the machine's roofs, and its ledger whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainledger.answers.pages.einsum_figures import INTENSITY, RATE, roof
from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.report.chart import COLOURS, GREY, Chart, Line
from trainledger.report.document import Table
from trainledger.spec.units import TERA, format_flops_per_second, format_seconds

_LEAST_SHARE = 0.001  # of the step: what takes less is left out of the figure
_ROOM = 2.0


@dataclass(frozen=True)
class Operation:
    """All runs of one operation of a step, of one shape where it is a matmul."""

    name: str
    phase: str
    kind: str
    shape: tuple[int, ...]
    times: int
    flops: int
    nbytes: int
    seconds: float


def operations(ledger: Ledger) -> list[Operation]:
    """The operations of a recorded step, those that take longest first; without clocks, those with most FLOPs."""
    found: dict[tuple[str, str, str, tuple[int, ...]], list[Entry]] = {}
    for each in ledger:
        found.setdefault((each.name, each.phase, each.kind, each.shape), []).append(each)
    summed = [
        Operation(
            *key, sum(each.times for each in some), sum(each.flops * each.times for each in some),
            sum((each.read + each.written) * each.times for each in some), sum(each.seconds or 0.0 for each in some),
        )
        for key, some in found.items()
    ]  # fmt: skip
    return sorted(summed, key=lambda each: (-each.seconds, -each.flops, -each.nbytes))


def operations_table(ledger: Ledger) -> Table:
    """Every operation of the step."""
    rows = tuple(
        (each.name, each.phase, each.kind, " x ".join(map(str, each.shape)), each.times, each.flops, each.nbytes,
         each.seconds or None)
        for each in operations(ledger)
    )  # fmt: skip
    columns = ("operation", "phase", "kind", "shape", "runs", "FLOPs", "bytes moved", "time")
    return Table("operations", columns, rows, ("", "", "", "", "count", "flops", "nbytes", "seconds"))


def roofline(ledger: Ledger, peak_flops_per_second: float | None, title: str) -> Chart | None:
    """FLOP/s over FLOPs per byte of each operation that was timed; None where none was.

    The roofs are the peak that MFU refers to, and the most bytes per second that any of these operations moved.
    """
    timed = [each for each in operations(ledger) if each.seconds and each.flops and each.nbytes]
    whole = sum(each.seconds for each in timed)
    shown = [each for each in timed if each.seconds > _LEAST_SHARE * whole]
    if not shown or peak_flops_per_second is None:
        return None
    memory = max(each.nbytes / each.seconds for each in shown)
    intensities = [each.flops / each.nbytes for each in shown]
    ends = min(intensities) / _ROOM, max(max(intensities), peak_flops_per_second / memory) * _ROOM
    marks = [roof("roof", "this machine", peak_flops_per_second, memory, ends, GREY)]
    for at, phase in enumerate(dict.fromkeys(each.phase for each in shown)):
        own = [each for each in shown if each.phase == phase]
        places, rates = [each.flops / each.nbytes for each in own], [each.flops / each.seconds / TERA for each in own]
        marks.append(Line(places, rates, phase, COLOURS[at % len(COLOURS)], 0, symbol="circle", said=list(_said(own))))
    return Chart(title, tuple(marks), INTENSITY, RATE)


def _said(some: list[Operation]) -> Iterator[str]:
    for each in some:
        shape = f" {' x '.join(map(str, each.shape))}" if each.shape else ""
        yield (
            f"{each.name}{shape}: {format_seconds(each.seconds)} in {each.times} runs, "
            f"{format_flops_per_second(each.flops / each.seconds)}"
        )
