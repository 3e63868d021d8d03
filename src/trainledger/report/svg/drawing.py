"""A figure as one drawing: its plots with their axes, what stands in them, and the legend above."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trainledger.document import Figure
from trainledger.frozen import frozen
from trainledger.report.style import DARK, GREY, key_of, untitled
from trainledger.report.svg.axes import Axis, Extent, Tick, axis_of, has_range, kind_of, place, ticks_of
from trainledger.report.svg.bars import Bar, bars_of, draw_bars, is_bar, is_upright
from trainledger.report.svg.boxes import Boxes
from trainledger.report.svg.curves import draw_curves, draw_strips, modes_of, stacked
from trainledger.report.svg.elements import LINE, SIZE, SMALL, element, folded_to, lines_of, text, width_of
from trainledger.report.svg.legend import draw_legend, entries_of
from trainledger.report.svg.markers import draw_markers, draw_words
from trainledger.report.svg.marks import Frame, draw_annotations, draw_shapes, is_row, row_lines
from trainledger.report.svg.paint import is_clear, paint

WIDTH = 960
_EDGE = 6  # pixels around all
_LEGEND = 20  # pixels that `style.arranged` leaves for a line of legend
_TICK = 6  # pixels from an axis to the words of its ticks
_TITLE = 20  # pixels of the title of an upright axis
_MARGINS = {"l": 70, "r": 40, "t": 36, "b": 55}
Trace = dict[str, Any]


def svg(figure: Figure, width: int = WIDTH) -> str:
    """The figure as one SVG element of ``width`` pixels that scales with its page, without scripts, styles or ids.

    Colours have classes (`paint.RULES`), by which a page changes them in the dark; each bar and point has a title that
    says what it is. The figure's own title names the drawing to a screen reader and is not drawn, nor is the key of its
    numbers (`style.key_of`): both are text of the page, as `html.drawing` has them.
    """
    body, height = _drawn(figure, width)
    return _whole(body, figure, width, height, width="100%")


def standalone(figure: Figure, name: str, width: int = WIDTH) -> str:
    """The figure as a file: on white, under its title (or ``name``), and above the key of its numbers."""
    body, height = _drawn(figure, width)
    title = folded_to(lines_of(_title(figure) or name), width - 2 * _EDGE, 16)
    top = 12 + 20 * len(title)
    numbered = [f"{number}. {each}" for number, each in enumerate(key_of(figure["layout"]), 1)]
    key = folded_to(numbered, width - 2 * _EDGE)
    whole = top + height + (LINE * len(key) + _EDGE if key else 0)
    parts = [
        element("rect", width=width, height=whole, fill="#ffffff"),
        text(_EDGE, 22, title, font_size=16, **paint(DARK)),
        element("g", body, transform=f"translate(0 {top})"),
    ]
    if key:
        parts.append(text(_EDGE, top + height + SMALL, key, font_size=SMALL, **paint(GREY)))
    return _whole("".join(parts), figure, width, whole, width=width, height=whole)


def _whole(body: str, figure: Figure, across: float, down: float, **size: object) -> str:
    return element(
        "svg", body, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {across:g} {down:g}", **size, role="img",
        aria_label=_name(figure), font_family="system-ui, sans-serif", font_size=SIZE,
    )  # fmt: skip


def _title(figure: Figure) -> str:
    return str(figure["layout"].get("title", {}).get("text", ""))


def _name(figure: Figure) -> str:
    """What the drawing is: its title, or what its axes are."""
    axes = [
        " ".join(lines_of(figure["layout"].get(axis, {}).get("title", {}).get("text", "")))
        for axis in ("yaxis", "xaxis")
    ]
    return " ".join(lines_of(_title(figure))) or " by ".join(each for each in axes if each) or "figure"


@frozen
class Plot:
    """The traces between one pair of axes, and the bars that they are drawn as."""

    x: str
    y: str
    traces: tuple[tuple[int, Trace], ...]
    bars: tuple[Bar, ...]

    @property
    def stands(self) -> bool:
        """Whether its bars stand."""
        return is_upright(next(trace for _, trace in self.traces if is_bar(trace)))

    @property
    def points(self) -> list[tuple[int, Trace]]:
        """Its lines and points."""
        return [(at, each) for at, each in self.traces if not is_bar(each)]


def _drawn(figure: Figure, width: int) -> tuple[str, float]:
    """The elements of a drawing, and its height."""
    layout = untitled(figure["layout"]) if "title" in figure["layout"] else figure["layout"]
    margin = _MARGINS | layout.get("margin", {})
    kinds = {name: _kind(figure, name) for name in _axis_names(figure)}
    plots = _plots(figure, kinds)
    axes = {
        name: axis_of(_axis(layout, name), *kinds[name], _extents(plots, layout, name, kinds[name])) for name in kinds
    }

    entries, legend = entries_of(figure["data"], layout, _EDGE + 4, width - 2 * _EDGE)
    top = legend + max(8, margin["t"] - _LEGEND)
    rows = [each for each in layout.get("annotations", ()) if is_row(each)]
    more = LINE * max((len(row_lines(each, width - 24)) - 1 for each in rows), default=0)
    high = layout.get("height", 360) - margin["t"] - margin["b"] + more * len(rows)
    top += more / 2
    for name in axes:
        if name[0] == "y":
            first, last = _axis(layout, name).get("domain", (0, 1))
            axes[name] = axes[name].between(top + high * (1 - first), top + high * (1 - last))
    ticks = {name: _ticks(each, layout, name) for name, each in axes.items() if name[0] == "y"}
    left = _EDGE + max((_room(_axis(layout, name), ticks[name]) for name in ticks), default=0)
    right = width - (min(margin["r"], 40) if width > 600 else 16)
    for name in axes:
        if name[0] == "x":
            first, last = _axis(layout, name).get("domain", (0, 1))
            axes[name] = axes[name].between(left + first * (right - left), left + last * (right - left))
            ticks[name] = _ticks(axes[name], layout, name)
    frame = Frame(axes, left, top, right - left, high)
    boxes = Boxes(width)
    parts = [*draw_legend(entries, 2), *draw_shapes(layout.get("shapes", ()), frame, below=True)]
    bottom = top + high
    for plot in plots:
        parts += _grids(plot, axes, ticks, layout)
        parts += _traces(plot, axes, layout, high, more)
    drawn = [part for plot in plots for part in _points(plot, axes, layout, boxes)]
    parts += draw_shapes(layout.get("shapes", ()), frame, below=False)
    parts += drawn
    parts += draw_annotations(layout.get("annotations", ()), frame, boxes)
    for plot in plots:
        parts += draw_words(plot.points, axes[plot.x], axes[plot.y], boxes)
        if "unified" in str(layout.get("hovermode")) or not plot.bars:
            parts.append(draw_strips(plot.points, axes[plot.x], axes[plot.y], _titles(plot, layout)))
        words, reached = _words(plot, axes, ticks, layout, left)
        parts += words
        bottom = max(bottom, reached)
    return "".join(parts), round(bottom + _EDGE)


def _axis_names(figure: Figure) -> list[str]:
    pairs = [(trace.get("xaxis", "x"), trace.get("yaxis", "y")) for trace in figure["data"]] or [("x", "y")]
    return list(dict.fromkeys(name for pair in pairs for name in pair))


def _axis(layout: dict[str, Any], name: str) -> dict[str, Any]:
    """What a layout says of the axis x2: its ``xaxis2``."""
    found: dict[str, Any] = layout.get(f"{name[0]}axis{name[1:]}", {})
    return found


def _kind(figure: Figure, name: str) -> tuple[str, list[str]]:
    """linear, log or category, and the names of a category axis in their order."""
    layout = _axis(figure["layout"], name)
    own = [trace for trace in figure["data"] if trace.get(f"{name[0]}axis", name[0]) == name]
    values = [each for trace in own for each in (trace.get(name[0]) or ())]
    kind = kind_of(layout, values)
    if kind != "category":
        return kind, []
    return kind, list(dict.fromkeys(str(each) for each in (*layout.get("categoryarray", ()), *values)))


def _plots(figure: Figure, kinds: dict[str, tuple[str, list[str]]]) -> list[Plot]:
    pairs: dict[tuple[str, str], list[tuple[int, Trace]]] = {}
    for at, trace in enumerate(figure["data"]):
        pairs.setdefault((trace.get("xaxis", "x"), trace.get("yaxis", "y")), []).append((at, trace))
    found = []
    for (x, y), traces in (pairs or {("x", "y"): []}).items():
        bars = [(at, each) for at, each in traces if is_bar(each)]
        plot = Plot(x, y, tuple(traces), ())
        rows = kinds[(x if plot.stands else y)] if bars else kinds[y]
        made = bars_of(bars, figure["layout"], rows, _titles(plot, figure["layout"]))
        found.append(Plot(x, y, tuple(traces), tuple(made)))
    return found


def _titles(plot: Plot, layout: dict[str, Any]) -> tuple[str, str]:
    """The titles of the axes in a line each."""
    x, y = (" ".join(lines_of(_axis(layout, name).get("title", {}).get("text", ""))) for name in (plot.x, plot.y))
    return x, y


def _extents(plots: Sequence[Plot], layout: dict[str, Any], name: str, kind: tuple[str, list[str]]) -> list[Extent]:
    """What an axis must show, unless its layout says its range."""
    found: list[Extent] = []
    if has_range(_axis(layout, name)):
        return found
    for plot in plots:
        if name not in (plot.x, plot.y):
            continue
        if plot.bars:
            if plot.stands == (name == plot.x):
                sides = [each.middle + side * each.thick / 2 for each in plot.bars for side in (-1, 1)]
                found.append(Extent(min(sides), max(sides), below=False, above=False))
            else:
                ends = [place(end, *kind) for each in plot.bars for end in (each.start, each.end)]
                known = [each for each in ends if each is not None]
                if known:
                    low, high = min(known), max(known)
                    found.append(Extent(low, high, below=low < 0 or kind[0] == "log", above=high > 0))
        sums = stacked(plot.points)
        for at, trace in plot.points:
            values = sums[at] if at in sums and name == plot.y else trace.get(name[0]) or ()
            known = [each for each in (place(value, *kind) for value in values) if each is not None]
            if at in sums and name == plot.y:
                known.append(0.0)
            if known:
                room = name == plot.y or "markers" in modes_of(trace)
                found.append(Extent(min(known), max(known), room, room))
    if kind[0] == "category":
        found.append(Extent(-0.5, len(kind[1]) - 0.5, below=False, above=False))
    return found


def _ticks(axis: Axis, layout: dict[str, Any], name: str) -> list[Tick]:
    return ticks_of(axis, _axis(layout, name), is_x=name[0] == "x")


def _room(axis: dict[str, Any], ticks: Sequence[Tick]) -> float:
    """The pixels that the words at an upright axis take."""
    words = 0.0
    if axis.get("showticklabels") is not False:
        words = max((width_of(line) for each in ticks for line in each.lines), default=0) + _TICK
    return words + (_TITLE if axis.get("title", {}).get("text") else 4)


def _grids(plot: Plot, axes: dict[str, Axis], ticks: dict[str, list[Tick]], layout: dict[str, Any]) -> Iterator[str]:
    """The lines at the ticks, and that at zero."""
    for name, other in ((plot.x, plot.y), (plot.y, plot.x)):
        said, axis, across = _axis(layout, name), axes[name], axes[other]
        low, high = sorted((across.start, across.end))

        def line(at: float, low: float = low, high: float = high, is_x: bool = name[0] == "x") -> str:
            ends = (at, at, low, high) if is_x else (low, high, at, at)
            return element("line", **dict(zip(("x1", "x2", "y1", "y2"), map(float, ends), strict=True)))

        colour = str(said.get("gridcolor", "#e4e4e4"))
        if (
            said.get("showgrid") is not False
            and not is_clear(colour)
            and (axis.kind != "category" or "gridcolor" in said)
        ):
            yield element("g", "".join(line(each.at) for each in ticks[name]), **paint(stroke=colour))
        zero = axis.at(0.0) if axis.kind == "linear" else None
        if said.get("zeroline") is not False and zero is not None and axis.clamped(zero) == zero:
            yield element("g", line(zero), **paint(stroke="#999"))


def _traces(plot: Plot, axes: dict[str, Axis], layout: dict[str, Any], high: float, more: float) -> Iterator[str]:
    """The bars, then lines and areas."""
    x, y = axes[plot.x], axes[plot.y]
    if plot.bars:
        across, along = (x, y) if plot.stands else (y, x)
        row = abs(across.end - across.start) / abs(across.high - across.low)
        thickest = max((each.thick for each in plot.bars), default=1) * (row - more)
        yield draw_bars(plot.bars, {at: each for at, each in plot.traces if is_bar(each)}, across, along, thickest)
    yield draw_curves(plot.points, x, y)


def _points(plot: Plot, axes: dict[str, Axis], layout: dict[str, Any], boxes: Boxes) -> Iterator[str]:
    yield from draw_markers(plot.points, axes[plot.x], axes[plot.y], _titles(plot, layout), boxes)


def _words(
    plot: Plot, axes: dict[str, Axis], ticks: dict[str, list[Tick]], layout: dict[str, Any], left: float
) -> tuple[list[str], float]:
    """The words at the ticks and the titles of the axes; and how far down they reach."""
    x, y = axes[plot.x], axes[plot.y]
    bottom = max(y.start, y.end)
    parts: list[str] = []
    said = _axis(layout, plot.y)
    if said.get("showticklabels") is not False:
        words = []
        for each in ticks[plot.y]:
            first = each.at + 0.35 * SMALL - LINE * (len(each.lines) - 1) / 2
            words.append(text(left - _TICK, first, each.lines))
        parts.append(element("g", "".join(words), text_anchor="end", font_size=SMALL, **paint(GREY)))
    title = said.get("title", {}).get("text")
    if title:
        middle, at = (y.start + y.end) / 2, _EDGE + SIZE - 2.0
        turned = f"rotate(-90 {at:.1f} {middle:.1f})"
        lines = [" ".join(lines_of(title))]
        parts.append(text(at, middle, lines, text_anchor="middle", transform=turned, **paint(DARK)))
    said = _axis(layout, plot.x)
    reached = bottom
    if said.get("showticklabels") is not False:
        words = [text(each.at, bottom + _TICK + SMALL, each.lines) for each in ticks[plot.x]]
        parts.append(element("g", "".join(words), text_anchor="middle", font_size=SMALL, **paint(GREY)))
        reached += _TICK + SMALL + 2 + LINE * (max((len(each.lines) for each in ticks[plot.x]), default=1) - 1)
    title = said.get("title", {}).get("text")
    if title:
        lines = folded_to(lines_of(title), x.end - _EDGE, SIZE)
        parts.append(text((x.start + x.end) / 2, reached + 20, lines, text_anchor="middle", **paint(DARK)))
        reached += 24 + LINE * (len(lines) - 1)
    return parts, reached
