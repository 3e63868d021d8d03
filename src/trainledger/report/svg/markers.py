"""Points as symbols, and their labels where no other label is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import cos, pi, sin
from typing import Any

from trainledger.report.style import DARK
from trainledger.report.svg.axes import Axis
from trainledger.report.svg.boxes import Boxes
from trainledger.report.svg.curves import colour_of, modes_of
from trainledger.report.svg.elements import SMALL, element, hover, lines_of, text, width_of
from trainledger.report.svg.hovers import hover_of
from trainledger.report.svg.paint import lettered, paint

SYMBOLS = (
    "circle", "square", "diamond", "cross", "x", "triangle-up", "triangle-down", "triangle-left", "triangle-right",
)  # fmt: skip
_SIZE = 7  # pixels across, where the trace says nothing
_FEW = 500  # points that are all drawn
_PLACES = (
    "top center", "bottom center", "middle right", "middle left", "top right", "bottom right", "top left",
    "bottom left",
)  # fmt: skip
Trace = dict[str, Any]


def _polygon(corners: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.3g} {y:.3g}" for x, y in corners) + "z"


def _star() -> str:
    angles = [(-pi / 2 + at * pi / 5, 1.25 if at % 2 == 0 else 0.55) for at in range(10)]
    return _polygon([(r * cos(a), r * sin(a)) for a, r in angles])


def _cross(turned: bool) -> str:
    wide = 0.35
    corners = [(-wide, -1.0), (wide, -1.0), (wide, -wide), (1.0, -wide), (1.0, wide), (wide, wide), (wide, 1.0),
               (-wide, 1.0), (-wide, wide), (-1.0, wide), (-1.0, -wide), (-wide, -wide)]  # fmt: skip
    half = 0.5**0.5
    return _polygon([((x - y) * half, (x + y) * half) if turned else (x, y) for x, y in corners])


# Of a radius of 1; those that are not here are circles.
_SHAPES = {
    "square": _polygon([(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)]),
    "diamond": _polygon([(0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)]),
    "cross": _cross(False), "x": _cross(True), "star": _star(),
    "triangle-up": _polygon([(0, -1.15), (1.15, 0.8), (-1.15, 0.8)]),
    "triangle-down": _polygon([(0, 1.15), (1.15, -0.8), (-1.15, -0.8)]),
    "triangle-left": _polygon([(-1.15, 0), (0.8, -1.15), (0.8, 1.15)]),
    "triangle-right": _polygon([(1.15, 0), (-0.8, -1.15), (-0.8, 1.15)]),
}  # fmt: skip


def symbol(kind: str | int, x: float, y: float, size: float, said: str = "") -> str:
    """A symbol of ``size`` pixels around a point, without its colours."""
    name = SYMBOLS[kind % len(SYMBOLS)] if isinstance(kind, int) else kind.removesuffix("-open")
    if name not in _SHAPES:
        return element("circle", hover(said), cx=float(x), cy=float(y), r=size / 2)
    # A stroke that is not scaled with the shape.
    moved = f"translate({x:.1f} {y:.1f}) scale({size / 2:g})"
    return element("path", hover(said), d=_SHAPES[name], transform=moved, vector_effect="non-scaling-stroke")


def symbol_style(number: int, trace: Trace, at: int = 0) -> tuple[str | int, float, dict[str, object]]:
    """Kind, size and colours of a trace's point."""
    marker = trace.get("marker", {})
    kind, size, colour = (_of(marker.get(name), at) for name in ("symbol", "size", "color"))
    colour, line = colour or colour_of(number, trace), marker.get("line", {})
    opacity = (_of(marker.get("opacity"), at) or 1) * trace.get("opacity", 1)
    kind = "circle" if kind is None else kind
    if isinstance(kind, str) and kind.endswith("-open"):
        return kind, float(size or _SIZE), paint("rgba(255,255,255,0)", colour, line.get("width", 1.5), opacity=opacity)
    edge = line.get("color") if line.get("width") else None
    return kind, float(size or _SIZE), paint(colour, edge, line.get("width", 1), opacity=opacity)


def _of(value: Any, at: int) -> Any:
    return value[at] if isinstance(value, Sequence) and not isinstance(value, str) else value


def draw_markers(
    traces: Sequence[tuple[int, Trace]], x: Axis, y: Axis, titles: tuple[str, str], boxes: Boxes
) -> Iterator[str]:
    """The points of each trace as symbols; those of many that fall on the same pixel are one."""
    for number, trace in traces:
        if "markers" not in modes_of(trace):
            continue
        said, drawn = hover_of(trace, titles), {}
        styles: dict[tuple[tuple[str, object], ...], list[str]] = {}
        places = list(zip(x.pixels(trace["x"]), y.pixels(trace["y"]), strict=True))
        for at, (a, b) in enumerate(places):
            if a is None or b is None or abs(x.clamped(a) - a) > 1 or abs(y.clamped(b) - b) > 1:
                continue
            kind, size, style = symbol_style(number, trace, at)
            key = (round(a), round(b)) if len(places) > _FEW else (at, 0)
            if key in drawn:
                continue
            drawn[key] = True
            styles.setdefault(tuple(style.items()), []).append(symbol(kind, a, b, size, said(at)))
            if len(places) <= _FEW:
                boxes.take((a - size / 2, b - size / 2, size, size))
        for style_items, symbols in styles.items():
            yield element("g", "".join(symbols), **dict(style_items))


def draw_words(traces: Sequence[tuple[int, Trace]], x: Axis, y: Axis, boxes: Boxes) -> Iterator[str]:
    """The words at points, each where its trace says unless other words or a point are there."""
    for number, trace in traces:
        if "text" not in modes_of(trace):
            continue
        font = trace.get("textfont", {})
        size, colour = max(SMALL, font.get("size", SMALL)), font.get("color", DARK)
        reach = symbol_style(number, trace)[1] / 2 + 3 if "markers" in modes_of(trace) else 2
        on_points = trace.get("textposition") == "middle center"
        words = []
        for at, (a, b) in enumerate(zip(x.pixels(trace["x"]), y.pixels(trace["y"]), strict=True)):
            said = _of(trace.get("text"), at)
            if a is None or b is None or not said:
                continue
            line = " ".join(lines_of(str(said)))
            wide = width_of(line, size)
            places = (_of(trace.get("textposition"), at) or "top center", *(() if on_points else _PLACES))
            box = boxes.free([_beside(a, b, wide, size, reach, each) for each in places])
            words.append(text(box[0], box[1] + 0.8 * size, [line]))
        style = paint(colour) if on_points else lettered(colour)
        yield element("g", "".join(words), font_size=size, **style)


def _beside(
    x: float, y: float, wide: float, size: float, reach: float, place: str
) -> tuple[float, float, float, float]:
    """The box of words at a side of a point."""
    above, side = place.split(" ")
    aslant = 0.8 if above != "middle" and side != "center" else 1.0
    left = {"left": x - wide - reach * aslant, "center": x - wide / 2, "right": x + reach * aslant}[side]
    top = {"top": y - size - reach * aslant, "middle": y - size / 2, "bottom": y + reach * aslant}[above]
    return left, top, wide, size
