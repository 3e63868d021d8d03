"""SVG elements as text: attributes instead of styles, everything escaped, colours with classes; widths of words."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from trainledger.report.chart import AXIS, COLOURS, DARK, FAINT, GREY, PALE, WHITE

SIZE, SMALL = 13, 12  # pixels of letters: of titles; of ticks, labels and legends
LINE = 15  # pixels from one line of words to the next
GRID = "#e4e4e4"
_NARROW, _WIDE = frozenset("iljtfrI.,:;|!'()[] "), frozenset("mwMW@%")
_CLASS = {
    DARK: "ink", GREY: "muted", GRID: "grid", FAINT: "faint", PALE: "pale", AXIS: "axis", WHITE: "paper",
    **{colour: f"c{at}" for at, colour in enumerate(COLOURS)},
}  # fmt: skip
# What reads better on a dark page than the colour of a light one.
_DARK = {
    "ink": "#e8e6e3", "muted": "#aaa8a4", "grid": "#34373c", "faint": "#6a6d73", "axis": "#7d8087", "pale": "#4a4d52",
    "paper": "#17191c", "c0": "#2f8bd0", "c2": "#16b486", "c4": "#8fd0f5", "c5": "#ec7c3a", "c8": "#c9c7c3",
    "c9": "#8f86e6",
}  # fmt: skip


def _style(colour: str) -> str:
    rules = "".join(
        f".{name}{{{{fill:{colour}}}}}.{name}-line{{{{stroke:{colour}}}}}".format(
            name=name, own=f"light-dark({light},{_DARK.get(name, light)})"
        )
        for light, name in _CLASS.items()
    )
    return f"@supports (color:light-dark(#000,#fff)){{{rules}}}"


# By these stylesheets drawings follow the color-scheme of their page. A class is a colour's name for a fill and has
# -line behind it for a stroke. A page of ours that has a variable of the name (--ink) gives its own colour; a notebook
# has variables of other meanings (marimo's --muted is the colour of a background), which a drawing leaves alone.
STYLE = _style("var(--{name},{own})")
NOTEBOOK_STYLE = _style("{own}")
_DASHES = {"dash": "6 4", "dot": "2 4", "dashdot": "6 3 2 3"}


def number(value: float) -> str:
    """A length in pixels, to a tenth.

    >>> number(12.0), number(-0.04), number(3.14159)
    ('12', '0', '3.1')
    """
    shown = f"{value:.1f}"
    return shown[:-2].replace("-0", "0") if shown.endswith(".0") else shown


def element(name: str, inside: str = "", /, **attributes: object) -> str:
    """An element; ``_`` in a name of an attribute is ``-``, ``class_`` is class, and what is None is left out.

    >>> element("line", x1=1.25, stroke_width=2, class_="grid", fill=None)
    '<line x1="1.2" stroke-width="2" class="grid"/>'
    """
    words = [name]
    for key, value in attributes.items():
        if value is not None and value != "":
            shown = number(value) if isinstance(value, float) else escape(str(value))
            words.append(f'{key.rstrip("_").replace("_", "-")}="{shown}"')
    return f"<{' '.join(words)}>{inside}</{name}>" if inside else f"<{' '.join(words)}/>"


def rectangle(x: float, y: float, width: float, height: float, said: str = "", **attributes: Any) -> str:
    """A rectangle, and what it says under the pointer."""
    return element("rect", hover(said), x=float(x), y=float(y), width=float(width), height=float(height), **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: Any) -> str:
    """A straight line."""
    return element("line", x1=float(x1), x2=float(x2), y1=float(y1), y2=float(y2), **attributes)


def hover(words: str) -> str:
    """A title, which a browser shows where the pointer rests."""
    return f"<title>{escape(words, quote=False)}</title>" if words else ""


def text(x: float, y: float, lines: Iterable[str], **attributes: object) -> str:
    """Lines of words of which the first has its baseline at ``y``."""
    first, *others = (escape(words, quote=False) or " " for words in lines)
    if others:
        first = element("tspan", first, x=float(x)) + "".join(
            element("tspan", other, x=float(x), dy=LINE) for other in others
        )
    return element("text", first, x=float(x), y=float(y), **attributes)


def width_of(words: str, size: float = SMALL) -> float:
    """About how many pixels a line of words takes in a system's own font."""
    units = 0.0
    for letter in words:
        if letter in _NARROW:
            units += 0.32
        elif letter in _WIDE:
            units += 0.88
        elif letter < "\u0300":
            units += 0.68 if letter.isupper() else 0.59
        else:
            units += 1.0
    return units * size


def folded_to(words: str, width: float, size: float = SMALL) -> list[str]:
    """Words broken at spaces into lines of at most ``width`` pixels; one longer word is cut short.

    >>> folded_to("operations of one step", 90), folded_to("a long_long_word", 60)
    (['operations of', 'one step'], ['a', 'long_lon…'])
    """
    lines: list[str] = []
    for whole in words.split("\n"):
        start = ""
        for word in [whole] if width_of(whole, size) <= width else whole.split():
            longer = f"{start} {word}" if start else word
            if start and width_of(longer, size) > width:
                lines.append(start)
                longer = word
            start = longer
        lines.append(start)
    return [_cut(line, width, size) for line in lines]


def _cut(line: str, width: float, size: float) -> str:
    if width_of(line, size) <= width:
        return line
    while len(line) > 1 and width_of(line, size) + 0.8 * size > width:
        line = line[:-1]
    return f"{line}…"


def paint(fill: str = "", stroke: str = "", width: float = 1.0, dash: str = "", opacity: float = 1.0) -> dict[str, Any]:
    """The attributes of a fill and a stroke, with a class for each colour; an empty text leaves either out.

    >>> paint(stroke="#e4e4e4"), paint("#0072B2")
    ({'fill': 'none', 'stroke': '#e4e4e4', 'class_': 'grid-line'}, {'fill': '#0072B2', 'class_': 'c0'})
    """
    painted: dict[str, Any] = {"fill": fill or "none"}
    if stroke:
        painted |= {
            "stroke": stroke,
            "stroke_width": None if width == 1 else width,
            "stroke_dasharray": _DASHES.get(dash),
        }
    classes = (_CLASS.get(fill, ""), f"{_CLASS[stroke]}-line" if stroke in _CLASS else "")
    painted |= {"class_": " ".join(filter(None, classes)), "opacity": None if opacity == 1 else str(opacity)}
    return {name: value for name, value in painted.items() if value}


def lettered(colour: str = DARK) -> dict[str, Any]:
    """The attributes of words over what is drawn: an edge of paper around each letter.

    >>> lettered("#222222")["class_"]
    'ink paper-line'
    """
    return paint(colour, WHITE, 3) | {"paint_order": "stroke", "stroke_linejoin": "round"}
