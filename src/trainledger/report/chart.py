"""A chart as data: marks (lines, bars, areas, bands, words) on two axes, with what each point says under the pointer.

`report.draw` draws a chart as SVG for pages, files, documents and notebooks. Colours are those of Okabe and Ito, which
people with any colour vision can distinguish; a page changes them in the dark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import accumulate
from math import floor, log10

from trainledger.spec.frozen import frozen
from trainledger.spec.units import GIGA, format_nbytes

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999", "#000000", "#332288")
DARK, GREY, AXIS, FAINT, PALE, WHITE = "#222222", "#555555", "#999998", "#aaaaaa", "#dddddd", "#ffffff"
SYMBOLS = ("circle", "square", "diamond", "triangle", "x", "star", "cross", "wedge")
Numbers = Sequence[float]


@frozen
class Axis:
    """The title of an axis with its unit, its scale and its ends.

    Without ``ends`` an axis shows all marks, from 0 on where ``zero``, and ``room`` beyond them, as a share of it.
    ``ticks`` are words by value. ``names`` are those of rows (from the top) or columns, whose places are 0, 1, 2 ...;
    ``above`` writes each over the whole width above its row.
    """

    title: str = ""
    log: bool = False
    ends: tuple[float, float] | None = None
    zero: bool = False
    room: float = 0.05
    ticks: Mapping[float, str] | None = None
    names: tuple[str, ...] = ()
    above: bool = False


@frozen
class Line:
    """Points, joined where ``width`` is not 0, with a ``symbol`` each where it is given, and ``texts`` beside them.

    ``said`` is what each point says: without it the values by the titles of the axes, and nothing where it is empty.
    A missing value breaks the line. ``step`` holds each value up to the next place. ``symbol`` is circle, square,
    diamond, cross, x, triangle, wedge or star; hollow with ``-open`` behind it.
    """

    xs: Sequence[float | None]
    ys: Sequence[float | None]
    name: str = ""
    colour: str = COLOURS[0]
    width: float = 2.0
    dash: str = ""
    symbol: str = ""
    size: float = 8.0
    said: Sequence[str] | None = None
    texts: Sequence[str] = ()
    step: bool = False


@frozen
class Bars:
    """Bars from ``starts`` to ``ends`` along x, around ``rows`` (``upright``: along y, around columns).

    ``thick`` is a bar's part of a row. ``said`` as of a `Line`; ``texts`` stand at the ends of the bars.
    """

    rows: Numbers
    starts: Numbers
    ends: Numbers
    name: str = ""
    colour: str = COLOURS[0]
    said: Sequence[str] | None = None
    texts: Sequence[str] = ()
    thick: float = 0.45
    upright: bool = False
    opacity: float = 1.0
    edge: str = ""


@frozen
class Area:
    """Layers by name, stacked on ``floor`` over ``xs``; ``said`` is what all say at a place."""

    xs: Numbers
    layers: Mapping[str, Numbers]
    colours: Sequence[str] = COLOURS
    said: Sequence[str] = ()
    floor: float | Numbers = 0.0
    step: bool = False
    opacity: float = 1.0

    def sums(self) -> Iterator[list[float]]:
        """The height of each layer with those below it.

        >>> list(Area([0, 1], {"a": [1, 2], "b": [3, 4]}, floor=10.0).sums())
        [[11.0, 12.0], [14.0, 16.0]]
        """
        sums = [self.floor] * len(self.xs) if isinstance(self.floor, int | float) else list(self.floor)
        for layer in self.layers.values():
            sums = [below + height for below, height in zip(sums, layer, strict=True)]
            yield sums


@frozen
class Band:
    """A stretch of an axis (``x`` or ``y``), shaded across the plot; without an ``end`` a line. ``text`` names it."""

    axis: str
    start: float
    end: float | None = None
    text: str = ""
    colour: str = DARK
    dash: str = "dash"


@frozen
class Words:
    """Words on places, without a mark of their own."""

    xs: Numbers
    ys: Numbers
    texts: Sequence[str]
    colour: str = DARK


Mark = Line | Bars | Area | Band | Words


@frozen
class Chart:
    """Marks on two axes, under a title; ``key`` says what the numbers in the drawing name, from 1 on.

    ``height`` is that of the plot in pixels; 0: as rows or curves need.

    >>> Chart("Loss", (Line([1, 2, 3], [4.0, 3.0, 2.5]),), Axis("step"), Axis("nats")).svg()[:4]
    '<svg'
    """

    title: str
    marks: tuple[Mark, ...]
    x: Axis = Axis()
    y: Axis = Axis()
    key: tuple[str, ...] = ()
    height: int = 0

    def svg(self) -> str:
        """The chart as a file: on white, under its title, and above the key of its numbers."""
        return str(import_module("trainledger.report.draw.chart").standalone(self))

    _repr_svg_ = svg

    def _repr_html_(self) -> str:
        return str(import_module("trainledger.report.draw.chart").fragment(self))


def significant(value: float, digits: int = 4) -> str:
    """A number with so many digits, as a power of ten only where it is very large or small.

    >>> significant(8030261248), significant(0.98765), significant(6.3e24), significant(0)
    ('8,030,000,000', '0.9877', '6.3e+24', '0')
    """
    if not value or value != value:
        return "0" if value == 0 else "unknown"
    exponent = floor(log10(abs(value)))
    if not -6 < exponent < 15:
        return f"{value:.{digits}g}"
    decimals = max(0, digits - 1 - exponent)
    shown = f"{round(value, digits - 1 - exponent):,.{decimals}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


Said = Callable[[str, int], str]


def stacked(
    parts: Mapping[str, Numbers], colours: Mapping[str, str], said: Said, *, thick: float = 0.45, upright: bool = False
) -> list[Bars]:
    """Bars of parts by name, each beginning where the one before it ended; ``said(name, row)`` is what each says.

    >>> [(each.starts, each.ends) for each in stacked({"a": [1, 2], "b": [3, 4]}, {}, lambda name, row: name)]
    [([0, 0], [1, 2]), ([1, 2], [4, 6])]
    """
    count = len(next(iter(parts.values()), ()))
    ends = list(accumulate(parts.values(), lambda below, own: [a + b for a, b in zip(below, own, strict=True)]))
    return [
        Bars(
            range(count),
            start,
            end,
            name,
            colours.get(name, GREY),
            [said(name, row) for row in range(count)],
            thick=thick,
            upright=upright,
        )
        for name, start, end in zip(parts, [[0] * count, *ends], ends, strict=False)
    ]


def beside(parts: Mapping[str, Numbers], said: Said) -> list[Bars]:
    """Bars of parts by name, beside each other in each row.

    >>> [each.rows for each in beside({"a": [1, 2], "b": [3, 4]}, lambda name, row: name)]
    [[-0.125, 0.875], [0.125, 1.125]]
    """
    thick = 0.5 / len(parts)
    return [
        Bars(
            [row + thick * (at - (len(parts) - 1) / 2) for row in range(len(ends))],
            [0] * len(ends),
            ends,
            name,
            COLOURS[at % len(COLOURS)],
            [said(name, row) for row in range(len(ends))],
            thick=thick,
        )
        for at, (name, ends) in enumerate(parts.items())
    ]


def bar_chart(title: str, x: str | Axis, names: Iterable[str], marks: Iterable[Mark]) -> Chart:
    """Bars under the names of their rows; ``x`` names the axis with its unit."""
    return Chart(title, tuple(marks), x if isinstance(x, Axis) else Axis(x), Axis(names=tuple(names), above=True))


def usable_memory(nbytes: int | None, axis: str = "x", of: str = "usable") -> list[Band]:
    """A line at the usable memory, where it is known, on an axis in GB."""
    return [] if nbytes is None else [Band(axis, nbytes / GIGA, text=f"{format_nbytes(nbytes)} {of}")]
