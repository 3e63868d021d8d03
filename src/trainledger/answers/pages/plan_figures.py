"""The figures of a plan: where the time goes, what memory holds over a step, and what runs when in it."""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.answers.pages.memory import memory_timeline
from trainledger.forecast.plan.plan import Plan
from trainledger.forecast.predict.forecast import NAPKIN, Bar
from trainledger.forecast.predict.parallel_step import spans
from trainledger.forecast.predict.streams import Span
from trainledger.ledger.ranks import RankAccount
from trainledger.report.document import Figure, Table
from trainledger.report.style import COLOURS, around, arranged, bar_figure
from trainledger.spec.units import format_percent, format_seconds

_COLOUR_OF = {
    "forward": COLOURS[0], "backward": COLOURS[2], "weights": COLOURS[4], "update": COLOURS[3],
    "communication": COLOURS[1], "more": "#dddddd",
}  # fmt: skip
_NAME_OF = {"weights": "gradients of weights", "more": "more rounds, of several kinds"}
_PALER = 0.5  # opacity of a bar for many rounds
_WAITING = "waiting, anywhere in the step"
_LEAST = 1e-3  # of a step: less at its end is not drawn
_SMALL = ((1.0, "seconds"), (1e-3, "milliseconds"), (1e-6, "microseconds"))
_SCALES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def figures(plan: Plan) -> dict[str, Figure]:
    """What there is to draw of a plan, by title; the waterfall first where times are known."""
    forecast = plan.forecast
    unfit = " (it does NOT fit)" if forecast.fits is False else ""
    drawn: dict[str, Figure] = {}
    if forecast.waterfall:
        whole = forecast.total_seconds
        title = ("Where the time of a step goes" if whole is None else f"Where {format_seconds(whole)} go") + unfit
        drawn[title] = waterfall(forecast.waterfall, title)
    usable = plan.memory_nbytes if forecast.usable_nbytes is None else forecast.usable_nbytes
    memory = memory_timeline(plan.heaviest, None, usable)
    if memory is not None:
        device = " of the peak rank" if plan.ranks else ""
        drawn[f"Memory{device} over one step{unfit}"] = memory
    if plan.machine is not None and forecast.step_seconds is not None:
        one = RankAccount(0, 0, 1, plan.run.model.n_layers, True, True, 1, plan.ledger)
        step = step_timeline(spans(plan.run, plan.ranks or (one,), plan.machine), forecast.step_seconds, unfit)
        if step is not None:
            drawn["One step as it runs"] = step
    return drawn


def waterfall(bars: Sequence[Bar], title: str) -> Figure:
    """The causes of a time as bars, each beginning where the one before ended, in the unit that suits the whole."""
    total = sum(each.nanoseconds for each in bars) / 10**9
    scale, unit = next(
        (each for each in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")) if total >= 2 * each[0]),
        next((each for each in _SMALL if total >= each[0]), _SMALL[-1]),
    )
    drawn = [each for each in bars if each.nanoseconds]
    names = [*(each.cause for each in drawn), "in all"]
    data = {
        "type": "waterfall", "orientation": "h", "y": names,
        "x": [*(each.seconds / scale for each in drawn), total / scale],
        "measure": [*("absolute" if each.cause == NAPKIN else "relative" for each in drawn), "total"],
        "showlegend": False,
        "hovertemplate": f"%{{y}}: %{{delta:.4g}} {unit}<extra></extra>",
        "connector": {"line": {"color": "#bbb", "width": 1}},
        "increasing": {"marker": {"color": COLOURS[5]}}, "decreasing": {"marker": {"color": COLOURS[2]}},
        "totals": {"marker": {"color": COLOURS[0]}},
        "text": [*(format_percent(each.seconds / total) for each in drawn), ""] if total else None,
        "textposition": "outside", "cliponaxis": False,
    }  # fmt: skip
    figure = bar_figure(title, unit, names, [data])
    figure["layout"]["xaxis"] |= {"range": around([0.0, 1.1 * _highest(bars) / 10**9 / scale]) if total else None}
    return figure


def waterfall_table(bars: Sequence[Bar]) -> Table:
    """The causes of a time with their seconds and shares of the whole; those that are nothing are left out."""
    whole = sum(each.seconds for each in bars)
    rows = [(each.cause, each.seconds, each.seconds / whole) for each in bars if each.nanoseconds]
    columns, units = ("cause", "time", "share"), ("", "seconds", "share")
    return Table("time", columns, (*rows, ("in all", whole, 1.0)), units=units, align="lrr")


def _highest(bars: Sequence[Bar]) -> int:
    """The largest sum of the first bars."""
    at = most = 0
    for each in bars:
        at += each.nanoseconds
        most = max(most, at)
    return most


def step_timeline(spans: Sequence[Span], step_seconds: float, note: str = "") -> Figure | None:
    """What runs when in a step (`forecast.predict.parallel_step.spans`); None where nothing is known of it.

    Many rounds that are alike are one bar: paler where a round is of one kind, grey where it is of several. What
    ``step_seconds`` has more than the spans is waiting between them, at unknown places: a bar after them.
    ``note`` follows the title.
    """
    if not spans:
        return None
    busy = max(each.end for each in spans)
    last = max(busy, step_seconds)
    scale, unit = next((each for each in _SCALES if last >= each[0]), _SCALES[-1])
    lanes = list(dict.fromkeys(each.stream for each in spans))
    data: list[dict[str, object]] = []
    for what, colour in _COLOUR_OF.items():
        own = [each for each in spans if each.what.removeprefix("more ") == what]
        if own:
            folded = [each.what != what for each in own]
            data.append(
                {
                    "type": "bar", "orientation": "h", "name": _NAME_OF.get(what, what),
                    "base": [each.start / scale for each in own],
                    "x": [(each.end - each.start) / scale for each in own], "y": [each.stream for each in own],
                    "marker": {"color": colour, "opacity": [_PALER if each else 1.0 for each in folded],
                               "line": {"color": "#ffffff", "width": 0.4}},
                    "text": [f"{each.name}, {format_seconds(each.end - each.start)}" for each in own],
                    "textposition": "none", "hovertemplate": "%{text}<extra></extra>",
                }
            )  # fmt: skip
    if any(each.what.startswith("more ") for each in spans):  # a bar without length: the legend says what paler is
        data.append(
            {
                "type": "bar", "orientation": "h", "name": "paler: many rounds, alike", "x": [0], "y": lanes[:1],
                "marker": {"color": _COLOUR_OF["forward"]}, "opacity": _PALER, "hoverinfo": "skip",
            }
        )  # fmt: skip
    if last - busy > _LEAST * last:
        data.append(
            {
                "type": "bar", "orientation": "h", "name": _WAITING, "base": [busy / scale] * len(lanes),
                "x": [(last - busy) / scale] * len(lanes), "y": lanes,
                "marker": {"color": "#ffffff", "line": {"width": 0},
                           "pattern": {"shape": "/", "size": 7, "fgcolor": "#aaaaaa"}},
                "hovertemplate": f"{format_seconds(last - busy)} of waiting for the program and for slower devices: "
                                 "somewhere in the step, drawn at its end<extra></extra>",
            }
        )  # fmt: skip
    title = f"One optimizer step: {format_seconds(last)}{note}"
    layout = arranged(title, f"time ({unit})", height=130 + 34 * len(lanes), barmode="overlay", bargap=0.25)
    layout["xaxis"] |= {"range": [0, last / scale]}
    layout["yaxis"] |= {"categoryorder": "array", "categoryarray": lanes[::-1], "gridcolor": "rgba(0,0,0,0)"}
    return {"data": data, "layout": layout}
