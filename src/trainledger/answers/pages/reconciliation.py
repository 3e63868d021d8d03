"""The document of a run directory or a reconciliation: forecast and measurement, and the figures of the run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from fractions import Fraction
from html import escape
from typing import Any

from trainledger.answers.pages.memory import memory_timeline
from trainledger.answers.pages.plain_data import plain
from trainledger.answers.pages.plan_figures import waterfall
from trainledger.answers.pages.record import RunRecord
from trainledger.answers.pages.run_figures import operations_table, roofline
from trainledger.ledger.measured import Spread
from trainledger.ledger.ranks import RankFigures
from trainledger.observe.reconcile import Part, Reconciliation, Row
from trainledger.report.document import Amount, Cell, Document, Figure, Table, section, sections, signed
from trainledger.report.html import page, parts, table_html
from trainledger.report.style import arranged, line
from trainledger.report.table import sentence
from trainledger.spec.plain import replace_file
from trainledger.spec.units import format_seconds

_PREDICTED, _MEASURED = "#E69F00", "#0072B2"
# These are always split; the others only where there is a difference to place.
_ALWAYS_SPLIT = ("peak_nbytes", "step_seconds", "total_seconds")


def document(found: Reconciliation | RunRecord) -> Document:
    """The table of quantities with its notes; of a run directory also what it lacks, and its figures."""
    record = found if isinstance(found, RunRecord) else None
    rows = found.reconciliation if isinstance(found, RunRecord) else found
    spread = rows["step_seconds"].spread
    lines = [] if spread is None else [spread_sentence(spread)]
    lines += [sentence(each) for each in rows.notes]
    lines += [f"Not in this report: {each}." for each in record.missing] if record else []
    return Document(
        title=f"{record.path.name}: forecast and measurement" if record else "Forecast and measurement",
        sections=sections(
            table_of(rows),
            ranks_table(record.ranks) if record and record.ranks else None,
            section("What was noticed", tuple(_noticed(record))) if record and record.findings else None,
            lines,
        ),
        data=lambda: _data(rows) | (_of_directory(record) if record else {}),
        figures=lambda: figures(record) if record else {},
    )


def _noticed(record: RunRecord) -> Iterator[str]:
    for each in record.findings:
        yield f"Step {each['step']}: {each['sentence']}"


def _of_directory(record: RunRecord) -> dict[str, Any]:
    findings = [{name: each[name] for name in ("step", "name", "sentence")} for each in record.findings]
    return {"missing": list(record.missing), "ranks": plain(list(record.ranks)), "findings": findings}


def table_of(rows: Reconciliation) -> Table:
    """Every quantity, predicted and measured, with the parts of those that differ; ratio is measured / predicted."""
    columns = ("", "predicted", "measured", "ratio", "basis", "difference is in")
    return Table("quantities", columns, tuple(each for row in rows.rows for each in _cells(row)), align="lrrrll")


def ranks_table(ranks: Sequence[RankFigures]) -> Table:
    """What each rank was metered to compute, keep, hold and send, against its account; equal where it is."""
    columns = ("rank", "FLOPs", "kept", "peak", "in collectives")
    names = {"matmul_flops": "flops", "kept_nbytes": "nbytes", "peak_nbytes": "nbytes", "sent_nbytes": "nbytes"}

    def cell(each: RankFigures, name: str) -> Cell:
        before, after = getattr(each.predicted, name), getattr(each.measured, name)
        return "equal" if before == after else signed(Fraction(after - before), names[name])

    rows = tuple((f"{each.rank} ({each.title})", *(cell(each, name) for name in names)) for each in ranks)
    return Table("ranks", columns, rows, align="lrrrr")


def _cells(row: Row) -> Iterator[tuple[Cell, ...]]:
    where = "" if row.where is None else f"{row.where[0]} {signed(row.where[1], row.unit)}"
    same = row.difference == 0  # the same number, not merely close
    if same and row.where is not None:  # the parts differ, and make up for each other
        where += f", others {signed(-row.where[1], row.unit)}"
    ratio = "equal" if same else "" if row.ratio is None else f"{row.ratio:.3f}"
    yield row.title, _amount(row.predicted, row.unit), _amount(row.measured, row.unit), ratio, row.basis, where
    if row.unexplained or (row.parts and (row.quantity in _ALWAYS_SPLIT or row.difference)):
        yield from (_part_cells(each, row.unit) for each in row.parts if each.predicted or each.measured)
        if row.unexplained is not None:
            yield "- unexplained", "", "", "", "", signed(row.unexplained, row.unit)


def _part_cells(part: Part, unit: str) -> tuple[Cell, ...]:
    same, ratio = part.difference == 0, part.ratio
    share = "equal" if same else "" if ratio is None else f"{ratio:.3f}"
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
    replace_file(path, html(record).encode())


def html(record: RunRecord) -> str:
    """The report of a run as a page: its table and its figures."""
    made, rows = document(record), record.reconciliation
    facts = [rows.device, record.measured.date, str(record.state.get("state", "")), str(record.path)]
    if record.measured.torch_version:
        facts.insert(1, f"torch {record.measured.torch_version}")
    where = escape(" · ".join(each for each in facts if each))
    return page(made.title, [f'<p class="where">{where}</p>', *parts(made), *_whole(record)], made.figures())


def _whole(record: RunRecord) -> Iterator[str]:
    """Tables that are too long for a terminal, folded: a browser's search finds what is in them."""
    for whose, ledger in (("forecast", record.predicted_ledger), ("recorded step", record.measured_ledger)):
        if ledger is not None:
            table = table_html(operations_table(ledger))
            yield f"<details><summary>Every operation of the {whose}</summary>{table}</details>"


def figures(record: RunRecord) -> dict[str, Figure]:
    """The figures that a run directory has the data for, by title."""
    rows = record.reconciliation
    forecast, measured = record.forecast, record.measured_ledger
    bars = () if forecast is None else forecast.waterfall
    built = {
        "Memory over one step": memory_timeline(record.predicted_ledger, record.measured_ledger),
        "Loss": loss_curve(record),
        "Step time": step_time_distribution(record),
        "Time by phase": phase_times(rows),
        "Forecast: where the time goes": waterfall(bars, "Forecast: where the time goes") if bars else None,
        "Operations of the recorded step": (
            None if measured is None or forecast is None else roofline(measured, forecast.peak_flops_per_second)
        ),
    }
    return {title: each for title, each in built.items() if each is not None}


def loss_curve(record: RunRecord) -> Figure | None:
    """Training and validation loss over steps, with the unigram entropy of the corpus."""
    steps, evaluations = record.steps, record.evaluations
    if not steps:
        return None
    curves = [("training", steps, "loss", {"mode": "lines", "line": {"color": _MEASURED, "width": 1.2}})]
    if evaluations:
        style = {"mode": "lines+markers", "line": {"color": "#D55E00", "width": 2}}
        curves.append(("validation", evaluations, "validation_loss", style))
    data = [
        {
            "type": "scatter",
            "name": name,
            "x": [each["step"] for each in lines],
            "y": [each[key] for each in lines],
            **style,
        }
        for name, lines, key, style in curves
    ]
    layout = arranged(x="step", y="loss (nats per token)")
    entropy = record.state.get("unigram_entropy")
    if isinstance(entropy, int | float):
        layout["shapes"].append(line("h", entropy, "#555", "x domain", "y", dash="dash"))
        layout["annotations"] = [
            {
                "x": 1, "xref": "x domain", "y": entropy, "yref": "y", "text": f"unigram entropy {entropy:.3f}",
                "showarrow": False, "xanchor": "right", "yanchor": "bottom", "font": {"color": "#555"},
            }
        ]  # fmt: skip
        layout["yaxis"]["rangemode"] = "tozero"
    return {"data": data, "layout": layout}


def step_time_distribution(record: RunRecord) -> Figure | None:
    """How long the steps took, with the median and the forecast marked."""
    seconds = [each["seconds"] for each in record.steps if isinstance(each.get("seconds"), int | float)]
    if not seconds:
        return None
    marks = []
    if record.measured.step_seconds is not None:
        marks.append(("median", record.measured.step_seconds.median, _MEASURED))
    if record.forecast is not None and record.forecast.step_seconds is not None:
        marks.append(("predicted", record.forecast.step_seconds, "#D55E00"))
    layout = arranged(x="seconds per step", y="steps", bargap=0.02, showlegend=False)
    layout["annotations"] = []
    layout["margin"] |= {"t": 60}
    for at, (name, value, colour) in enumerate(marks):
        layout["shapes"].append(line("v", value, colour, "x", "y domain", dash="dash"))
        layout["annotations"].append(
            {
                "x": value, "xref": "x", "y": 1 + 0.07 * at, "yref": "y domain", "xanchor": "left", "yanchor": "bottom",
                "text": f" {name} {format_seconds(value)}", "showarrow": False, "font": {"color": colour},
            }
        )  # fmt: skip
    bars = {"type": "histogram", "x": seconds, "nbinsx": 60, "marker": {"color": "#56B4E9"}, "name": "steps"}
    return {"data": [bars], "layout": layout}


def phase_times(rows: Reconciliation) -> Figure | None:
    """Seconds by phase, predicted and measured: of the whole run, or of a step where the run is not whole."""
    row = next((each for each in (rows["total_seconds"], rows["step_seconds"]) if each.parts), None)
    if row is None:
        return None
    names = [each.name for each in row.parts]
    sides = (
        ("predicted", [each.predicted for each in row.parts], _PREDICTED),
        ("measured", [each.measured for each in row.parts], _MEASURED),
    )
    data = [
        {"type": "bar", "orientation": "h", "name": name, "y": names, "x": values, "marker": {"color": colour}}
        for name, values, colour in sides
    ]
    what = "the whole run" if row.quantity == "total_seconds" else "one step"
    layout = arranged(x=f"seconds of {what}", barmode="group")
    layout["yaxis"] |= {"autorange": "reversed"}
    return {"data": data, "layout": layout}
