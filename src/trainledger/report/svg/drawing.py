"""A figure as one drawing: its plots with their axes and contents, and the legend above."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.report.document import Figure
from trainledger.report.style import DARK, GREY, key_of, untitled
from trainledger.report.svg.axis_lines import draw_flat, draw_grid, draw_upright
from trainledger.report.svg.bars import draw_bars
from trainledger.report.svg.boxes import Boxes
from trainledger.report.svg.curves import draw_curves, draw_strips
from trainledger.report.svg.elements import LINE, SIZE, SMALL, element, folded_to, lines_of, text
from trainledger.report.svg.frame import EDGE, Frame, frame_of, title_of
from trainledger.report.svg.legend import draw_legend, entries_of
from trainledger.report.svg.markers import draw_markers, draw_words
from trainledger.report.svg.marks import draw_annotations, draw_shapes
from trainledger.report.svg.paint import paint
from trainledger.report.svg.plots import Plot, plots_of

WIDTH = 960
_LARGE = 16  # pixels of the letters of a title


def svg(figure: Figure, width: int = WIDTH) -> str:
    """The figure as one SVG element of ``width`` pixels that scales with its page, without scripts, styles or ids.

    Each bar and point has a title that says what it is; colours have classes, which `paint.STYLE` changes on a dark
    page. The figure's own title names the drawing to a screen reader and is not drawn, nor is the key of its numbers
    (`style.key_of`): both are text of the page, as `html.drawing` has them.
    """
    body, height = _drawn(figure, width)
    return _whole(body, figure, width, height, width="100%")


def standalone(figure: Figure, name: str, width: int = WIDTH) -> str:
    """The figure as a file: on white, under its title (or ``name``), and above the key of its numbers."""
    body, height = _drawn(figure, width)
    title = folded_to(lines_of(title_of(figure["layout"]) or name), width - 2 * EDGE, _LARGE)
    top = 12 + 20 * len(title)
    numbered = [f"{number}. {each}" for number, each in enumerate(key_of(figure["layout"]), 1)]
    key = folded_to(numbered, width - 2 * EDGE)
    whole = top + height + (LINE * len(key) + EDGE if key else 0)
    parts = [
        element("rect", width=width, height=whole, fill="#ffffff"),
        text(EDGE, 22, title, font_size=_LARGE, **paint(DARK)),
        element("g", body, transform=f"translate(0 {top})"),
    ]
    if key:
        parts.append(text(EDGE, top + height + SMALL, key, font_size=SMALL, **paint(GREY)))
    return _whole("".join(parts), figure, width, whole, width=width, height=whole)


def _whole(body: str, figure: Figure, across: float, down: float, **size: object) -> str:
    return element(
        "svg", body, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {across:g} {down:g}", **size, role="img",
        aria_label=_name(figure), font_family="system-ui, sans-serif", font_size=SIZE,
    )  # fmt: skip


def _name(figure: Figure) -> str:
    """What the drawing is: its title, or what its axes are."""
    layout = figure["layout"]
    title, y, x = (
        " ".join(lines_of(title_of(each))) for each in (layout, layout.get("yaxis", {}), layout.get("xaxis", {}))
    )
    return title or " by ".join(each for each in (y, x) if each) or "figure"


def _drawn(figure: Figure, width: int) -> tuple[str, float]:
    """The elements of a drawing, and its height."""
    layout = figure["layout"]
    if "title" in layout and "margin" in layout:
        layout = untitled(layout)
    plots, axes = plots_of(figure)
    entries, legend = entries_of(figure["data"], layout, EDGE + 4, width - 2 * EDGE)
    frame, boxes = frame_of(layout, axes, width, legend), Boxes(width)
    shapes = layout.get("shapes", ())
    parts = [*draw_legend(entries, 2), *draw_shapes(shapes, frame, below=True)]
    for plot in plots:
        parts += _lines_and_bars(plot, frame)
    parts += _quiet(draw_shapes(shapes, frame, below=False))
    for plot in plots:
        parts += draw_markers(plot.points, frame.axes[plot.x], frame.axes[plot.y], plot.titles, boxes)
    parts += _quiet(draw_annotations(layout.get("annotations", ()), frame, boxes))
    bottom = 0.0
    for plot in plots:
        x, y = frame.axes[plot.x], frame.axes[plot.y]
        parts += _quiet(draw_words(plot.points, x, y, boxes))
        parts += draw_upright(frame, plot.y, x.start)
        words, reached = draw_flat(frame, plot.x, max(y.start, y.end))
        parts.append(words)
        bottom = max(bottom, reached)
    return "".join(parts), round(bottom + EDGE)


def _quiet(parts: Iterator[str]) -> Iterator[str]:
    """Elements that the pointer goes through to what is below them."""
    inside = "".join(parts)
    if inside:
        yield element("g", inside, pointer_events="none")


def _lines_and_bars(plot: Plot, frame: Frame) -> Iterator[str]:
    """A plot's grid, its bars, its lines and areas, and over these the strips that say what they are."""
    x, y = frame.axes[plot.x], frame.axes[plot.y]
    yield from draw_grid(frame, plot.x, plot.y, with_bars=bool(plot.bars))
    if plot.bars:
        across, along = (x, y) if plot.stands else (y, x)
        row = abs(across.end - across.start) / abs(across.high - across.low)
        thickest = max(each.thick for each in plot.bars) * (row - frame.spare)
        yield draw_bars(plot.bars, plot.barred, across, along, thickest)
    yield draw_curves(plot.points, x, y)
    if not plot.bars:
        yield draw_strips(plot.points, x, y, plot.titles)
