"""SVG elements as text: attributes instead of styles, everything escaped; and lines of words with their widths."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape, unescape

SIZE, SMALL = 13, 12  # pixels of letters: of a legend and of titles; of ticks and labels
LINE = 15  # pixels from one line of words to the next
_BREAK = re.compile(r"<br ?/?>|\n")
_TAG = re.compile(r"</?(?:b|i|sub|sup)>")
_NARROW, _WIDE = frozenset("iljtfrI.,:;|!'()[] "), frozenset("mwMW@%")


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
            if "_" in key:
                key = key.rstrip("_").replace("_", "-")
            words.append(f'{key}="{shown}"')
    return f"<{' '.join(words)}>{inside}</{name}>" if inside else f"<{' '.join(words)}/>"


def lines_of(words: str) -> list[str]:
    """The lines of what Plotly shows as text, without its marks of bold and italic letters.

    >>> lines_of("<b>peak</b> of a&lt;b<br>layer <3>")
    ['peak of a<b', 'layer <3>']
    """
    if "<" not in words and "&" not in words and "\n" not in words:
        return [words]
    return [unescape(_TAG.sub("", each)) for each in _BREAK.split(words)]


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


def folded_to(lines: Iterable[str], width: float, size: float = SMALL) -> list[str]:
    """The lines broken at spaces so that each takes at most ``width`` pixels; one longer word is cut short.

    >>> folded_to(["operations of one step"], 90)
    ['operations of', 'one step']
    """
    found: list[str] = []
    for line in lines:
        if width_of(line, size) <= width:
            found.append(line)
            continue
        start = ""
        for word in line.split():
            whole = f"{start} {word}" if start else word
            if start and width_of(whole, size) > width:
                found.append(start)
                start = word
            else:
                start = whole
        found.append(start)
    return [_cut(each, width, size) for each in found]


def _cut(line: str, width: float, size: float) -> str:
    if width_of(line, size) <= width:
        return line
    while len(line) > 1 and width_of(line, size) + 0.8 * size > width:
        line = line[:-1]
    return f"{line}…"


def text(x: float, y: float, lines: Iterable[str], **attributes: object) -> str:
    """Lines of words of which the first has its baseline at ``y``."""
    first, *others = lines
    inside = escape(first, quote=False)
    if others:
        more = (element("tspan", escape(each, quote=False) or " ", x=float(x), dy=LINE) for each in others)
        inside = element("tspan", inside, x=float(x)) + "".join(more) if inside else "".join(more)
    return element("text", inside or " ", x=float(x), y=float(y), **attributes)


def hover(words: str) -> str:
    """A title, which a browser shows where the pointer rests."""
    return f"<title>{escape(words, quote=False)}</title>" if words else ""
