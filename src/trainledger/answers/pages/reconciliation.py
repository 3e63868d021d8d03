"""The document of a run directory or a reconciliation: forecast and measurement, and the figures of the run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from html import escape
from math import ceil, floor, log10
from typing import Any

from trainledger.answers.pages.einsum_figures import INTENSITY, RATE, roof
from trainledger.answers.pages.memory import memory_charts
from trainledger.answers.pages.plain_data import plain
from trainledger.answers.pages.plan_figures import waterfall
from trainledger.answers.pages.record import RunRecord
from trainledger.ledger.entry import Entry
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.measured import Spread
from trainledger.ledger.ranks import RankFigures
from trainledger.observe.reconcile import Part, Reconciliation, Row
from trainledger.report.chart import COLOURS, GREY, Axis, Band, Bars, Chart, Line, Mark, bar_chart, beside, significant
from trainledger.report.document import Amount, Cell, Document, Table, section, sections, signed
from trainledger.report.html import parts, table_html, whole_page
from trainledger.report.table import sentence
from trainledger.spec.calibration import calibration_path
from trainledger.spec.plain import replace_file
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
    for entry in ledger:
        found.setdefault((entry.name, entry.phase, entry.kind, entry.shape), []).append(entry)
    summed = [
        Operation(
            *key,
            sum(entry.times for entry in some),
            sum(entry.flops * entry.times for entry in some),
            sum((entry.read + entry.written) * entry.times for entry in some),
            sum(entry.seconds or 0.0 for entry in some),
        )
        for key, some in found.items()
    ]
    return sorted(summed, key=lambda operation: (-operation.seconds, -operation.flops, -operation.nbytes))


def operations_table(ledger: Ledger) -> Table:
    """Every operation of the step."""
    rows = tuple(
        (operation.name, operation.phase, operation.kind, " x ".join(map(str, operation.shape)), operation.times,
         operation.flops, operation.nbytes, operation.seconds or None)
        for operation in operations(ledger)
    )  # fmt: skip
    columns = ("operation", "phase", "kind", "shape", "runs", "FLOPs", "bytes moved", "time")
    return Table("operations", columns, rows, ("", "", "", "", "count", "flops", "nbytes", "seconds"))


def roofline(ledger: Ledger, peak_flops_per_second: float | None, title: str) -> Chart | None:
    """FLOP/s over FLOPs per byte of each operation that was timed; None where none was.

    The roofs are the peak that MFU refers to, and the most bytes per second that any of these operations moved.
    """
    timed = [
        operation for operation in operations(ledger) if operation.seconds and operation.flops and operation.nbytes
    ]
    whole = sum(operation.seconds for operation in timed)
    shown = [operation for operation in timed if operation.seconds > _LEAST_SHARE * whole]
    if not shown or peak_flops_per_second is None:
        return None
    memory = max(operation.nbytes / operation.seconds for operation in shown)
    intensities = [operation.flops / operation.nbytes for operation in shown]
    ends = min(intensities) / _ROOM, max(max(intensities), peak_flops_per_second / memory) * _ROOM
    marks = [roof("roof", "this machine", peak_flops_per_second, memory, ends, GREY)]
    for at, phase in enumerate(dict.fromkeys(operation.phase for operation in shown)):
        own = [operation for operation in shown if operation.phase == phase]
        places, rates = (
            [operation.flops / operation.nbytes for operation in own],
            [operation.flops / operation.seconds / TERA for operation in own],
        )
        marks.append(Line(places, rates, phase, COLOURS[at % len(COLOURS)], 0, symbol="circle", said=list(_said(own))))
    return Chart(title, tuple(marks), INTENSITY, RATE)


def _said(some: list[Operation]) -> Iterator[str]:
    for operation in some:
        shape = f" {' x '.join(map(str, operation.shape))}" if operation.shape else ""
        yield (
            f"{operation.name}{shape}: {format_seconds(operation.seconds)} in {operation.times} runs, "
            f"{format_flops_per_second(operation.flops / operation.seconds)}"
        )


_MEASURED = COLOURS[0]
# These are always split; the others only where there is a difference to place.
_ALWAYS_SPLIT = ("peak_nbytes", "step_seconds", "total_seconds")


def page(found: Reconciliation | RunRecord) -> Document:
    """The table of quantities with its notes; of a run directory also what it lacks, and its figures."""
    record = found if isinstance(found, RunRecord) else None
    rows = found.reconciliation if isinstance(found, RunRecord) else found
    spread = rows["step_seconds"].spread
    lines = [] if spread is None else [spread_sentence(spread)]
    lines += [sentence(note) for note in rows.notes]
    measured = any(calibration_path(backend).is_file() for backend in ("cuda", "mps", "cpu"))
    if measured and any("measure machine" in note for note in rows.notes):
        lines.append(_MEASURED_SINCE)
    if record and "loop" in record.state:
        lines += [_RECORD_A_STEP] * (rows["peak_nbytes"].measured is None)
        lines += [_GIVE_A_FORECAST] * (record.forecast is None)
    unknown = rows["mfu"].measured is None and rows["step_seconds"].measured is not None
    if unknown and not any("measure machine" in note for note in rows.notes):
        lines.append(_NEEDS_A_PEAK)
    lines += [f"Not in this report: {name}." for name in record.missing] if record else []
    return Document(
        title=f"{record.path.name}: forecast and measurement" if record else "Forecast and measurement",
        sections=sections(
            table_of(rows),
            ranks_table(record.ranks) if record and record.ranks else None,
            section("What was noticed", tuple(_noticed(record))) if record and record.findings else None,
            lines,
        ),
        data=lambda: _data(rows) | (_of_directory(record) if record else {}),
        figures=lambda: figures(record) if record else [],
    )


_MEASURED_SINCE = "This machine was measured since then: forecasts that are made now have times."
_RECORD_A_STEP = "What is not measured here a recorded step tells: tl.meter_loop(..., deep=20)."
_GIVE_A_FORECAST = (
    "A forecast to compare with: tl.meter_loop(..., forecast=traced), of traced = tl.trace(model, batch, loss=..., "
    "optimizer=optimizer) or of a run file, tl.predict(run)."
)


_NEEDS_A_PEAK = (
    "MFU needs the FLOPs of a step and the peak of the machine; `trainledger measure machine` measures the peak, for "
    "runs that begin after it."
)


def _noticed(record: RunRecord) -> Iterator[str]:
    for finding in record.findings:
        yield f"Step {finding['step']}: {finding['sentence']}"


def _of_directory(record: RunRecord) -> dict[str, Any]:
    findings = [{name: finding[name] for name in ("step", "name", "sentence")} for finding in record.findings]
    return {"missing": list(record.missing), "ranks": plain(list(record.ranks)), "findings": findings}


def table_of(rows: Reconciliation) -> Table:
    """Every quantity, predicted and measured, with the parts of those that differ; ratio is measured / predicted."""
    columns = ("", "predicted", "measured", "ratio", "basis", "difference is in")
    return Table("quantities", columns, tuple(cell for row in rows.rows for cell in _cells(row)), align="lrrrll")


def ranks_table(ranks: Sequence[RankFigures]) -> Table:
    """What each rank was metered to compute, keep, hold and send, against its account; equal where it is."""
    columns = ("rank", "hardware FLOPs", "kept", "peak", "in collectives")
    names = {"matmul_flops": "flops", "kept_nbytes": "nbytes", "peak_nbytes": "nbytes", "sent_nbytes": "nbytes"}

    def cell(each: RankFigures, name: str) -> Cell:
        before, after = getattr(each.predicted, name), getattr(each.measured, name)
        return "equal" if before == after else signed(Fraction(after - before), names[name])

    rows = tuple((f"{rank.rank} ({rank.title})", *(cell(rank, name) for name in names)) for rank in ranks)
    return Table("ranks", columns, rows, align="lrrrr")


def _ratio(ratio: float | None) -> str:
    """Three decimals; of a side that is next to nothing no more than that."""
    return "" if ratio is None else f"{ratio:.3f}" if ratio < 1000 else "over 1,000"


def _cells(row: Row) -> Iterator[tuple[Cell, ...]]:
    where = "" if row.where is None else f"{row.where[0]} {signed(row.where[1], row.unit)}"
    same = row.difference == 0  # the same number, not merely close
    if same and row.where is not None:  # the parts differ, and make up for each other
        where += f", others {signed(-row.where[1], row.unit)}"
    ratio = "equal" if same else _ratio(row.ratio)
    yield row.title, _amount(row.predicted, row.unit), _amount(row.measured, row.unit), ratio, row.basis, where
    if row.unexplained or (row.parts and (row.quantity in _ALWAYS_SPLIT or row.difference)):
        yield from (_part_cells(part, row.unit) for part in row.parts if part.predicted or part.measured)
        if row.unexplained is not None:
            yield "- unexplained", "", "", "", "", signed(row.unexplained, row.unit)


def _part_cells(part: Part, unit: str) -> tuple[Cell, ...]:
    same, ratio = part.difference == 0, part.ratio
    share = "equal" if same else _ratio(ratio)
    difference = signed(part.difference, unit) if part.difference else ""
    return f"- {part.name}", _amount(part.predicted, unit), _amount(part.measured, unit), share, "", difference


def _amount(value: int | float | None, unit: str) -> Cell:
    return "unknown" if value is None else Amount(value, unit)


def spread_sentence(spread: Spread) -> str:
    """Over which range the steps' times are spread."""
    discarded = f"; {spread.discarded} disturbed steps left out" if spread.discarded else ""
    low, high = format_seconds(spread.low), format_seconds(spread.high)
    return f"Step time is the median of {spread.count} steps; half of them lie between {low} and {high}{discarded}."


def _data(rows: Reconciliation) -> dict[str, Any]:
    more = {Row: ("ratio", "difference", "where", "unexplained"), Part: ("difference",)}
    data: dict[str, Any] = plain(rows, more=more, less={Row: ("title",)})
    for row in data["rows"]:
        row["where"] = row["where"] and dict(zip(("part", "difference"), row["where"], strict=True))
    return data


def write_html(record: RunRecord, path: str | os.PathLike[str]) -> None:
    """Store the report of a run as one file."""
    replace_file(path, html(record).encode(errors="backslashreplace"))


def html(record: RunRecord) -> str:
    """The report of a run as a page: its table and its figures."""
    made, rows = page(record), record.reconciliation
    facts = [rows.device, record.measured.date, str(record.state.get("state", "")), str(record.path)]
    if record.measured.torch_version:
        facts.insert(1, f"torch {record.measured.torch_version}")
    where = escape(" · ".join(fact for fact in facts if fact))
    return whole_page(made.title, [f'<p class="where">{where}</p>', *parts(made), *_whole(record)], made.figures())


def _whole(record: RunRecord) -> Iterator[str]:
    """Tables that are too long for a terminal, folded: a browser's search finds what is in them."""
    for whose, ledger in (("forecast", record.predicted_ledger), ("recorded step", record.measured_ledger)):
        if ledger is not None:
            table = table_html(operations_table(ledger))
            yield f"<details><summary>Every operation of the {whose}</summary>{table}</details>"


def figures(record: RunRecord) -> list[Chart]:
    """The charts that a run directory has the data for."""
    forecast, measured = record.forecast, record.measured_ledger
    ledgers = (("predicted", record.predicted_ledger), ("measured", measured))
    charts = [
        *memory_charts([(f"Memory over one step, {name}", ledger) for name, ledger in ledgers if ledger is not None]),
        loss_curve(record),
        step_time_distribution(record),
        phase_times(record.reconciliation),
    ]
    if forecast is not None:
        if forecast.waterfall:
            charts.append(waterfall(forecast.waterfall, "Forecast: where the time goes"))
        if measured is not None:
            charts.append(roofline(measured, forecast.peak_flops_per_second, "Operations of the recorded step"))
    return [chart for chart in charts if chart is not None]


def loss_curve(record: RunRecord) -> Chart | None:
    """Training and validation loss over steps, with the unigram entropy of the corpus."""
    steps, evaluations = record.steps, record.evaluations
    if not steps:
        return None
    marks: list[Mark] = [
        Line([step["step"] for step in steps], [step["loss"] for step in steps], "training", _MEASURED, 1.2)
    ]
    if evaluations:
        losses = [evaluation["validation_loss"] for evaluation in evaluations]
        marks.append(
            Line([evaluation["step"] for evaluation in evaluations], losses, "validation", COLOURS[5], symbol="circle")
        )
    entropy = record.state.get("unigram_entropy")
    if isinstance(entropy, int | float):
        marks.append(Band("y", entropy, text=f"unigram entropy {entropy:.3f}", colour=GREY))
    return Chart("Loss", tuple(marks), Axis("step"), Axis("loss (nats per token)", zero=entropy is not None))


def step_time_distribution(record: RunRecord) -> Chart | None:
    """How long the steps took, with the median and the forecast marked."""
    seconds = [step["seconds"] for step in record.steps if isinstance(step.get("seconds"), int | float)]
    if not seconds:
        return None
    first, width, counts = binned(seconds, 60)
    lows = [first + at * width for at in range(len(counts))]
    said = [f"{significant(low)} to {significant(low + width)}: {n:,}" for low, n in zip(lows, counts, strict=True)]
    bars = Bars([low + width / 2 for low in lows], [0] * len(counts), counts, colour=COLOURS[4], said=said,
                thick=0.98 * width, upright=True)  # fmt: skip
    marks: list[Mark] = [bars]
    measured, forecast = record.measured.step_seconds, record.forecast
    median = None if measured is None else measured.median
    predicted = None if forecast is None else forecast.step_seconds
    for name, value, colour in (("median", median, _MEASURED), ("predicted", predicted, COLOURS[5])):
        if value is not None:
            marks.append(Band("x", value, text=f"{name} {format_seconds(value)}", colour=colour))
    return Chart("Step time", tuple(marks), Axis("seconds per step"), Axis("steps"))


def binned(values: Sequence[float], most: int) -> tuple[float, float, list[int]]:
    """The start of the first bin, the round width of all, and how many values each holds.

    >>> binned([0.5, 1.5, 1.6, 3.2], 4)
    (0.0, 1.0, [1, 2, 0, 1])
    """
    low, high = min(values), max(values)
    rough = (high - low) / most or abs(low) / 10 or 1.0
    power = 10.0 ** floor(log10(rough))
    width = next(each * power for each in (1, 2, 5, 10) if each * power >= 0.999 * rough)
    first = floor(low / width) * width
    counts = [0] * max(1, ceil((high - first) / width + 1e-9))
    for value in values:
        counts[min(int((value - first) / width), len(counts) - 1)] += 1
    return first, width, counts


def phase_times(rows: Reconciliation) -> Chart | None:
    """Seconds by phase, predicted and measured: of the whole run, or of a step where the run is not whole."""
    row = next((each for each in (rows["total_seconds"], rows["step_seconds"]) if each.parts), None)
    if row is None:
        return None
    names = [part.name for part in row.parts]
    sides = {
        "measured": [float(part.measured or 0) for part in row.parts],
        "predicted": [float(part.predicted or 0) for part in row.parts],
    }
    bars = beside(sides, lambda side, at: f"{names[at]}, {side}: {significant(sides[side][at])} s")
    what = "the whole run" if row.quantity == "total_seconds" else "one step"
    return bar_chart("Time by phase", f"seconds of {what}", names, bars)
