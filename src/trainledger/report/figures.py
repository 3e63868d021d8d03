"""The figures, each built once: plain Plotly figures (``data`` and ``layout``) for a page, a notebook or a file.

No plotly is needed to build them. `plotly.graph_objects.Figure(figure)` opens one in a notebook.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.ledger.entry import CATEGORIES, Ledger
from trainledger.ledger.timeline import Moment, timeline
from trainledger.reconcile import Reconciliation
from trainledger.report.record import RunRecord
from trainledger.report.style import COLOURS, Figure, arranged, line
from trainledger.units import GIGA, MEGA, format_seconds

_COLOUR_OF = dict(zip(CATEGORIES, COLOURS, strict=True))
_PREDICTED, _MEASURED = "#E69F00", "#0072B2"
_MOST_POINTS = 1200


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


def memory_timeline(predicted: Ledger | None, measured: Ledger | None) -> Figure | None:
    """Live bytes over the operations of a step, stacked by category: the prediction above the measurement."""
    sides = [(name, each) for name, each in (("predicted", predicted), ("measured", measured)) if each is not None]
    if not sides:
        return None
    lanes = [(name, *_stacked(timeline(ledger))) for name, ledger in sides]
    highest = max(sum(column) for _, _, live, _ in lanes for column in zip(*live.values(), strict=True))
    scale, unit = (GIGA, "GB") if highest >= GIGA else (MEGA, "MB")
    top_of_axis = 1.12 * highest / scale
    layout = arranged(height=240 * len(lanes) + 100, hovermode="x unified")
    layout["margin"] |= {"t": 70}
    layout["annotations"] = []
    data = []
    for at, (name, x, live, phases) in enumerate(lanes):
        axis = str(at + 1) if at else ""
        for category, nbytes in live.items():
            data.append(
                {
                    "type": "scatter", "mode": "lines", "name": category, "legendgroup": category,
                    "showlegend": at == 0, "stackgroup": name, "line": {"width": 0.5, "color": _COLOUR_OF[category]},
                    "x": x, "y": [each / scale for each in nbytes], "xaxis": f"x{axis}", "yaxis": f"y{axis}",
                    "hovertemplate": f"%{{y:.4f}} {unit}",
                }
            )  # fmt: skip
        top, bottom = 1 - at / len(lanes), 1 - (at + 1) / len(lanes)
        gap = 0.12 if len(lanes) > 1 else 0.0
        layout[f"yaxis{axis}"] = {
            "title": {"text": f"{name} ({unit})"}, "domain": [bottom + gap / 2, top - gap / 2],
            "range": [0, top_of_axis], "anchor": f"x{axis}",
        }  # fmt: skip
        layout[f"xaxis{axis}"] = {"anchor": f"y{axis}", "range": [0, x[-1]]}
        for start, phase in phases:
            layout["annotations"].append(
                {
                    "x": start, "y": top_of_axis, "xref": f"x{axis}", "yref": f"y{axis}", "text": phase,
                    "showarrow": False, "xanchor": "left", "yanchor": "top", "font": {"size": 11, "color": "#555"},
                }
            )  # fmt: skip
            layout["shapes"].append(line("v", start, "#bbb", f"x{axis}", f"y{axis} domain"))
    layout[f"xaxis{len(lanes) if len(lanes) > 1 else ''}"]["title"] = {"text": "operations of one optimizer step"}
    return {"data": data, "layout": layout}


def _stacked(moments: Sequence[Moment]) -> tuple[list[int], dict[str, list[int]], list[tuple[int, str]]]:
    """Operation numbers, live bytes by category, and where each phase begins; thinned, peaks kept."""
    places = _unrolled(moments)
    phases: list[tuple[int, str]] = []
    for place, moment in zip(places, moments, strict=True):
        if not phases or phases[-1][1] != moment.entry.phase:
            phases.append((place, moment.entry.phase))
    every = max(1, len(moments) // _MOST_POINTS)
    groups = [range(at, min(at + every, len(moments))) for at in range(0, len(moments), every)]
    kept = [max(group, key=lambda at: moments[at].nbytes) for group in groups]
    live = {
        category: [moments[at].live.get(category, 0) for at in kept]
        for category in CATEGORIES
        if any(each.live.get(category) for each in moments)
    }
    return [places[at] for at in kept], live, _readable(phases, places[-1])


def _unrolled(moments: Sequence[Moment]) -> list[int]:
    """The number of each moment's operation when loops are unrolled: the rounds between first and last count."""
    places: list[int] = []
    place = 0
    starts: list[int] = []
    before: Moment | None = None
    for moment in moments:
        depth = len(moment.iteration)
        for at in range(depth):
            entered = (
                before is None
                or before.entry.loop[: at + 1] != moment.entry.loop[: at + 1]
                or before.iteration[:at] != moment.iteration[:at]
            )
            if entered:
                starts[at:] = [place]
            elif before is not None and before.iteration[at] != moment.iteration[at]:
                place += (moment.iteration[at] - before.iteration[at] - 1) * (place - starts[at])
                starts[at + 1 :] = []
        places.append(place)
        place += 1
        before = moment
    return places


def _readable(phases: list[tuple[int, str]], last: int) -> list[tuple[int, str]]:
    """The phases long enough that their names do not run into each other."""
    kept = []
    for at, (start, name) in enumerate(phases):
        end = phases[at + 1][0] if at + 1 < len(phases) else last
        if end - start > 0.08 * last:
            kept.append((start, name))
    return kept


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
    layout = arranged(xaxis={"title": {"text": "step"}}, yaxis={"title": {"text": "loss (nats per token)"}})
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
    layout = arranged(
        xaxis={"title": {"text": "seconds per step"}}, yaxis={"title": {"text": "steps"}}, bargap=0.02, showlegend=False
    )
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
    layout = arranged(
        barmode="group",
        xaxis={"title": {"text": f"seconds of {what}"}},
        yaxis={"autorange": "reversed", "automargin": True},
    )
    return {"data": data, "layout": layout}
