"""A chart as one drawing: its marks between axes, the legend above, words where there is room; in a page or a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from trainledger.report.chart import AXIS, DARK, GREY, Area, Band, Bars, Chart, Line, Mark, Words
from trainledger.report.draw.elements import (
    GRID,
    LINE,
    NOTEBOOK_STYLE,
    SIZE,
    SMALL,
    STYLE,
    element,
    folded_to,
    lettered,
    line,
    paint,
    rectangle,
    text,
    width_of,
)
from trainledger.report.draw.marks import Box, area, bars, sign, strips, symbol_style, symbols
from trainledger.report.draw.marks import line as curve
from trainledger.report.draw.scale import Held, Scale, Tick, minor_ticks, scale_of, ticks_of

__all__ = ["STYLE", "WIDTH", "drawing", "fragment", "standalone", "svg"]

WIDTH, NARROW = 960, 380  # pixels of a drawing for a screen, for a telephone
_HEIGHT, _ROW, _ABOVE = 270, 34, 44  # pixels of a plot, of a row, of a row and its name above it
_LOW_HEIGHT, _LOW_ROW = 170, 17  # of a low plot, of its rows
_EDGE, _TICK, _TITLE = 6, 6, 20  # pixels around all; from an axis to its ticks; of the title of an upright axis
# After the browser's own: fonts of Windows and macOS, and those that Linux distributions have.
_FONTS = "system-ui, Arial, Helvetica, DejaVu Sans, Liberation Sans, Noto Sans, sans-serif"
_LARGE = 16  # pixels of the letters of a title
_SIGN, _NAMES_APART, _LEGEND_LINE = 26, 20, 20  # of a legend: a sign and its space, between names, a line
_APART = 2.0  # pixels between neighbouring words


def svg(
    chart: Chart, width: int = WIDTH, *, low: bool = False, held: Held | None = None, pinned: Held | None = None
) -> str:
    """The chart as one SVG element of ``width`` pixels that scales with its page, without scripts, styles or ids.

    A ``low`` one has a plot of fewer pixels. Groups of marks have keys, and the axes their ends in values and in
    pixels, by which a page moves what it shows to the next picture, whose axes are ``held`` where its values allow, and
    show those of the picture that is ``pinned``.

    Each bar and point has a title that says what it is; colours have classes, which `STYLE` changes on a dark page.
    The title names the drawing to a screen reader and is not drawn, nor is the key of its numbers: both are text of
    the page, as `drawing` has them.
    """
    body, height, scales = _drawn(chart, width, low, held, pinned)
    ends = {f"data_{letter}": f"{s.low:.9g} {s.high:.9g} {s.start:.1f} {s.end:.1f}" for letter, s in scales.items()}
    return _whole(chart, body, width, height, width="100%", **ends)


def standalone(chart: Chart, width: int = WIDTH) -> str:
    """The chart as a file (`Chart.svg`)."""
    body, height, _ = _drawn(chart, width)
    title = folded_to(chart.title, width - 2 * _EDGE, _LARGE)
    top = 12 + 20 * len(title)
    key = [row for at, named in enumerate(chart.key, 1) for row in folded_to(f"{at}. {named}", width - 2 * _EDGE)]
    whole = top + height + (LINE * len(key) + _EDGE if key else 0)
    parts = [
        rectangle(0, 0, width, whole, fill="#ffffff"),
        text(_EDGE, 22, title, font_size=_LARGE, **paint(DARK)),
        element("g", body, transform=f"translate(0 {top})"),
    ]
    if key:
        parts.append(text(_EDGE, top + height + SMALL, key, font_size=SMALL, **paint(GREY)))
    return _whole(chart, "".join(parts), width, whole, width=width, height=whole)


def drawing(chart: Chart) -> str:
    """The chart for a page, drawn for a screen and for a telephone (a style shows one), with what its numbers name."""
    sizes = (("broad", WIDTH), ("narrow", NARROW))
    return _figure(chart, "".join(f'<div class="{which}">{svg(chart, width)}</div>' for which, width in sizes))


def fragment(chart: Chart) -> str:
    """The chart under its title as HTML without scripts, as a notebook shows it."""
    return f"<style>{NOTEBOOK_STYLE}</style><h4>{escape(chart.title)}</h4>{_figure(chart, svg(chart))}"


def _figure(chart: Chart, drawings: str) -> str:
    key = "".join(f"<li>{escape(named)}</li>" for named in chart.key)
    return f"<figure>{drawings}{f'<figcaption><ol>{key}</ol></figcaption>' if key else ''}</figure>"


def _whole(chart: Chart, body: str, across: float, down: float, **size: object) -> str:
    return element(
        "svg", body, xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {across:g} {down:g}", **size, role="img",
        aria_label=chart.title, font_family=_FONTS, font_size=SIZE,
    )  # fmt: skip


def _drawn(
    chart: Chart, width: int, low: bool = False, held: Held | None = None, pinned: Held | None = None
) -> tuple[str, float, dict[str, Scale]]:
    """The elements of a drawing, its height, and its scales by letter."""
    legend, top = _legend(chart.marks, width)
    rows = chart.y.names if chart.y.above else ()
    names = [folded_to(row, width - 24, SMALL) for row in rows]
    spare = LINE * max((len(lines) - 1 for lines in names), default=0)  # of each row, as its name takes several lines
    row = _ABOVE + spare if rows else _LOW_ROW if low else _ROW
    usual = row * len(chart.y.names) + (0 if rows else 20) if chart.y.names else _LOW_HEIGHT if low else _HEIGHT
    height = usual if low else chart.height or usual
    named = any(isinstance(mark, Band) and mark.end is not None and mark.text for mark in chart.marks)
    top += 12 + spare / 2 + LINE * named
    y = scale_of(chart, "y", top + height, top, held, pinned)
    upright = [] if rows else ticks_of(chart.y, y, is_x=False)
    room = max((width_of(words) for tick in upright for words in tick.lines), default=0) + _TICK * bool(upright)
    left = _EDGE + room + (_TITLE if chart.y.title else 4)
    right = width - (_EDGE + 34 if width > NARROW else 16)
    x = scale_of(chart, "x", left, right, held, pinned)
    flat = ticks_of(chart.x, x, is_x=True)
    keys = _keys(chart.marks)
    parts = [
        element("g", "".join(legend), data_key="legend"),
        *_shades(chart, x, y),
        *_grid(chart, x, y, flat, upright),
    ]
    thickest = abs(y.end - y.start) / (y.high - y.low) - spare if rows else 1e9
    for key, mark in zip(keys, chart.marks, strict=True):
        match mark:
            case Bars():
                parts.append(element("g", "".join(bars(mark, chart, x, y, thickest)), data_key=key))
            case Area():
                parts.append(element("g", "".join(area(mark, x, y)), data_key=key))
    for key, mark in zip(keys, chart.marks, strict=True):
        if isinstance(mark, Line) and (drawn := curve(mark, x, y)):
            parts.append(element("g", drawn, data_key=key))
    parts.append(strips(chart, x, y))
    taken = _Taken(width)
    for key, mark in zip(keys, chart.marks, strict=True):
        if isinstance(mark, Line) and mark.symbol:
            shown = list(symbols(mark, chart, x, y))
            taken.boxes += [box for box, _ in shown] if len(shown) < 500 else []
            points = "".join(drawn for _, drawn in shown)
            parts.append(element("g", points, data_key=f"{key} points", **symbol_style(mark)))
    quiet = [*_row_names(names, y, left, taken), *_rules(chart, x, y, taken), *_texts(chart, x, y, taken)]
    parts.append(element("g", "".join(quiet), pointer_events="none") if quiet else "")
    parts += _upright_words(chart.y.title, upright, y, left)
    words, bottom = _flat_words(chart.x.title, flat, x, max(y.start, y.end), width)
    return "".join([*parts, words]), round(bottom + _EDGE), {"x": x, "y": y}


def _keys(marks: Sequence[Mark]) -> list[str]:
    """A key for each mark: its kind and name, and how many like it came before."""
    names = [f"{type(mark).__name__} {getattr(mark, 'name', '')}" for mark in marks]
    return [f"{name} {names[:at].count(name)}" for at, name in enumerate(names)]


def _legend(marks: Sequence[Mark], width: int) -> tuple[list[str], float]:
    """The names of the marks from left to right and down, and the height of all; none where there is one name."""
    named: dict[str, tuple[Mark, str]] = {}
    for mark in marks:
        if isinstance(mark, Area):
            for at, name in enumerate(mark.layers):
                named.setdefault(name, (mark, mark.colours[at % len(mark.colours)]))
        elif isinstance(mark, Line | Bars):
            named.setdefault(mark.name, (mark, mark.colour))
    named.pop("", None)
    parts: list[str] = []
    if len(named) < 2:
        return parts, 0.0
    left = _EDGE + 4.0
    x, top, high = left, 2.0, 0
    for name, (mark, colour) in named.items():
        lines = folded_to(name, width - 2 * left - _SIGN)
        wide = _SIGN + max(map(width_of, lines))
        if x > left and x + wide > width - 2:
            x, top, high = left, top + high, 0
        middle = top + _LEGEND_LINE / 2
        parts += [
            *sign(mark, colour, x, middle),
            text(x + _SIGN, middle + 0.35 * SMALL, lines, font_size=SMALL, **paint(DARK)),
        ]
        x, high = x + wide + _NAMES_APART, max(high, _LEGEND_LINE + LINE * (len(lines) - 1))
    return parts, top + high


def _shades(chart: Chart, x: Scale, y: Scale) -> Iterator[str]:
    """Shaded stretches of an axis across the plot."""
    top, height = min(y.start, y.end), abs(y.end - y.start)
    for band in chart.marks:
        if isinstance(band, Band) and band.end is not None and band.colour:
            low, high = sorted((x if band.axis == "x" else y).clamped(end) for end in (band.start, band.end))
            box = (low, top, high - low, height) if band.axis == "x" else (x.start, low, x.end - x.start, high - low)
            yield rectangle(*box, **paint(band.colour, opacity=0.05))


def _grid(chart: Chart, x: Scale, y: Scale, flat: Sequence[Tick], upright: Sequence[Tick]) -> Iterator[str]:
    """The lines at the ticks of axes without names, those at zero, and minor ticks."""
    bottom, top = max(y.start, y.end), min(y.start, y.end)
    for axis, scale, ticks in ((chart.x, x, flat), (chart.y, y, upright)):

        def across(at: float, scale: Scale = scale) -> str:
            return line(at, bottom, at, top) if scale is x else line(x.start, at, x.end, at)

        if not axis.names:
            if ticks:
                yield element("g", "".join(across(tick.at) for tick in ticks), **paint(stroke=GRID))
            (zero,) = scale.inside([0.0])
            if zero is not None and ticks:
                yield element("g", across(zero), **paint(stroke=AXIS))
        minor = minor_ticks(axis, scale)
        if minor:
            inside = (
                line(at, bottom, at, bottom + 4) if scale is x else line(x.start - 4, at, x.start, at) for at in minor
            )
            yield element("g", "".join(inside), **paint(stroke="#aaaaaa"))


class _Taken:
    """The boxes of a drawing that words may not cover."""

    def __init__(self, width: float) -> None:
        self.width = width
        self.boxes: list[Box] = []

    def is_free(self, box: Box) -> bool:
        """Whether a box is free and within the edges."""
        left, top, wide, high = box
        return (
            left >= 0
            and left + wide <= self.width
            and not any(
                left < x + width + _APART and x < left + wide + _APART and top < y + height and y < top + high
                for x, y, width, height in self.boxes
            )
        )

    def free(self, boxes: Sequence[Box]) -> Box:
        """Takes the first box that is free, else the first of all."""
        chosen = next(filter(self.is_free, boxes), boxes[0])
        self.boxes.append(chosen)
        return chosen


def _row_names(names: Sequence[list[str]], y: Scale, left: float, taken: _Taken) -> Iterator[str]:
    """The names of rows above their bars."""
    for row, lines in enumerate(names):
        top = (y.at(row) or 0.0) - 13 - LINE * (len(lines) - 1) - SMALL
        taken.boxes.append((left, top, max(map(width_of, lines)), SMALL + LINE * (len(lines) - 1.0)))
        yield text(left, top + 0.82 * SMALL, lines, font_size=SMALL, **lettered())


def _rules(chart: Chart, x: Scale, y: Scale, taken: _Taken) -> Iterator[str]:
    """Lines across the plot with their words, and the names of stretches above it where they have room."""
    top, bottom = min(y.start, y.end), max(y.start, y.end)
    for band in chart.marks:
        if not isinstance(band, Band):
            continue
        at, wide = (x if band.axis == "x" else y).clamped(band.start), width_of(band.text)
        if band.end is not None:
            boxes = [(at, level, wide, SMALL + 1.0) for level in (top - SMALL - 4, top + 4)]
            box = next(filter(taken.is_free, boxes), None) if band.text else None
            if box is not None:
                taken.boxes.append(box)
                yield text(at, box[1] + 0.9 * SMALL, [band.text], font_size=SMALL, **lettered(GREY))
            continue
        ends = (at, bottom, at, top) if band.axis == "x" else (x.start, at, x.end, at)
        yield line(*ends, **paint(stroke=band.colour, width=1.2, dash=band.dash))
        if not band.text:
            continue
        if band.axis == "x":
            sides = (at + 4, at - 4 - wide) if at < (x.start + x.end) / 2 else (at - 4 - wide, at + 4)
            places = [(side, top + 1 + LINE * down, wide, SMALL + 2.0) for down in range(3) for side in sides]
        else:
            sides = (x.start + 4, x.end - wide)
            places = [(side, at + shift, wide, SMALL + 2.0) for shift in (-SMALL - 3, 2) for side in sides]
        left, up, *_ = taken.free(places)
        yield text(left, up + 0.82 * SMALL, [band.text], font_size=SMALL, **lettered(band.colour))


def _texts(chart: Chart, x: Scale, y: Scale, taken: _Taken) -> Iterator[str]:
    """Words on places, and the words of points, each beside its point where nothing else is."""
    for mark in chart.marks:
        if not isinstance(mark, Line | Words) or not mark.texts:
            continue
        words = []
        for a, b, said in zip(x.inside(mark.xs), y.inside(mark.ys), mark.texts, strict=True):
            if a is None or b is None or not said:
                continue
            wide = width_of(said)
            if isinstance(mark, Words):
                left, top = min(max(a - wide / 2, 0.0), taken.width - wide), b - SMALL / 2
            else:
                boxes = [box for far in (3, 12) for box in _around(a, b, wide, mark.size / 2 + far)]
                if (box := next(filter(taken.is_free, boxes), None)) is None:
                    continue  # the point says its words under the pointer, and the table has them
                taken.boxes.append(box)
                left, top, *_ = box
            words.append(text(left, top + 0.8 * SMALL, [said]))
        style = paint(mark.colour) if isinstance(mark, Words) else lettered()
        yield element("g", "".join(words), font_size=SMALL, **style)


def _around(x: float, y: float, wide: float, reach: float) -> Iterator[Box]:
    """The boxes of words at the sides and corners of a point."""
    places = ((0, -1), (0, 1), (1, 0), (-1, 0), (0.8, -0.8), (0.8, 0.8), (-0.8, -0.8), (-0.8, 0.8))
    for across, down in places:
        yield (
            x + reach * across + wide * ((across > 0) - 1) * (1 if across else 0.5),
            y + reach * down + SMALL * ((down > 0) - 1) * (1 if down else 0.5),
            wide,
            SMALL,
        )


def _upright_words(title: str, ticks: Sequence[Tick], y: Scale, left: float) -> Iterator[str]:
    """The words at the upright axis, and its title."""
    words = (
        text(left - _TICK, tick.at + 0.35 * SMALL - LINE * (len(tick.lines) - 1) / 2, tick.lines) for tick in ticks
    )
    yield element("g", "".join(words), text_anchor="end", font_size=SMALL, data_key="ticks y", **paint(GREY))
    if title:
        middle, at = (y.start + y.end) / 2, _EDGE + SIZE - 2
        lines = folded_to(title, max(abs(y.end - y.start), 100) + 20, SIZE)[:1]
        yield text(
            at, middle, lines, text_anchor="middle", transform=f"rotate(-90 {at:.1f} {middle:.1f})", **paint(DARK)
        )


def _flat_words(title: str, ticks: Sequence[Tick], x: Scale, bottom: float, width: int) -> tuple[str, float]:
    """The words at the flat axis, and its title; and how far down they reach."""
    parts = []
    if ticks:
        words = (text(tick.at, bottom + _TICK + SMALL, tick.lines) for tick in ticks)
        style = paint(GREY) | {"text_anchor": "middle", "font_size": SMALL}
        parts.append(element("g", "".join(words), data_key="ticks x", **style))
        bottom += _TICK + SMALL + 2 + LINE * (max(len(tick.lines) for tick in ticks) - 1)
    if title:
        middle = (x.start + x.end) / 2
        lines = folded_to(title, 1.9 * min(middle, width - middle), SIZE)
        parts.append(text(middle, bottom + 20, lines, text_anchor="middle", **paint(DARK)))
        bottom += 24 + LINE * (len(lines) - 1)
    return "".join(parts), bottom
