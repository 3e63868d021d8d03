"""Colours as attributes, each with a class, so that the stylesheet of a page can change it in the dark."""

from __future__ import annotations

import re

from trainledger.report.style import COLOURS, DARK, GREY

_CLASS = {
    DARK: "ink", "#000": "ink", "#555": "muted", GREY: "muted", "#e4e4e4": "grid", "#bbb": "faint", "#dddddd": "pale",
    "#aaaaaa": "faint", "#999": "axis", "#ffffff": "paper", "white": "paper", "#fff": "paper",
    **{colour: f"c{at}" for at, colour in enumerate(COLOURS)},
}  # fmt: skip
_LIGHT = {name: colour for colour, name in reversed(_CLASS.items())} | {"band": "#000000"}
# What reads better on a dark page than the colour of a light one.
_DARK = {
    "ink": "#e8e6e3", "muted": "#aaa8a4", "grid": "#34373c", "faint": "#6a6d73", "axis": "#7d8087", "pale": "#4a4d52",
    "paper": "#17191c", "band": "#ffffff", "c0": "#2f8bd0", "c2": "#16b486", "c4": "#8fd0f5", "c5": "#ec7c3a",
    "c8": "#c9c7c3", "c9": "#8f86e6",
}  # fmt: skip


def _rules(name: str, light: str) -> str:
    colour = f"var(--{name},light-dark({light},{_DARK.get(name, light)}))"
    return f".{name}{{fill:{colour}}}.{name}-line{{stroke:{colour}}}"


# By this stylesheet drawings follow the color-scheme of their page. A class is a colour's name for a fill and has -line
# behind it for a stroke; a page that has a variable of the name (--ink) gives its own colour.
STYLE = f"@supports (color:light-dark(#000,#fff)){{{''.join(_rules(*each) for each in _LIGHT.items())}}}"
_RGBA = re.compile(r"rgba\((\d+), *(\d+), *(\d+), *([\d.]+)\)")
_DASHES = {"dash": "6 4", "dot": "2 4", "dashdot": "6 3 2 3", "longdash": "10 5"}


def paint(
    fill: str | None = None, stroke: str | None = None, width: float = 1.0, dash: str = "", opacity: float = 1.0
) -> dict[str, object]:
    """The attributes of a fill and a stroke; None leaves either out.

    >>> paint(fill="rgba(0,0,0,0.045)")
    {'fill': '#000000', 'fill_opacity': '0.045', 'class_': 'band'}
    >>> paint(stroke="#e4e4e4")
    {'fill': 'none', 'stroke': '#e4e4e4', 'class_': 'grid-line'}
    """
    classes = []
    found: dict[str, object] = {"fill": "none"}
    if fill is not None:
        colour, share, name = _read(fill)
        found |= {"fill": colour} | _opacity("fill_opacity", share * opacity)
        classes.append(name)
    if stroke is not None and width:
        colour, share, name = _read(stroke)
        found |= {"stroke": colour} | _opacity("stroke_opacity", share * opacity)
        if width != 1:
            found["stroke_width"] = float(width)
        if dash in _DASHES:
            found["stroke_dasharray"] = _DASHES[dash]
        classes.append(name and f"{name}-line")
    names = " ".join(each for each in classes if each)
    return found | {"class_": names} if names else found


def lettered(colour: str) -> dict[str, object]:
    """The attributes of words over what is drawn: an edge of paper around each letter.

    >>> lettered("#222222")["class_"]
    'ink paper-line'
    """
    return paint(colour, "#ffffff", 3) | {"paint_order": "stroke", "stroke_linejoin": "round"}


def is_clear(colour: str) -> bool:
    """Whether nothing is seen of a colour."""
    return _read(colour)[1] == 0


def _opacity(name: str, share: float) -> dict[str, object]:
    return {} if share == 1 else {name: f"{share:.4g}"}


def _read(colour: str) -> tuple[str, float, str]:
    """A colour without its opacity, the opacity, and the class."""
    found = _RGBA.fullmatch(colour)
    if found is None:
        return colour, 1.0, _CLASS.get(colour, "")
    red, green, blue, share = found.groups()
    plain = f"#{int(red):02x}{int(green):02x}{int(blue):02x}"
    name = {"#000000": "band", "#ffffff": "paper"}.get(plain) or _CLASS.get(plain.upper(), "")
    return plain, float(share), name
