"""Bars of every kind (grouped, stacked, overlaid, waterfalls, histograms) as rectangles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import ceil, floor, log10
from typing import Any, NamedTuple

from trainledger.report.style import COLOURS
from trainledger.report.svg.axes import Axis, place
from trainledger.report.svg.elements import SMALL, element, hover, lines_of, text, width_of
from trainledger.report.svg.hovers import hover_of
from trainledger.report.svg.numerals import significant
from trainledger.report.svg.paint import paint

_GAP = 0.2  # of a row, between bars, where the layout says nothing
_LEAST, _OUTLINED = 0.5, 2.0  # pixels of a bar, of one that has an outline
Trace = dict[str, Any]


class Bar(NamedTuple):
    """A bar from ``start`` to ``end`` along the axis of values, around ``middle`` and so ``thick`` along the other.

    ``joined`` is the end of the bar before it that a thin line joins it with.
    """

    trace: int
    middle: float
    thick: float
    start: float
    end: float
    colour: str
    said: str
    opacity: float = 1.0
    label: str = ""
    joined: bool = False


def is_bar(trace: Trace) -> bool:
    """Whether a trace is drawn as bars."""
    return trace.get("type") in ("bar", "waterfall", "histogram")


def is_upright(trace: Trace) -> bool:
    """Whether its bars are vertical."""
    return str(trace.get("orientation", "v")) == "v"


def bars_of(
    traces: Sequence[tuple[int, Trace]], layout: dict[str, Any], rows: tuple[str, Sequence[str]],
    titles: tuple[str, str],
) -> list[Bar]:  # fmt: skip
    """All bars of the traces of one plot; ``rows`` are kind and names of the axis of their bases."""
    mode = layout.get("barmode", "group")
    beside = [number for number, trace in traces if mode == "group" and trace["type"] == "bar"]
    ends: dict[tuple[float, bool], float] = {}
    found: list[Bar] = []
    for number, trace in traces:
        if trace["type"] == "histogram":
            found += _histogram(number, trace, layout)
        elif trace["type"] == "waterfall":
            found += _waterfall(number, trace, layout, rows, titles)
        else:
            lane = (beside.index(number), len(beside)) if number in beside else (0, 1)
            found += _bars(number, trace, layout, rows, titles, lane, ends if mode in ("stack", "relative") else None)
    return found


def _bars(
    number: int, trace: Trace, layout: dict[str, Any], rows: tuple[str, Sequence[str]], titles: tuple[str, str],
    lane: tuple[int, int], ends: dict[tuple[float, bool], float] | None,
) -> Iterator[Bar]:  # fmt: skip
    upright = is_upright(trace)
    names, values = (trace["x"], trace["y"]) if upright else (trace["y"], trace["x"])
    middles = [place(each, *rows) for each in names]
    known = sorted({each for each in middles if each is not None})
    row = min((after - before for before, after in pairwise(known)), default=1.0)
    wide = row * (1 - layout.get("bargap", _GAP)) / lane[1]
    aside = wide * (lane[0] - (lane[1] - 1) / 2)
    marker = trace.get("marker", {})
    colours = _each(marker.get("color", COLOURS[number % len(COLOURS)]))
    opacities, bases = _each(marker.get("opacity", 1.0)), _each(trace.get("base", 0.0))
    widths = _each(trace.get("width"))
    labels = _each("" if trace.get("textposition") == "none" else trace.get("text") or "")
    said = hover_of(trace, titles)
    for at, (middle, value) in enumerate(zip(middles, values, strict=True)):
        if middle is None or value is None:
            continue
        start = bases(at) or 0.0
        if ends is not None:
            start = ends.get((middle, value < 0), 0.0)
            ends[middle, value < 0] = start + value
        yield Bar(
            number, middle + aside, widths(at) or wide, start, start + value, colours(at), said(at),
            opacities(at) * trace.get("opacity", 1.0), str(labels(at) or ""),
        )  # fmt: skip


def _waterfall(
    number: int, trace: Trace, layout: dict[str, Any], rows: tuple[str, Sequence[str]], titles: tuple[str, str]
) -> Iterator[Bar]:
    """Each bar begins where the one before ended; a total goes from zero to where it ended."""
    upright = is_upright(trace)
    names, values = (trace["x"], trace["y"]) if upright else (trace["y"], trace["x"])
    labels, said = trace.get("text") or [""] * len(values), hover_of(trace, titles)
    wide, end = 1 - layout.get("waterfallgap", _GAP), 0.0
    for at, (name, value, measure) in enumerate(zip(names, values, trace["measure"], strict=True)):
        start = end if measure == "relative" else 0.0
        end = end if measure == "total" else start + value
        kind = "totals" if measure == "total" else "increasing" if value >= 0 else "decreasing"
        middle = place(name, *rows)
        if middle is not None:
            yield Bar(
                number, middle, wide, start, end, trace[kind]["marker"]["color"],
                said(at), label=str(labels[at]), joined=at > 0,
            )  # fmt: skip


def _histogram(number: int, trace: Trace, layout: dict[str, Any]) -> Iterator[Bar]:
    """Values counted in bins of one round width, at most ``nbinsx`` of them."""
    upright = "x" in trace
    values = [each for each in trace["x" if upright else "y"] if each is not None]
    if not values:
        return
    first, wide, counts = binned(values, trace.get("nbinsx" if upright else "nbinsy") or 30)
    colour = trace.get("marker", {}).get("color", COLOURS[number % len(COLOURS)])
    for at, count in enumerate(counts):
        if count:
            low = first + at * wide
            words = f"{significant(low, 6)} to {significant(low + wide, 6)}: {count:,}"
            thick = wide * (1 - layout.get("bargap", 0.0))
            yield Bar(number, low + wide / 2, thick, 0.0, count, colour, words)


def binned(values: Sequence[float], most: int) -> tuple[float, float, list[int]]:
    """The start of the first bin, the width of all, and how many values each holds.

    >>> binned([0.5, 1.5, 1.6, 3.2], 4)
    (0.0, 1.0, [1, 2, 0, 1])
    """
    low, high = min(values), max(values)
    rough = (high - low) / most or abs(low) / 10 or 1.0
    power = 10.0 ** floor(log10(rough))
    wide = next(each * power for each in (1, 2, 5, 10) if each * power >= 0.999 * rough)
    first = floor(low / wide) * wide
    counts = [0] * max(1, ceil((high - first) / wide + 1e-9))
    for each in values:
        counts[min(int((each - first) / wide), len(counts) - 1)] += 1
    return first, wide, counts


def _each(value: Any) -> Callable[[int], Any]:
    """The value of each point, of a list or of one for all."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return value.__getitem__
    return lambda at: value


def draw_bars(bars: Sequence[Bar], traces: dict[int, Trace], across: Axis, along: Axis, thickest: float) -> str:
    """The bars as elements: ``across`` is the axis of their bases, ``along`` that of their lengths."""
    parts, labels = [], []
    before: dict[int, Bar] = {}
    low, high = sorted((along.low, along.high))
    for number, trace in traces.items():
        own = [each for each in bars if each.trace == number]
        outline = trace.get("marker", {}).get("line", {})
        hatch = trace.get("marker", {}).get("pattern")
        upright = is_upright(trace)
        shapes: dict[tuple[str, float, bool], list[str]] = {}
        for bar, count in _merged(own, along):
            start, end = sorted((_placed(bar.start, along), _placed(bar.end, along)))
            if start > high or end < low:
                continue
            box = _box(bar, across, along, upright, thickest)
            said = bar.said + (f"\nand {count - 1:,} more that are as narrow" if count > 1 else "")
            shape = _rectangle(box, said)
            if hatch:
                shape += _hatched(box, hatch)
            broad = min(box[2:]) >= _OUTLINED
            shapes.setdefault((bar.colour, bar.opacity, broad), []).append(shape)
            if bar.joined and number in before:
                parts.append(_connector(before[number], bar, across, along, upright, thickest))
            before[number] = bar
            if bar.label:
                labels.append(_label(bar, box, upright, along))
        for (colour, opacity, broad), drawn in shapes.items():
            edge = outline.get("color") if broad else None
            style = paint(colour, edge, outline.get("width", 0), opacity=opacity)
            parts.append(element("g", "".join(drawn), **style))
    return "".join([*parts, *labels])


def _merged(bars: Sequence[Bar], along: Axis) -> Iterator[tuple[Bar, int]]:
    """Bars with those that follow in the same pixel as one, and how many they are."""
    if len(bars) < 100:
        yield from ((each, 1) for each in bars)
        return
    pixels = abs(along.end - along.start) / abs(along.high - along.low)
    held: dict[float, tuple[Bar, int]] = {}
    for bar in bars:
        first, count = held.get(bar.middle, (bar, 0))
        alike = (first.colour, first.opacity, first.label) == (bar.colour, bar.opacity, bar.label)
        if count and not (alike and first.start <= bar.start and (bar.end - first.start) * pixels < 1):
            yield first, count
            first, count = bar, 0
        joined = Bar(
            first.trace, first.middle, first.thick, first.start, max(first.end, bar.end), first.colour, first.said,
            first.opacity,
        )  # fmt: skip
        held[bar.middle] = joined if count else bar, count + 1
    yield from held.values()


Box = tuple[float, float, float, float]


def _box(bar: Bar, across: Axis, along: Axis, upright: bool, thickest: float) -> Box:
    """x, y, width and height of a bar in pixels."""
    from_, to = sorted(along.clamped(along.pixel(_placed(each, along))) for each in (bar.start, bar.end))
    if bar.start != bar.end and to - from_ < _LEAST:
        to = from_ + _LEAST
    low, high = sorted(across.pixel(bar.middle + side * bar.thick / 2) for side in (-1, 1))
    if high - low < 1:
        low, high = (low + high - 1) / 2, (low + high + 1) / 2
    elif high - low > thickest:
        low, high = (low + high - thickest) / 2, (low + high + thickest) / 2
    return (low, from_, high - low, to - from_) if upright else (from_, low, to - from_, high - low)


def _placed(value: float, along: Axis) -> float:
    found = along.place(value)
    return min(along.low, along.high) if found is None else found


def _rectangle(box: Box, said: str) -> str:
    x, y, width, height = map(float, box)
    return element("rect", hover(said), x=x, y=y, width=width, height=height)


def _hatched(box: Box, hatch: dict[str, Any]) -> str:
    """Slanted lines over a box."""
    x, y, width, height = box
    step = float(hatch.get("size", 8))
    words = []
    for at in range(1, int((width + height) / step) + 1):
        reach = at * step
        left, down = max(0.0, reach - height), min(reach, height)
        length = min(reach, width) - left
        words.append(f"M{x + left:.1f} {y + down:.1f}l{length:.1f} {-length:.1f}")
    style = paint(stroke=hatch.get("fgcolor", "#aaaaaa"), width=1)
    return element("path", d="".join(words), pointer_events="none", **style)


def _connector(before: Bar, bar: Bar, across: Axis, along: Axis, upright: bool, thickest: float) -> str:
    """A thin line from the end of a bar to the next one."""
    x, y, width, height = _box(before, across, along, upright, thickest)
    end = along.pixel(_placed(before.end, along))
    after = _box(bar, across, along, upright, thickest)
    style = paint(stroke="#bbb")
    if upright:
        return element("line", x1=x + width, x2=after[0], y1=end, y2=end, **style)
    return element("line", x1=end, x2=end, y1=y + height, y2=after[1], **style)


def _label(bar: Bar, box: Box, upright: bool, along: Axis) -> str:
    """Words after the end of a bar, or in it where there is no room after it."""
    x, y, width, height = box
    lines = [" ".join(lines_of(bar.label))]
    if upright:
        return text(x + width / 2, y - 4, lines, text_anchor="middle", font_size=SMALL, **paint("#555"))
    middle = y + height / 2 + 0.35 * SMALL
    wide = width_of(lines[0])
    if x + width + wide + 6 > along.end + 12 and wide + 12 < width:
        return text(x + width - 6, middle, lines, text_anchor="end", font_size=SMALL, **paint("#ffffff"))
    return text(x + width + 5, middle, lines, font_size=SMALL, **paint("#555"))
