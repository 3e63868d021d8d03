"""Figures as a file: a page that opens offline, or an image; whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from html import escape
from importlib.util import find_spec
from textwrap import wrap
from typing import Any

from trainledger.report.document import Figure
from trainledger.report.html import page, paragraphs
from trainledger.report.style import key_of, titled, untitled
from trainledger.report.svg import WIDTH, standalone
from trainledger.report.table import WIDTH as COLUMNS
from trainledger.report.table import wrapped
from trainledger.spec.plain import check_target, finite, replace_file
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import ceil_div

SUFFIXES = (".html", ".png", ".svg")
HEIGHT = 420  # pixels of an image where the figure says no height
_LEGEND_LINE = 20  # pixels
_LINE, _SMALL = 16, {"size": 12}  # pixels of a line of the key below a figure, and its letters
_NO_KALEIDO = (
    "a PNG needs kaleido, and a Chromium, Chrome or Edge for it to drive: pip install 'trainledger[web]'; "
    "the suffixes .html and .svg need neither"
)
_NO_BROWSER = "a PNG is drawn by a Chromium, Chrome or Edge, and none was found; install one, or take .html or .svg"


def check_plot(path: str | os.PathLike[str], field: str = "--plot") -> None:
    """Raise InvalidInput unless `write_plot` can write there: its suffix, its directory, and what draws a PNG."""
    where = os.fspath(path)
    stem, suffix = os.path.splitext(where)
    if suffix.lower() not in SUFFIXES:
        rule = f"the suffix says what is written, and must be one of {', '.join(SUFFIXES)}"
        raise InvalidInput([Problem(field, where, rule, f"{stem or 'figure'}.html")])
    check_target(where, field)
    if suffix.lower() == ".png" and find_spec("kaleido") is None:
        raise InvalidInput([Problem(field, where, _NO_KALEIDO, f"{stem}.html")])


def write_plot(
    figures: Mapping[str, Figure],
    path: str | os.PathLike[str],
    *,
    title: str,
    field: str = "--plot",
    about: Sequence[str] = (),
) -> str:
    """Write figures, by title, to out.html (nothing fetched), or one by one to out.png, out-2.png and so on, or .svg.

    ``about`` are sentences that a page has above them. The sentence that says what was written (`written`). Raises
    InvalidInput as `check_plot` does, and where there is no browser to draw a PNG.

    >>> write_plot({}, "out.gif", title="a run")
    Traceback (most recent call last):
    trainledger.InvalidInput: --plot = 'out.gif': the suffix says what is written, and must be one of \
.html, .png, .svg; nearest that works: out.html
    """
    check_plot(path, field)
    where = os.fspath(path)
    if not figures:
        raise InvalidInput([Problem(field, where, f"there is nothing to draw of {title}")])
    stem, ending = os.path.splitext(where)
    suffix = ending.lower()
    if suffix == ".html":
        replace_file(where, page(title, paragraphs(about), figures).encode())
        return written({where: ""})
    files = {where if at == 1 else f"{stem}-{at}{ending}": name for at, name in enumerate(figures, 1)}
    for each in files:
        check_target(each, field)
    images = {
        file: standalone(figures[name], name).encode() if suffix == ".svg" else _png(name, figures[name], where, field)
        for file, name in files.items()
    }
    for file, image in images.items():
        replace_file(file, image)
    return written(files)


def written(files: Mapping[str, str]) -> str:
    """That files were written, each with the figure it holds where there are several, a line each.

    >>> print(written({"out.png": "Time", "out-2.png": "Memory"}))
    Written to out.png (Time)
    Written to out-2.png (Memory)
    """
    lines = []
    for file, name in files.items():
        shown = f"({name})" if len(files) > 1 else ""
        line = f"Written to {file} {shown}".rstrip()
        lines.append(line if len(line) <= COLUMNS else f"Written to {file}\n{wrapped(shown)}".rstrip())
    return "\n".join(lines)


def _png(name: str, figure: Figure, where: str, field: str) -> bytes:
    """A figure as kaleido draws it in a headless browser, without asking the network."""
    import logging

    import kaleido
    from kaleido.errors import BrowserClosedError, BrowserFailedError, ChromeNotFoundError

    logging.getLogger("kaleido").setLevel(logging.CRITICAL)
    logging.getLogger("choreographer").setLevel(logging.CRITICAL)
    drawn = _on_white(name, figure)
    options: dict[str, Any] = {
        "format": "png", "width": drawn["layout"].get("width", WIDTH), "scale": 2,
        "height": drawn["layout"].get("height", HEIGHT),
    }  # fmt: skip
    try:
        image: bytes = kaleido.calc_fig_sync(drawn, opts=options, kopts={"mathjax": False})
    except ChromeNotFoundError:
        raise InvalidInput([Problem(field, where, _NO_BROWSER)]) from None
    except (BrowserClosedError, BrowserFailedError, TimeoutError) as error:
        found = str(error).strip().split("\n")[0] or type(error).__name__
        raise InvalidInput(
            [Problem(field, where, f"the browser did not draw it: {found}; .html and .svg need none")]
        ) from None
    return image


def _legend_lines(figure: Figure) -> int:
    """About how many lines a legend has in an image: its names are in columns as wide as the longest."""
    drawn = [each.get("name", "") for each in figure["data"] if each.get("showlegend", True)]
    column = 60 + 8 * max(map(len, drawn), default=0)
    return max(1, ceil_div(len(drawn), max(1, (WIDTH - 110) // column)))


def _on_white(name: str, figure: Figure) -> Figure:
    """The figure on white, under its name where it has no title, what its numbers name below it."""
    layout = dict(figure["layout"]) | {"paper_bgcolor": "white", "plot_bgcolor": "white"}
    layout.pop("modebar", None)
    title = layout.get("title", {}).get("text") or name
    layout = untitled(layout)
    layout["height"] += _LEGEND_LINE * (_legend_lines(figure) - 1)
    key = [wrap(f"{number}. {each}", 125) for number, each in enumerate(key_of(layout), 1)]
    if key:
        room = _LINE * sum(map(len, key))
        layout["height"] += room
        layout["margin"] = layout["margin"] | {"b": layout["margin"]["b"] + room}
        below = {"xref": "paper", "x": 0, "xanchor": "left", "yref": "paper", "y": 0, "yanchor": "top", "yshift": -55}
        named = {"text": "<br>".join(escape(each) for lines in key for each in lines), "align": "left"}
        layout["annotations"] = [*layout.get("annotations", ()), below | named | {"showarrow": False, "font": _SMALL}]
    layout = titled(layout, title)
    drawn: Figure = finite({"data": figure["data"], "layout": layout})
    return drawn
