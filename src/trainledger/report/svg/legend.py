"""The legend: the names of the traces above a plot, over as many lines as they need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trainledger.report.style import COLOURS, DARK
from trainledger.report.svg.bars import is_bar
from trainledger.report.svg.curves import colour_of, modes_of
from trainledger.report.svg.elements import LINE, SMALL, element, folded_to, lines_of, text, width_of
from trainledger.report.svg.markers import symbol, symbol_style
from trainledger.report.svg.paint import paint
from trainledger.spec.frozen import frozen

_SIGN, _SPACE, _APART = 20, 6, 20  # pixels of a sign, of the space after it, and between two names
_ROW = 20
Trace = dict[str, Any]


@frozen
class Entry:
    """A name and its position."""

    number: int
    trace: Trace
    lines: tuple[str, ...]
    x: float
    y: float


def entries_of(traces: Sequence[Trace], layout: dict[str, Any], left: float, width: float) -> tuple[list[Entry], float]:
    """The names that a legend has, from left to right and down, and the height of all."""
    named = [
        (number, each) for number, each in enumerate(traces) if each.get("name") and each.get("showlegend") is not False
    ]
    asked = layout.get("showlegend")
    if asked is False or (len(named) < 2 and not asked and not any(each.get("showlegend") for _, each in named)):
        return [], 0.0
    found: list[Entry] = []
    x, y, high = left, 0.0, 0.0
    for number, trace in named:
        lines = folded_to([" ".join(lines_of(str(trace["name"])))], width - _SIGN - _SPACE, SMALL)
        wide = _SIGN + _SPACE + max(width_of(each, SMALL) for each in lines)
        if x > left and x + wide > left + width:
            x, y, high = left, y + high, 0.0
        found.append(Entry(number, trace, tuple(lines), x, y))
        x += wide + _APART
        high = max(high, _ROW + LINE * (len(lines) - 1))
    return found, y + high


def draw_legend(entries: Sequence[Entry], top: float) -> Iterator[str]:
    """The entries, the first line at ``top``."""
    for each in entries:
        middle = top + each.y + _ROW / 2
        yield from _sign(each.number, each.trace, each.x, middle)
        x = each.x + _SIGN + _SPACE
        yield text(x, middle + 0.35 * SMALL, each.lines, font_size=SMALL, **paint(DARK))


def _sign(number: int, trace: Trace, x: float, middle: float) -> Iterator[str]:
    """A small picture of how a trace is drawn."""
    marker = trace.get("marker", {})
    area = is_bar(trace) or trace.get("stackgroup") or trace.get("fill") not in (None, "none")
    if area:
        colour = marker.get("color") if is_bar(trace) else trace.get("fillcolor") or colour_of(number, trace)
        hatch = marker.get("pattern")
        shown = colour if isinstance(colour, str) else COLOURS[number % len(COLOURS)]
        style = paint(shown, hatch and hatch.get("fgcolor"), opacity=trace.get("opacity", 1.0))
        yield element("rect", x=float(x + 3), y=middle - 6, width=14, height=12, **style)
        if hatch:
            slants = ((3, 1, 7), (3, 6, 12), (10, 6, 7))
            lines = (f"M{x + right:.1f} {middle + down:.1f}l{length} -{length}" for right, down, length in slants)
            yield element("path", d="".join(lines), **paint(stroke=hatch.get("fgcolor")))
        return
    modes, line = modes_of(trace), trace.get("line", {})
    if "lines" in modes:
        style = paint(stroke=colour_of(number, trace), width=max(1.5, line.get("width", 2)), dash=line.get("dash", ""))
        yield element("line", x1=float(x), x2=float(x + _SIGN), y1=middle, y2=middle, **style)
    if "markers" in modes:
        kind, size, style = symbol_style(number, trace)
        yield element("g", symbol(kind, x + _SIGN / 2, middle, min(size, 12)), **style)
