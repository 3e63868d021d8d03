"""What a layout adds to the traces: lines and shaded stretches, words at places, arrows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trainledger.report.style import DARK
from trainledger.report.svg.boxes import Box, Boxes
from trainledger.report.svg.elements import LINE, SMALL, element, lines_of, text, width_of
from trainledger.report.svg.frame import Frame, is_row, row_lines
from trainledger.report.svg.paint import is_clear, lettered, paint

Shape = dict[str, Any]


def draw_shapes(shapes: Sequence[Shape], frame: Frame, *, below: bool) -> Iterator[str]:
    """Lines and rectangles, those below the traces or those above them."""
    for each in shapes:
        if (each.get("layer") == "below") != below:
            continue
        x0, x1 = (frame.pixel(each.get("xref", "x"), each[name], "x") for name in ("x0", "x1"))
        y0, y1 = (frame.pixel(each.get("yref", "y"), each[name], "y") for name in ("y0", "y1"))
        if x0 is None or x1 is None or y0 is None or y1 is None:
            continue
        line = each.get("line", {})
        if each.get("type") == "line":
            style = paint(stroke=line.get("color", DARK), width=line.get("width", 1), dash=line.get("dash", ""))
            yield element("line", x1=x0, x2=x1, y1=y0, y2=y1, **style)
        elif not is_clear(each.get("fillcolor", "rgba(0,0,0,0)")):
            style = paint(each["fillcolor"], line.get("color"), line.get("width", 0))
            yield element(
                "rect", x=min(x0, x1), y=min(y0, y1), width=abs(x1 - x0), height=abs(y1 - y0), **style
            )  # fmt: skip


def draw_annotations(annotations: Sequence[Shape], frame: Frame, boxes: Boxes) -> Iterator[str]:
    """Words at their places; arrows first, and what has no room between other words is left out."""
    for each in sorted(annotations, key=lambda each: (not is_row(each), not each.get("showarrow", True))):
        x = frame.pixel(each.get("xref", "x"), each["x"], "x", of_words=True)
        y = frame.pixel(each.get("yref", "y"), each["y"], "y", of_words=True)
        if x is not None and y is not None:
            yield from _annotation(each, x, y, frame, boxes)


def _annotation(each: Shape, x: float, y: float, frame: Frame, boxes: Boxes) -> Iterator[str]:
    arrow = each.get("showarrow", True)
    at_x = x + each.get("xshift", 0) + (each.get("ax", 0) if arrow else 0)
    at_y = y - each.get("yshift", 0) + (each.get("ay", -20) if arrow else 0)
    font = each.get("font", {})
    size = max(SMALL, font.get("size", SMALL))
    lines = row_lines(each, frame.width) if is_row(each) else lines_of(str(each["text"]))
    box = _box(each, at_x, at_y, lines, size)
    if is_row(each):
        boxes.take(box)
    else:
        places = list(_places(each, box, x, boxes.width))
        if not arrow and _is_minor(each) and not any(map(boxes.is_free, places)):
            return
        box = boxes.free(places)
    if arrow:
        yield _arrow(box, x, y, each.get("arrowcolor", DARK))
    background = each.get("bgcolor")
    if background:
        left_, top, wide, high = box
        yield element("rect", x=left_ - 2, y=top, width=wide + 4, height=high, rx=2, **paint(background))
    yield text(box[0], box[1] + 0.82 * size, lines, font_size=size, **lettered(font.get("color", DARK)))


def _places(each: Shape, box: Box, x: float, width: float) -> Iterator[Box]:
    """Where words may be: at their place, on the other side of it, within the drawing, a line above or below."""
    left, top, wide, high = box
    inside = min(max(left, 2.0), width - wide - 2)
    if _is_minor(each):
        yield from ((side, top, wide, high) for side in (left, inside))
        return
    for side in (left, 2 * x - left - wide, inside):
        for shift in (0, -LINE, LINE):
            yield side, top + shift, wide, high


def _is_minor(each: Shape) -> bool:
    """Whether words only name what is drawn there anyway: a phase, or rounds that are left out."""
    return bool(each.get("yref", "").endswith("domain")) and each.get("xref", "x")[:1] == "x" and "xshift" not in each


def _box(each: Shape, x: float, y: float, lines: Sequence[str], size: float) -> Box:
    wide, high = max(width_of(line, size) for line in lines), size + LINE * (len(lines) - 1) + 2.0
    left = {"left": x, "right": x - wide}.get(str(each.get("xanchor")), x - wide / 2)
    top = {"top": y, "bottom": y - high}.get(str(each.get("yanchor")), y - high / 2)
    return left, top, wide, high


def _arrow(box: Box, x: float, y: float, colour: str) -> str:
    """From the nearest corner of the words to a point just before (x, y), with a head."""
    left, top, wide, high = box
    from_x, from_y = min(max(x, left), left + wide), top if y < top else min(y, top + high)
    length = max(1.0, ((x - from_x) ** 2 + (y - from_y) ** 2) ** 0.5)
    ex, ey = (x - from_x) / length, (y - from_y) / length
    x, y = x - 2 * ex, y - 2 * ey
    sides = [(x - 6 * ex + side * ey, y - 6 * ey - side * ex) for side in (-3, 3)]
    corners = ((from_x, from_y), (x, y), sides[0], (x, y), sides[1])
    d = "L".join(f"{a:.1f} {b:.1f}" for a, b in corners)
    return element("path", d=f"M{d}", stroke_linejoin="round", **paint(stroke=colour))
