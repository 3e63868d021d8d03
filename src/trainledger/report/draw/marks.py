"""Marks as elements: bars as rectangles, lines and areas as paths thinned to what a screen shows, points as symbols."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import cos, pi, sin
from typing import Any

from trainledger.report.chart import Area, Axis, Bars, Chart, Line, Mark, significant
from trainledger.report.draw.elements import SMALL, element, hover, number, paint, rectangle, text, width_of
from trainledger.report.draw.scale import Scale

_LEAST, _EDGED = 0.5, 2.0  # pixels of a bar, of one that has an edge
_MANY, _FEW = 100, 300  # bars that are all drawn; points that are all drawn
_PER_COLUMN = 3  # points in a column of pixels
_STRIP = 20  # pixels of a strip that says what is at its place
_SEEN = 0.1  # pixels: a layer that is nowhere higher is not drawn
Point = tuple[float, float]
Box = tuple[float, float, float, float]  # left, top, width, height


def words_of(mark: Line | Bars, chart: Chart, at: int) -> str:
    """What the n-th point of a mark says: its words, or its values by the titles of the axes."""
    if mark.said is not None:
        return mark.said[at] if mark.said else ""
    if isinstance(mark, Bars):
        across, along = (chart.x, chart.y) if mark.upright else (chart.y, chart.x)
        pairs = [(across, mark.rows[at]), (along, mark.ends[at] - mark.starts[at])]
    else:
        pairs = [(chart.x, mark.xs[at] or 0.0), (chart.y, mark.ys[at] or 0.0)]
    return "\n".join(filter(None, (mark.name, *(_value_words(axis, value) for axis, value in pairs))))


def _value_words(axis: Axis, value: float) -> str:
    if axis.names:
        return axis.names[round(value)]
    shown = f"{value:,}" if isinstance(value, int) else significant(value)
    return f"{axis.title}: {shown}" if axis.title else shown


def bars(mark: Bars, chart: Chart, x: Scale, y: Scale, thickest: float) -> Iterator[str]:
    """The bars in one group, those that share a pixel as one; and the words at their ends."""
    along, across = (y, x) if mark.upright else (x, y)
    shapes: dict[bool, list[str]] = {}
    words = []
    for at, count in _merged(mark, along):
        box = _box(mark, at, at + count - 1, along, across, thickest)
        said = words_of(mark, chart, at) + (f"\nand {count - 1:,} more that are as narrow" if count > 1 else "")
        shapes.setdefault(bool(mark.edge) and min(box[2:]) >= _EDGED, []).append(rectangle(*box, said))
        if mark.texts and mark.texts[at]:
            words.append(_end_words(mark.texts[at], box, mark.upright, along.end))
    for edged, rectangles in shapes.items():
        style = paint(mark.colour, mark.edge if edged else "", 0.5, opacity=mark.opacity)
        yield element("g", "".join(rectangles), **style)
    yield from words


def _merged(mark: Bars, along: Scale) -> Iterator[tuple[int, int]]:
    """The first of bars that follow each other within a pixel of one row, and how many they are."""
    if len(mark.rows) < _MANY or mark.upright:
        yield from ((at, 1) for at in range(len(mark.rows)))
        return
    pixel = abs((along.high - along.low) / (along.end - along.start))
    at = 0
    while at < len(mark.rows):
        count = 1
        while (
            at + count < len(mark.rows)
            and mark.rows[at + count] == mark.rows[at]
            and mark.starts[at] <= mark.starts[at + count]
            and mark.ends[at + count] - mark.starts[at] < pixel
        ):
            count += 1
        yield at, count
        at += count


def _box(mark: Bars, first: int, last: int, along: Scale, across: Scale, thickest: float) -> Box:
    low, high = sorted((along.clamped(mark.starts[first]), along.clamped(mark.ends[last])))
    if mark.starts[first] != mark.ends[last]:
        high = max(high, low + _LEAST)
    middle = across.clamped(mark.rows[first])
    row = abs(across.end - across.start) / (across.high - across.low)
    thick = max(1.0, min(mark.thick * row, mark.thick * thickest))
    if mark.upright:
        return middle - thick / 2, low, thick, high - low
    return low, middle - thick / 2, high - low, thick


def _end_words(words: str, box: Box, upright: bool, end: float) -> str:
    """Words after the end of a bar, or in it where there is no room after it."""
    x, y, width, height = box
    if upright:
        return text(x + width / 2, y - 4, [words], text_anchor="middle", font_size=SMALL, **paint("#555555"))
    middle, wide = y + height / 2 + 0.35 * SMALL, width_of(words)
    if x + width + wide + 6 > end + 12 and wide + 12 < width:
        return text(x + width - 6, middle, [words], text_anchor="end", font_size=SMALL, **paint("#ffffff"))
    return text(x + width + 5, middle, [words], font_size=SMALL, **paint("#555555"))


def area(mark: Area, x: Scale, y: Scale) -> Iterator[str]:
    """The layers from the uppermost down, so that each hides the ones above it down to the floor."""
    xs = [x.clamped(value) for value in mark.xs]
    flat = isinstance(mark.floor, int | float)
    floor = (
        [y.clamped(mark.floor)] if isinstance(mark.floor, int | float) else [y.clamped(value) for value in mark.floor]
    )
    sums = list(mark.sums())
    pixel = abs((y.end - y.start) / (y.high - y.low)) if not y.log else 1.0
    for at, layer in reversed(list(enumerate(mark.layers.values()))):
        if max(map(abs, layer), default=0) * pixel < _SEEN:
            continue
        top = list(zip(xs, [y.clamped(value) for value in sums[at]], strict=True))
        if flat:
            d = path(top, mark.step, floor[0])
        else:
            d = path([*top, *reversed(list(zip(xs, floor, strict=True)))], closed=True)
        yield element("path", d=d, **paint(mark.colours[at % len(mark.colours)], opacity=mark.opacity))


def line(mark: Line, x: Scale, y: Scale) -> str:
    """The stretches of a line between missing values, and places beyond the plot, as one path."""
    points = zip(x.inside(mark.xs), y.inside(mark.ys), strict=True)
    runs = (run for known, run in groupby(points, lambda point: None not in point) if known)
    style = paint(stroke=mark.colour, width=mark.width, dash=mark.dash)
    d = "".join(path([(a or 0.0, b or 0.0) for a, b in run], mark.step) for run in runs)
    return element("path", d=d, stroke_linejoin="round", **style) if d and mark.width else ""


def path(points: Sequence[Point], step: bool = False, floor: float | None = None, closed: bool = False) -> str:
    """The ``d`` of a line through the points: straight, or in steps; down to ``floor`` for an area.

    Steps are relative, in tenths of a pixel, as most are short.

    >>> path([(0, 5), (10, 5), (20, 8)], step=True), path([(0, 5), (10.5, 7)], floor=9)
    ('M0 5h20v3h0', 'M0 5l10.5 2V9H0z')
    """
    kept = [(int(10 * x + 0.5), int(10 * y + 0.5)) for x, y in (points if closed else thinned(points))]
    x, y = first, _ = kept[0]
    words = [f"M{_TENTHS[x]} {_TENTHS[y]}"]
    for to_x, to_y in kept[1:]:
        if not step:
            words.append(f"l{_TENTHS[to_x - x]} {_TENTHS[to_y - y]}")
        elif to_y != y:
            words.append(f"h{_TENTHS[to_x - x]}v{_TENTHS[to_y - y]}")
        else:
            continue
        x, y = to_x, to_y
    if step:
        words.append(f"h{_TENTHS[kept[-1][0] - x]}")
    ending = "z" if closed else "" if floor is None else f"V{number(floor)}H{_TENTHS[first]}z"
    return "".join(words) + ending


class _Tenths(dict[int, str]):
    """Tenths as decimal numbers, each worked out once."""

    def __missing__(self, tenths: int) -> str:
        shown = self[tenths] = f"{tenths / 10:g}".replace("0.", ".") if abs(tenths) < 10 else f"{tenths / 10:g}"
        return shown


_TENTHS = _Tenths()


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Of many points the first, the lowest, the highest and the last of each column of pixels, in their order.

    >>> thinned([(at / 1000, at % 7) for at in range(1000)])
    [(0.0, 0), (0.006, 6), (0.999, 5)]
    """
    if len(points) <= max(_FEW, _PER_COLUMN * abs(points[-1][0] - points[0][0])):
        return points
    kept: list[Point] = []
    for _, group in groupby(points, lambda point: int(point[0])):
        column = list(group)
        heights = [y for _, y in column]
        ends = {0, heights.index(min(heights)), heights.index(max(heights)), len(column) - 1}
        kept += [column[at] for at in sorted(ends)]
    return kept


def strips(chart: Chart, x: Scale, y: Scale) -> str:
    """Clear strips over areas and lines without symbols: each says what all over the same places are at the highest
    point of the last of them.
    """
    quiet: list[Line | Area] = [
        mark
        for mark in chart.marks
        if (isinstance(mark, Line) and not mark.symbol and mark.width and (mark.said is None or mark.said))
        or (isinstance(mark, Area) and mark.said)
    ]
    top, height, parts = min(y.start, y.end), abs(y.end - y.start), []
    while quiet:
        xs = quiet[0].xs
        own = [mark for mark in quiet if mark.xs == xs]
        quiet = [mark for mark in quiet if mark.xs != xs]
        heights = [y.inside(mark.ys if isinstance(mark, Line) else list(mark.sums())[-1]) for mark in own]
        highest: dict[int, int] = {}
        for at, place in enumerate(x.inside(xs)):
            height_px = heights[-1][at]
            if place is not None and height_px is not None:
                strip = int((place - x.start) / _STRIP)
                if strip not in highest or height_px < (heights[-1][highest[strip]] or 0.0):
                    highest[strip] = at
        for strip, at in sorted(highest.items()):
            left = x.start + strip * _STRIP
            words = (
                mark.said[at] if isinstance(mark, Area) else words_of(mark, chart, at)
                for mark, pixels in zip(own, heights, strict=True)
                if pixels[at] is not None
            )
            if left < x.end:
                parts.append(rectangle(left, top, min(_STRIP, x.end - left), height, "\n".join(words)))
    return element("g", "".join(parts), fill_opacity=0) if parts else ""


# The distances of the corners of a symbol from its point, of a radius of 1, and its turn; others are circles.
_SHAPES = {
    "square": ([1.27] * 4, pi / 4),
    "diamond": ([1.25] * 4, 0.0),
    "triangle": ([1.2] * 3, 0.0),
    "wedge": ([1.2] * 3, pi),
    "star": ([1.25, 0.55] * 5, 0.0),
    "cross": ([1.3, 0.45] * 4, 0.0),
    "x": ([1.3, 0.45] * 4, pi / 4),
}


def symbol(kind: str, x: float, y: float, size: float, said: str = "") -> str:
    """A symbol of ``size`` pixels around a point, without its colours."""
    shape = _SHAPES.get(kind.removesuffix("-open"))
    if shape is None:
        return element("circle", hover(said), cx=float(x), cy=float(y), r=size / 2)
    corners = (
        (2 * pi * at / len(shape[0]) + shape[1] - pi / 2, radius * size / 2) for at, radius in enumerate(shape[0])
    )
    d = "L".join(f"{radius * cos(angle):.3g} {radius * sin(angle):.3g}" for angle, radius in corners)
    return element("path", hover(said), d=f"M{d}z", transform=f"translate({x:.1f} {y:.1f})")


def symbol_style(mark: Line) -> dict[str, Any]:
    """The colours of a line's symbols; a hollow one has a clear inside, which the pointer finds."""
    if mark.symbol.endswith("-open"):
        return paint("#ffffff", mark.colour, 1.5) | {"fill_opacity": 0}
    return paint(mark.colour)


def symbols(mark: Line, chart: Chart, x: Scale, y: Scale) -> Iterator[tuple[Box, str]]:
    """The points of a line as symbols with their boxes; those of many that fall on the same pixel are one."""
    taken = set()
    places = list(zip(x.inside(mark.xs), y.inside(mark.ys), strict=True))
    for at, (a, b) in enumerate(places):
        if a is None or b is None:
            continue
        pixel = (round(a), round(b)) if len(places) > _FEW else (at, -1)
        if pixel not in taken:
            taken.add(pixel)
            box = a - mark.size / 2, b - mark.size / 2, mark.size, mark.size
            yield box, symbol(mark.symbol, a, b, mark.size, words_of(mark, chart, at))


def sign(mark: Mark, colour: str, x: float, middle: float) -> Iterator[str]:
    """A small picture of how a mark is drawn, for the legend."""
    if isinstance(mark, Line):
        if mark.width:
            style = paint(stroke=mark.colour, width=max(1.5, mark.width), dash=mark.dash)
            yield element("line", x1=float(x), x2=float(x + 20), y1=middle, y2=middle, **style)
        if mark.symbol:
            yield element("g", symbol(mark.symbol, x + 10, middle, min(mark.size, 12)), **symbol_style(mark))
    elif isinstance(mark, Area | Bars):
        edge = mark.edge if isinstance(mark, Bars) else ""
        yield rectangle(x + 3, middle - 6, 14, 12, **paint(colour, edge, opacity=mark.opacity))
