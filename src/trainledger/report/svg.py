"""Figures of horizontal bars as plain SVG: no scripts, no browser to draw them, and a few kB instead of megabytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from trainledger.document import Figure
from trainledger.report.style import COLOURS, DARK, GREY

WIDTH = 960
_LEFT, _RIGHT, _TOP, _ROW, _BOTTOM = 10, 70, 12, 44, 50
_LEGEND = 20  # pixels of a line of the legend
_TICKS = 6


@dataclass(frozen=True)
class _Bar:
    """A bar of a row: where it begins and ends on the axis, its ``share`` of the row's height, and what it says."""

    row: int
    start: float
    end: float
    place: float
    share: float
    colour: str
    label: str = ""


def svg(figure: Figure, width: int = 960) -> str | None:
    """The figure as one SVG element; None where it has anything but horizontal bars from zero or a waterfall."""
    data, layout = figure["data"], figure["layout"]
    if not data or any(
        each["type"] not in ("bar", "waterfall") or each.get("orientation") != "h" or "base" in each for each in data
    ):
        return None
    names = _names(figure)
    bars = list(_bars(figure, names))
    low, high = layout["xaxis"].get("range") or (0.0, 1.05 * max(each.end for each in bars))
    legend = [each for each in data if each.get("showlegend", True) and each.get("name")]
    top = _TOP + _LEGEND * len(legend)
    height = top + _ROW * len(names) + _BOTTOM
    scale = (WIDTH - _LEFT - _RIGHT) / (high - low)

    def at(value: float) -> float:
        return _LEFT + (value - low) * scale

    parts = [_box(_LEFT, _TOP + _LEGEND * number, 12, 12, each["marker"]["color"])
             + _text(_LEFT + 18, _TOP + _LEGEND * number + 11, each["name"])
             for number, each in enumerate(legend)]  # fmt: skip
    base = height - _BOTTOM
    for tick in _ticks(low, high):
        parts.append(_line(at(tick), top, base, "#e4e4e4", ""))
        parts.append(_text(at(tick), base + 18, f"{tick:,.4g}", "middle", GREY))
    for row, name in enumerate(names):
        parts.append(_text(_LEFT, top + _ROW * row + 14, name))
    for each in bars:
        y = top + _ROW * each.row + 18 + each.place
        left, right = sorted((at(each.start), at(each.end)))
        parts.append(_box(left, y, right - left, each.share, each.colour))
        if each.label:
            parts.append(_text(right + 4, y + each.share - 6, each.label, colour=GREY))
    for shape, words in _marks(figure):
        parts.append(_line(at(shape), top, base, DARK, "4 3"))
        parts.append(_text(at(shape) - 4, top + 10, words, "end"))
    title = layout["xaxis"].get("title", {}).get("text", "")
    parts.append(_text((WIDTH - _RIGHT) / 2, height - 8, title, "middle"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="100%" '
        f'font-family="system-ui, sans-serif" font-size="13">{"".join(parts)}</svg>'
    )


def _names(figure: Figure) -> list[str]:
    """The names of the rows from the top, which `style.bar_figure` puts above them."""
    above = [each for each in figure["layout"].get("annotations", ()) if each.get("yref") == "y" and "yshift" in each]
    if above:
        return [str(each["text"]) for each in sorted(above, key=lambda each: float(each["y"]))]
    return [str(name) for name in dict.fromkeys(name for each in figure["data"] for name in each["y"])]


def _bars(figure: Figure, names: list[str]) -> Iterator[_Bar]:
    data = figure["data"]
    grouped = figure["layout"].get("barmode") == "group"
    thick = 20 / len(data) if grouped else 20
    ends = [0.0] * len(names)
    for number, trace in enumerate(data):
        texts = trace.get("text") if trace.get("textposition") != "none" else None
        for place, (name, value) in enumerate(zip(trace["y"], trace["x"], strict=True)):
            row = name if isinstance(name, int) else names.index(str(name))
            label = str(texts[place]) if texts else ""
            if trace["type"] == "waterfall":
                start = 0.0 if trace["measure"][place] in ("absolute", "total") else ends[row - 1]
                kind = "totals" if trace["measure"][place] == "total" else "increasing" if value >= 0 else "decreasing"
                ends[row] = value if kind == "totals" else start + value
                yield _Bar(row, start, ends[row], 0, thick, trace[kind]["marker"]["color"], label)
                continue
            start = 0.0 if grouped else ends[row]
            ends[row] = start + value
            colour = trace.get("marker", {}).get("color", COLOURS[number % len(COLOURS)])
            yield _Bar(row, start, start + value, number * thick if grouped else 0, thick, colour, label)


def _marks(figure: Figure) -> list[tuple[float, str]]:
    """The vertical lines of `style.mark`, each with what it says."""
    layout = figure["layout"]
    lines = [each["x0"] for each in layout.get("shapes", ()) if each["x0"] == each["x1"]]
    words = [each["text"] for each in layout.get("annotations", ()) if each.get("yref") == "y domain"]
    return list(zip(lines, words, strict=False))


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers along an axis."""
    rough = (high - low) / _TICKS
    power = 10.0 ** len(f"{int(rough)}") / 10 if rough >= 1 else 10.0 ** -len(f"{1 / rough:.0f}")
    step = next(each * power for each in (1, 2, 5, 10, 20, 50, 100) if each * power >= rough)
    first = -(-low // step) * step
    return [first + step * number for number in range(int((high - first) / step) + 1)]


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" fill="{escape(colour)}"/>'


def _line(x: float, y1: float, y2: float, colour: str, dash: str) -> str:
    ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}"' + (f' stroke-dasharray="{dash}"/>' if dash else "/>")


def _text(x: float, y: float, words: str, anchor: str = "start", colour: str = DARK) -> str:
    plain = escape(words.replace("<br>", " "), quote=False)
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{plain}</text>'
