"""Lines and areas as paths, thinned to what a screen can show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from operator import add
from typing import Any

from trainledger.report.style import COLOURS
from trainledger.report.svg.axes import Axis
from trainledger.report.svg.elements import element, hover, number
from trainledger.report.svg.hovers import hover_of
from trainledger.report.svg.paint import paint

_FEW, _PER_COLUMN = 300, 3  # points that are all drawn, in all and in a column of pixels
_STRIP = 20  # pixels of a strip that says what is at its place
_SEEN = 0.1  # pixels: an area that is nowhere higher is not drawn
Trace = dict[str, Any]
Point = tuple[float, float]
Pixels = tuple[list[float | None], bool]  # and whether all are within the plot


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
            own = _known(trace["y"])
            sums[group] = [*map(add, sums[group], own)] if group in sums else own
            found[at] = sums[group]
    return found


def _known(values: list[Any]) -> list[float]:
    """Heights with zero where one is missing."""
    return [each or 0.0 for each in values] if None in values else values


def draw_curves(traces: Sequence[tuple[int, Trace]], x: Axis, y: Axis) -> str:
    """Areas, those of a stack from the uppermost down so that each hides what is above it, then the lines."""
    places: dict[int, Pixels] = {}  # traces of one stack share them
    for _, trace in traces:
        if id(trace["x"]) not in places:
            places[id(trace["x"])] = _pixels(x, trace["x"])
    sums = stacked(traces)
    parts = []
    for at, trace in reversed(traces):
        if at in sums and max(_known(trace["y"])) * _scale(y) >= _SEEN:
            heights, inside = _pixels(y, sums[at])
            if not inside:  # an area that is higher than its plot fills it
                heights = [each if each is None else y.clamped(each) for each in heights]
            runs = _runs(places[id(trace["x"])], (heights, True), x, y)
            d = "".join(path(run, trace.get("line", {}).get("shape", "linear"), _floor(y)) for run in runs)
            parts.append(element("path", d=d, **paint(trace.get("fillcolor") or colour_of(at, trace))))
    for at, trace in traces:
        if at not in sums:
            parts += _line(at, trace, list(_runs(places[id(trace["x"])], _pixels(y, trace["y"]), x, y)), y)
    return "".join(parts)


def _line(at: int, trace: Trace, runs: list[list[Point]], y: Axis) -> Iterator[str]:
    """The stretches of a trace as a line, and what it encloses."""
    line, colour = trace.get("line", {}), colour_of(at, trace)
    if not runs:
        return
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


def _pixels(axis: Axis, values: Sequence[Any]) -> Pixels:
    """The pixels of values, and whether all are between the ends of the axis."""
    pixels = axis.pixels(values)
    known: list[Any] = [each for each in pixels if each is not None] if None in pixels else pixels
    low, high = sorted((axis.start, axis.end))
    return pixels, not known or (low - 1 < min(known) and max(known) < high + 1)


def _runs(xs: Pixels, ys: Pixels, x: Axis, y: Axis) -> Iterator[list[Point]]:
    """The stretches of points without a missing one between them, within the plot."""
    for run in _unbroken(xs[0], ys[0]):
        yield from [run] if xs[1] and ys[1] else _within(run, x, y)


def _unbroken(xs: Sequence[float | None], ys: Sequence[float | None]) -> Iterator[list[Point]]:
    points: list[Any] = list(zip(xs, ys, strict=True))
    if None in xs or None in ys:
        for is_known, group in groupby(points, lambda each: None not in each):
            if is_known:
                yield list(group)
    elif points:
        yield points


def _within(run: list[Point], x: Axis, y: Axis) -> Iterator[list[Point]]:
    """A stretch, cut at the edges of the plot."""
    edges = (*sorted((x.start, x.end)), *sorted((y.start, y.end)))
    found: list[Point] = []
    for start, end in pairwise(run):
        cut = _cut(start, end, edges)
        if cut is None or (found and found[-1] != cut[0]):
            if found:
                yield found
            found = []
        if cut is not None:
            found += cut if not found else cut[1:]
    if found:
        yield found


def _cut(start: Point, end: Point, edges: tuple[float, ...]) -> list[Point] | None:
    """The part of a line between two points that is within left, right, top and bottom (Liang and Barsky 1984)."""
    left, right, top, bottom = edges
    across, down = end[0] - start[0], end[1] - start[1]
    first, last = 0.0, 1.0
    for step, room in (
        (-across, start[0] - left), (across, right - start[0]), (-down, start[1] - top), (down, bottom - start[1]),
    ):  # fmt: skip
        if step == 0 and room < 0:
            return None
        if step < 0:
            first = max(first, room / step)
        elif step > 0:
            last = min(last, room / step)
    if first > last:
        return None
    ends = [(start[0] + share * across, start[1] + share * down) for share in (first, last)]
    return [start if first == 0 else ends[0], end if last == 1 else ends[1]]


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Of many points the first, the lowest, the highest and the last of each column of pixels, in their order.

    >>> thinned([(at / 1000, at % 7) for at in range(1000)])
    [(0.0, 0), (0.006, 6), (0.999, 5)]
    """
    if len(points) <= max(_FEW, _PER_COLUMN * abs(points[-1][0] - points[0][0])):
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
    ('M0 5h20v3h0', 'M0 5l10.5 2V9H0z')
    """
    kept = thinned(points)
    x, y = first, _ = int(10 * kept[0][0] + 0.5), int(10 * kept[0][1] + 0.5)
    words = [f"M{_TENTHS[x]} {_TENTHS[y]}"]
    if shape == "hv":
        for point in kept:
            to_y = int(10 * point[1] + 0.5)
            if to_y != y:
                to_x = int(10 * point[0] + 0.5)
                words.append(f"h{_TENTHS[to_x - x]}v{_TENTHS[to_y - y]}")
                x, y = to_x, to_y
        words.append(f"h{_TENTHS[int(10 * kept[-1][0] + 0.5) - x]}")
    else:
        for point in kept[1:]:
            to_x, to_y = int(10 * point[0] + 0.5), int(10 * point[1] + 0.5)
            words.append(f"l{_TENTHS[to_x - x]} {_TENTHS[to_y - y]}")
            x, y = to_x, to_y
    if floor is not None:
        words.append(f"V{number(floor)}H{_TENTHS[first]}z")
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
