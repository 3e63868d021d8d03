"""The figures of a plan: where the time goes, what memory holds over a step, and what runs when in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from trainledger.answers.pages.memory import memory_chart
from trainledger.forecast.plan.plan import Plan, RuleOfThumb
from trainledger.forecast.predict.forecast import NAPKIN, Bar
from trainledger.forecast.predict.parallel_step import spans
from trainledger.forecast.predict.streams import Span
from trainledger.ledger.parallel.rank_plan import rank_plan
from trainledger.ledger.ranks import RankAccount
from trainledger.report.chart import COLOURS, FAINT, PALE, WHITE, Axis, Bars, Chart, Line, Mark, bar_chart, significant
from trainledger.report.document import Amount, Table
from trainledger.spec.units import format_percent, format_seconds

_SMALL = 0.01  # of the whole: smaller bars are one in the short answer
_COLOUR_OF = {
    "forward": COLOURS[0],
    "backward": COLOURS[2],
    "weights": COLOURS[4],
    "update": COLOURS[3],
    "communication": COLOURS[1],
    "more": PALE,
}
_NAME_OF = {"weights": "gradients of weights", "more": "more rounds, of several kinds"}
_PALER = 0.5  # opacity of a bar for many rounds
_WAITING = "waiting, anywhere in the step"
_LEAST = 1e-3  # of a step: less at its end is not drawn
_UNITS = (
    (86400.0, "days"),
    (3600.0, "hours"),
    (60.0, "minutes"),
    (1.0, "seconds"),
    (1e-3, "milliseconds"),
    (1e-6, "microseconds"),
)
_LANE = 0.75  # of the row of a stream


def figures(plan: Plan) -> list[Chart]:
    """The charts of a plan; the waterfall first where times are known."""
    forecast = plan.forecast
    unfit = " (it does NOT fit)" if forecast.fits is False else ""
    charts: list[Chart | None] = []
    if forecast.waterfall:
        whole = forecast.total_seconds
        title = "Where the time of a step goes" if whole is None else f"Where {format_seconds(whole)} go"
        charts.append(waterfall(forecast.waterfall, title + unfit))
    usable = plan.memory_nbytes if forecast.usable_nbytes is None else forecast.usable_nbytes
    if plan.heaviest is not None:
        device = " of the peak rank" if plan.ranks else ""
        charts.append(memory_chart(plan.heaviest, f"Memory{device} over one step{unfit}", usable))
    if plan.machine is not None and forecast.step_seconds is not None:
        one = RankAccount(rank_plan(plan.run), 1, plan.ledger)
        charts.append(step_timeline(spans(plan.ranks or (one,), plan.machine), forecast.step_seconds, unfit))
    return [chart for chart in charts if chart is not None]


def waterfall(bars: Sequence[Bar], title: str) -> Chart:
    """The causes of a time as bars, each beginning where the one before ended, in the unit that suits the whole."""
    total = sum(bar.nanoseconds for bar in bars) / 10**9
    scale, unit = next((each for each in _UNITS if total >= each[0] * (2 if each[0] > 1 else 1)), _UNITS[-1])
    shown, ends = [bar for bar in bars if bar.nanoseconds], [0.0]
    for bar in shown:
        ends.append(bar.seconds / scale if bar.cause == NAPKIN else ends[-1] + bar.seconds / scale)
    names = [*(bar.cause for bar in shown), "in all"]
    steps = [(start, end) for start, end in pairwise(ends)]
    last = [(0.0, total / scale)]
    marks: list[Mark] = [
        Line([end, end], [row, row + 1], colour=FAINT, width=1, said=()) for row, end in enumerate(ends[1:])
    ]
    for colour, kind in ((COLOURS[5], "longer"), (COLOURS[2], "shorter"), (COLOURS[0], "whole")):
        rows = [
            (row, start, end)
            for row, (start, end) in enumerate([*steps, *last])
            if kind == ("whole" if row == len(steps) else "longer" if end >= start else "shorter")
        ]
        marks.append(
            Bars(
                [row for row, _, _ in rows],
                [start for _, start, _ in rows],
                [end for _, _, end in rows],
                colour=colour,
                said=[f"{names[row]}: {significant(end - start)} {unit}" for row, start, end in rows],
                texts=[
                    "" if row == len(steps) else format_percent((end - start) * scale / total)
                    for row, start, end in rows
                ],
            )
        )
    axis = Axis(unit, room=0.12)
    return bar_chart(title, axis, names, marks)


def waterfall_table(bars: Sequence[Bar]) -> Table:
    """The causes of a time with their seconds and shares of the whole; those that are nothing are left out."""
    whole = sum(bar.seconds for bar in bars)
    rows = [(bar.cause, bar.seconds, bar.seconds / whole) for bar in bars if bar.nanoseconds]
    columns, units = ("cause", "time", "share"), ("", "seconds", "share")
    return Table("time", columns, (*rows, ("in all", whole, 1.0)), units=units, align="lrr")


def step_timeline(spans: Sequence[Span], step_seconds: float, note: str = "") -> Chart | None:
    """What runs when in a step (`forecast.predict.parallel_step.spans`); None where nothing is known of it.

    Many rounds that are alike are one bar: paler where a round is of one kind, grey where it is of several. What
    ``step_seconds`` has more than the spans is waiting between them, at unknown places: a bar after them.
    ``note`` follows the title.
    """
    if not spans:
        return None
    busy = max(span.end for span in spans)
    last = max(busy, step_seconds)
    scale, unit = next((each for each in ((1.0, "s"), (1e-3, "ms")) if last >= each[0]), (1e-6, "us"))
    lanes = list(dict.fromkeys(span.stream for span in spans))
    marks = []
    for what, colour in _COLOUR_OF.items():
        for kind, opacity in ((what, 1.0), (f"more {what}", _PALER)):
            own = [span for span in spans if span.what == kind]
            if own:
                marks.append(
                    Bars(
                        [lanes.index(span.stream) for span in own],
                        [span.start / scale for span in own],
                        [span.end / scale for span in own],
                        _NAME_OF.get(what, what),
                        colour,
                        [f"{span.name}, {format_seconds(span.end - span.start)}" for span in own],
                        thick=_LANE,
                        opacity=opacity,
                        edge=WHITE,
                    )
                )
    if any(span.what.startswith("more ") for span in spans):  # no bar: the legend says what paler is
        marks.append(Bars((), (), (), "paler: many rounds, alike", COLOURS[0], opacity=_PALER))
    if last - busy > _LEAST * last:
        said = (
            f"{format_seconds(last - busy)} of waiting for the program and for slower devices: "
            "somewhere in the step, drawn at its end"
        )
        count = len(lanes)
        marks.append(
            Bars(
                range(count),
                [busy / scale] * count,
                [last / scale] * count,
                _WAITING,
                WHITE,
                [said] * count,
                thick=_LANE,
                edge=FAINT,
            )
        )
    title = f"One optimizer step: {format_seconds(last)}{note}"
    return Chart(title, tuple(marks), Axis(f"time ({unit})", ends=(0, last / scale)), Axis(names=tuple(lanes)))


def rules_table(rules: Iterable[RuleOfThumb]) -> Table:
    """Rules of thumb and how far each is off the ledger."""
    rows = tuple(
        (rule.quantity, rule.rule, Amount(rule.by_rule, rule.unit), Amount(rule.by_ledger, rule.unit), rule.error)
        for rule in rules
    )
    columns = ("", "rule of thumb", "estimate", "ledger", "error")
    return Table("rules of thumb", columns, rows, units=("", "", "", "", "change"), align="llrrr")


def large_bars(waterfall: Sequence[Bar]) -> tuple[Bar, ...]:
    """The bars of a waterfall with those below 1 % of the whole, where there are several, as one."""
    whole = abs(sum(bar.nanoseconds for bar in waterfall))
    small = [bar for bar in waterfall if 0 < abs(bar.nanoseconds) < _SMALL * whole]
    if len(small) < 2:
        return tuple(waterfall)
    rest = Bar(f"{len(small)} smaller causes", sum(bar.nanoseconds for bar in small))
    return (*(bar for bar in waterfall if bar not in small), rest)
