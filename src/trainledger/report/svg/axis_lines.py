"""What is drawn of the axes: lines at ticks and at zero, the words of ticks, titles."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.report.style import DARK, GREY
from trainledger.report.svg.elements import LINE, SIZE, SMALL, element, folded_to, lines_of, text
from trainledger.report.svg.frame import EDGE, TICK, Frame, title_of
from trainledger.report.svg.paint import is_clear, paint
from trainledger.report.svg.ticks import minor_ticks

_GRID, _ZERO = "#e4e4e4", "#999"
_MINOR = 4  # pixels of a minor tick


def draw_grid(frame: Frame, x: str, y: str, *, with_bars: bool) -> Iterator[str]:
    """The lines at the ticks of a plot's axes, those at zero, and minor ticks; none where bars have names."""
    for name, other in ((x, y), (y, x)):
        layout, axis, across = frame.layouts[name], frame.axes[name], frame.axes[other]
        edge, far = across.start, across.end
        colour = str(layout.get("gridcolor", _GRID))
        on_names = with_bars and axis.kind == "category"
        if layout.get("showgrid") is not False and not is_clear(colour) and not on_names:
            lines = "".join(_line(name, each.at, edge, far) for each in frame.ticks[name])
            yield element("g", lines, **paint(stroke=colour))
        outward = edge + (_MINOR if name[0] == "x" else -_MINOR)
        minor = "".join(_line(name, at, edge, outward) for at in minor_ticks(axis, layout))
        if minor:
            yield element("g", minor, **paint(stroke="#bbb"))
        zero = axis.at(0.0) if axis.kind == "linear" else None
        if layout.get("zeroline") is not False and zero is not None and axis.clamped(zero) == zero:
            yield element("g", _line(name, zero, edge, far), **paint(stroke=_ZERO))


def _line(name: str, at: float, start: float, end: float) -> str:
    ends = (at, at, start, end) if name[0] == "x" else (start, end, at, at)
    return element("line", **dict(zip(("x1", "x2", "y1", "y2"), map(float, ends), strict=True)))


def draw_upright(frame: Frame, name: str, left: float) -> Iterator[str]:
    """The words at an upright axis whose plot begins at ``left``, and its title."""
    layout, axis = frame.layouts[name], frame.axes[name]
    if layout.get("showticklabels") is not False:
        words = (
            text(left - TICK, each.at + 0.35 * SMALL - LINE * (len(each.lines) - 1) / 2, each.lines)
            for each in frame.ticks[name]
        )
        yield element("g", "".join(words), text_anchor="end", font_size=SMALL, **paint(GREY))
    title = " ".join(lines_of(title_of(layout)))
    if title:
        middle, at = (axis.start + axis.end) / 2, left - frame.room(name) + SIZE - 2
        lines = folded_to([title], max(abs(axis.end - axis.start), 100) + 20, SIZE)[:1]
        turned = f"rotate(-90 {at:.1f} {middle:.1f})"
        yield text(at, middle, lines, text_anchor="middle", transform=turned, **paint(DARK))


def draw_flat(frame: Frame, name: str, bottom: float) -> tuple[str, float]:
    """The words at a flat axis whose plot ends at ``bottom``, and its title; and how far down they reach."""
    layout, axis, ticks = frame.layouts[name], frame.axes[name], frame.ticks[name]
    parts = []
    if layout.get("showticklabels") is not False and ticks:
        words = (text(each.at, bottom + TICK + SMALL, each.lines) for each in ticks)
        parts.append(element("g", "".join(words), text_anchor="middle", font_size=SMALL, **paint(GREY)))
        bottom += TICK + SMALL + 2 + LINE * (max(len(each.lines) for each in ticks) - 1)
    title = title_of(layout)
    if title:
        lines = folded_to(lines_of(title), axis.end - EDGE, SIZE)
        parts.append(text((axis.start + axis.end) / 2, bottom + 20, lines, text_anchor="middle", **paint(DARK)))
        bottom += 24 + LINE * (len(lines) - 1)
    return "".join(parts), bottom
