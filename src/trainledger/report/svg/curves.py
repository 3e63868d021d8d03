"""Lines and areas as paths, thinned to what a screen can show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from trainledger.report.style import COLOURS
from trainledger.report.svg.axes import Axis
from trainledger.report.svg.elements import element, hover, number
from trainledger.report.svg.hovers import hover_of
from trainledger.report.svg.paint import paint

_FEW = 300  # points that are all drawn
_STRIP = 12  # pixels of a strip that says what is at its place
_SEEN = 0.1  # pixels: an area that is nowhere higher is not drawn
Trace = dict[str, Any]
Point = tuple[float, float]


def modes_of(trace: Trace) -> set[str]:
    """lines, markers, text: what is drawn of a scatter trace."""
    default = "lines+markers" if len(trace.get("x") or ()) < 20 else "lines"
    return set(str(trace.get("mode", default)).split("+"))


def colour_of(number: int, trace: Trace) -> str:
    """The colour of a trace's line, or of its points."""
    marker = trace.get("marker", {}).get("color")
    found = trace.get("line", {}).get("color") or (marker if isinstance(marker, str) else None)
    return str(found or COLOURS[number % len(COLOURS)])


def stacked(traces: Sequence[tuple[int, Trace]]) -> dict[int, list[float]]:
    """The heights of each trace of a stack above those before it, by the number of the trace."""
    sums: dict[str, list[float]] = {}
    found = {}
    for at, trace in traces:
        group = trace.get("stackgroup")
        if group:
            below = sums.get(group)
            own = [each or 0.0 for each in trace["y"]]
            sums[group] = own if below is None else [a + b for a, b in zip(below, own, strict=True)]
            found[at] = sums[group]
    return found


def draw_curves(traces: Sequence[tuple[int, Trace]], x: Axis, y: Axis) -> str:
    """Areas, those of a stack from the uppermost down so that each hides what is above it, then the lines."""
    places: dict[int, list[float | None]] = {}  # traces of one stack share them
    for _, trace in traces:
        if id(trace["x"]) not in places:
            places[id(trace["x"])] = x.pixels(trace["x"])
    sums = stacked(traces)
    parts = []
    for at, trace in reversed(traces):
        if at in sums:
            runs = _runs(places[id(trace["x"])], y.pixels(sums[at]), x, y)
            if max(abs(each or 0.0) for each in trace["y"]) * _scale(y) >= _SEEN:
                shape = trace.get("line", {}).get("shape", "linear")
                d = "".join(path(run, shape, _floor(y)) for run in runs)
                parts.append(element("path", d=d, **paint(trace.get("fillcolor") or colour_of(at, trace))))
    for at, trace in traces:
        if at not in sums:
            parts += _line(at, trace, list(_runs(places[id(trace["x"])], y.pixels(trace["y"]), x, y)), y)
    return "".join(parts)


def _line(at: int, trace: Trace, runs: list[list[Point]], y: Axis) -> Iterator[str]:
    """The stretches of a trace as a line, and what it encloses."""
    line, colour = trace.get("line", {}), colour_of(at, trace)
    if trace.get("fill") not in (None, "none"):
        floor = None if trace["fill"] == "toself" else _floor(y)
        area = "".join(path(run, "linear", floor) + "z" * (floor is None) for run in runs)
        yield element(
            "path", d=area, **paint(trace.get("fillcolor") or colour, opacity=1 if "fillcolor" in trace else 0.3)
        )
    width = line.get("width", 2)
    if "lines" in modes_of(trace) and width:
        drawn = "".join(path(run, line.get("shape", "linear")) for run in runs)
        style = paint(stroke=colour, width=width, dash=line.get("dash", ""), opacity=trace.get("opacity", 1))
        yield element("path", d=drawn, stroke_linejoin="round", **style)


def _scale(y: Axis) -> float:
    """Pixels of a unit of a linear axis."""
    return abs((y.end - y.start) / (y.high - y.low)) if y.kind == "linear" else 1.0


def _floor(y: Axis) -> float:
    """Where areas begin: at zero, or at the end of the axis that is nearest to it."""
    zero = y.at(0.0)
    return y.start if zero is None else y.clamped(zero)


def _runs(xs: Iterable[float | None], ys: Iterable[float | None], x: Axis, y: Axis) -> Iterator[list[Point]]:
    """The stretches of points without a missing one between them, within the plot."""
    run: list[Point] = []
    for a, b in zip(xs, ys, strict=True):
        if a is None or b is None:
            if run:
                yield run
            run = []
        else:
            run.append((x.clamped(a), y.clamped(b)))
    if run:
        yield run


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Of many points the first, the lowest, the highest and the last of each column of pixels, in their order.

    >>> thinned([(at / 1000, at % 7) for at in range(1000)])
    [(0.0, 0), (0.006, 6), (0.999, 5)]
    """
    if len(points) <= _FEW:
        return points
    found: list[Point] = []
    column: list[Point] = []
    at = int(points[0][0])
    for point in points:
        if int(point[0]) != at:
            found += _ends(column)
            column, at = [], int(point[0])
        column.append(point)
    return found + _ends(column)


def _ends(column: list[Point]) -> list[Point]:
    if len(column) < 4:
        return column
    heights = [each[1] for each in column]
    kept = {0, heights.index(min(heights)), heights.index(max(heights)), len(column) - 1}
    return [column[at] for at in sorted(kept)]


def path(points: Sequence[Point], shape: str = "linear", floor: float | None = None) -> str:
    """The ``d`` of a line through the points: straight, or in steps (``hv``); closed down to ``floor`` for an area.

    Steps are relative, in tenths of a pixel, as most are short.

    >>> path([(0, 5), (10, 5), (20, 8)], "hv"), path([(0, 5), (10.5, 7)], floor=9)
    ('M0 5h20v3', 'M0 5l10.5 2V9H0z')
    """
    kept = [(int(10 * x + 0.5), int(10 * y + 0.5)) for x, y in thinned(points)]
    x, y = kept[0]
    words = [f"M{_TENTHS[x]} {_TENTHS[y]}"]
    if shape == "hv":
        for to_x, to_y in kept[1:]:
            if to_y != y:
                words.append(f"h{_TENTHS[to_x - x]}v{_TENTHS[to_y - y]}")
                x, y = to_x, to_y
        if kept[-1][0] != x:
            words.append(f"h{_TENTHS[kept[-1][0] - x]}")
    else:
        for to_x, to_y in kept[1:]:
            words.append(f"l{_TENTHS[to_x - x]} {_TENTHS[to_y - y]}")
            x, y = to_x, to_y
    if floor is not None:
        words.append(f"V{number(floor)}H{_TENTHS[kept[0][0]]}z")
    return "".join(words)


class _Tenths(dict[int, str]):
    """Tenths as decimal numbers, each worked out once."""

    def __missing__(self, tenths: int) -> str:
        shown = self[tenths] = f"{tenths / 10:g}".replace("0.", ".") if abs(tenths) < 10 else f"{tenths / 10:g}"
        return shown


_TENTHS = _Tenths()


def draw_strips(traces: Sequence[tuple[int, Trace]], x: Axis, y: Axis, titles: tuple[str, str]) -> str:
    """Clear strips over lines without markers, each of which says what all are at the highest point of the last."""
    quiet = [each for _, each in traces if "markers" not in modes_of(each) and each.get("hoverinfo") != "skip"]
    top, height = float(min(y.start, y.end)), float(abs(y.end - y.start))
    parts = []
    while quiet:
        xs = quiet[0]["x"]
        own, quiet = [each for each in quiet if each["x"] == xs], [each for each in quiet if each["x"] != xs]
        saying = [hover_of(each, titles) for each in own]
        heights, highest = own[-1]["y"], dict[int, int]()
        for index, place in enumerate(x.pixels(xs)):
            if place is None or heights[index] is None:
                continue
            strip = int((place - x.start) / _STRIP)
            if strip not in highest or heights[index] > heights[highest[strip]]:
                highest[strip] = index
        for strip, index in sorted(highest.items()):
            left = x.start + strip * _STRIP
            said = "\n".join(say(index) for say, each in zip(saying, own, strict=True) if each["y"][index])
            if left < x.end:
                wide = float(min(_STRIP, x.end - left))
                parts.append(element("rect", hover(said), x=left, y=top, width=wide, height=height))
    return element("g", "".join(parts), fill_opacity=0) if parts else ""
