"""The waterfall of a run: bars in a terminal, and as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainledger.predict.waterfall import NAPKIN, Bar
from trainledger.report.table import WIDTH
from trainledger.units import format_percent, format_seconds

_LABEL, _AMOUNT, _SHARE, _BAR = 26, 10, 8, 32  # columns, the amount's and the share's at least


def text(bars: Sequence[Bar]) -> str:
    """Each cause with its seconds, its share of the whole and a bar that begins where the one before it ended.

    What takes nothing is left out. A bar of ``-`` takes time away.

    >>> print(text([Bar("6 N D at the peak", 3 * 10**9), Bar("attention", 10**9), Bar("data", 0)]))
    6 N D at the peak                3 s   75.0 %  ########################
    attention                        1 s   25.0 %                          ########
    in all                           4 s  100.0 %  ################################
    """
    total = sum(each.nanoseconds for each in bars)
    rows, at = [], 0
    for each in bars:
        if each.nanoseconds:
            rows.append((each.cause, each.nanoseconds, at))
        at += each.nanoseconds
    rows.append(("in all", total, 0))
    shown = [(name, *_numbers(amount, total)) for name, amount, _ in rows]
    widths = (_LABEL, max(_AMOUNT, *(len(each[1]) for each in shown)), max(_SHARE, *(len(each[2]) for each in shown)))
    room = min(_BAR, WIDTH - sum(widths) - 3)
    lines = []
    for (name, seconds, share), (_, amount, start) in zip(shown, rows, strict=True):
        bar = _drawn(start, start + amount, _highest(bars), room)
        lines.append(f"{name:<{widths[0]}}{seconds:>{widths[1]}} {share:>{widths[2]}}  {bar}".rstrip())
    return "\n".join(lines)


def _numbers(nanoseconds: int, total: int) -> tuple[str, str]:
    seconds = nanoseconds / 10**9
    shown = format_seconds(seconds) if seconds >= 0 else "-" + format_seconds(-seconds)
    return shown, format_percent(nanoseconds / total) if total else ""


def _highest(bars: Sequence[Bar]) -> int:
    """How far the bars reach in between."""
    at = most = 0
    for each in bars:
        at += each.nanoseconds
        most = max(most, at)
    return most


def _drawn(start: int, end: int, highest: int, room: int) -> str:
    """A bar between two amounts; what would be too short to see has no mark."""
    low, high = (round(room * each / highest) if highest else 0 for each in sorted((start, end)))
    return " " * low + ("#" if end > start else "-") * (high - low)


def figure(bars: Sequence[Bar], title: str) -> dict[str, Any]:
    """The same as a Plotly waterfall, in the unit that suits the whole."""
    from trainledger.report.style import COLOURS, above_bars, around, arranged, height_of

    total = sum(each.nanoseconds for each in bars) / 10**9
    scale, unit = next(
        (each for each in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")) if total >= 2 * each[0]),
        (1.0, "seconds") if total >= 1 else (1e-3, "milliseconds"),
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
    layout = arranged(title, unit, height=height_of(len(names)))
    layout["xaxis"] |= {"range": around([0.0, 1.1 * _highest(bars) / 10**9 / scale]) if total else None}
    above_bars(layout, names)
    return {"data": [data], "layout": layout}
