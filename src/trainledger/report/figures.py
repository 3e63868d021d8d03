"""The figures, each built once: plain Plotly figures (``data`` and ``layout``) for a page, a notebook or a file.

No plotly is needed to build them. `plotly.graph_objects.Figure(figure)` opens one in a notebook.
"""

from __future__ import annotations

from trainledger.ledger.ledger import Ledger
from trainledger.reconcile import Reconciliation
from trainledger.report.memory import memory_lanes
from trainledger.report.record import RunRecord
from trainledger.report.style import Figure, arranged, line
from trainledger.units import format_seconds

_PREDICTED, _MEASURED = "#E69F00", "#0072B2"


def figures(record: RunRecord) -> dict[str, Figure]:
    """The figures that a run directory has the data for, by title."""
    rows = record.reconciliation
    built = {
        "Memory over one step": memory_timeline(record.predicted_ledger, record.measured_ledger),
        "Loss": loss_curve(record),
        "Step time": step_time_distribution(record),
        "Time by phase": phase_times(rows),
    }
    return {title: each for title, each in built.items() if each is not None}


def memory_timeline(
    predicted: Ledger | None, measured: Ledger | None, usable_nbytes: int | None = None
) -> Figure | None:
    """Live bytes over the operations of a step, stacked by category: the prediction above the measurement.

    ``usable_nbytes`` is what the device gives, where that is known.
    """
    sides = [(name, each) for name, each in (("predicted", predicted), ("measured", measured)) if each is not None]
    return memory_lanes(sides, usable_nbytes) if sides else None


def loss_curve(record: RunRecord) -> Figure | None:
    """Training and validation loss over steps, beside the unigram entropy of the corpus."""
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
