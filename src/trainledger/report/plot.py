"""Figures as a file: a page that opens offline, or an image; whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from html import escape
from importlib.util import find_spec
from typing import Any

from trainledger.report.html import NO_PLOTLY, document, plotly_js
from trainledger.report.style import Figure
from trainledger.report.table import WIDTH as COLUMNS
from trainledger.report.table import wrapped
from trainledger.spec.plain import check_target, finite, replace_file
from trainledger.spec.problem import InvalidInput, Problem

SUFFIXES = (".html", ".png", ".svg")
WIDTH, HEIGHT = 960, 420  # pixels of an image where the figure says no height
_NO_KALEIDO = (
    "an image needs kaleido, and a Chromium, Chrome or Edge for it to drive: pip install 'trainledger[web]'; "
    "the suffix .html needs neither"
)
_NO_BROWSER = "an image is drawn by a Chromium, Chrome or Edge, and none was found; install one, or take .html"


def check_plot(path: str | os.PathLike[str], field: str = "--plot") -> None:
    """Raise InvalidInput unless `write_plot` can write there: its suffix, its directory, and what draws an image."""
    where = os.fspath(path)
    stem, suffix = os.path.splitext(where)
    if suffix.lower() not in SUFFIXES:
        rule = f"the suffix says what is written, and must be one of {', '.join(SUFFIXES)}"
        raise InvalidInput([Problem(field, where, rule, f"{stem or 'figure'}.html")])
    check_target(where, field)
    if plotly_js() is None:
        raise InvalidInput([Problem(field, where, NO_PLOTLY[:1].lower() + NO_PLOTLY[1:])])
    if suffix.lower() != ".html" and find_spec("kaleido") is None:
        raise InvalidInput([Problem(field, where, _NO_KALEIDO, f"{stem}.html")])


def write_plot(
    figures: Mapping[str, Figure], path: str | os.PathLike[str], *, title: str, field: str = "--plot"
) -> str:
    """Write figures, by title, to out.html (all of them, nothing fetched) or out.png or out.svg (the first).

    The sentence that says what was written (`told`). Raises InvalidInput as `check_plot` does, and where there is no
    browser to draw an image.

    >>> write_plot({}, "out.gif", title="a run")
    Traceback (most recent call last):
    trainledger.spec.problem.InvalidInput: --plot = 'out.gif': the suffix says what is written, and must be one of \
.html, .png, .svg; nearest that works: out.html
    """
    check_plot(path, field)
    where = os.fspath(path)
    if not figures:
        raise InvalidInput([Problem(field, where, f"there is nothing to draw of {title}")])
    suffix = os.path.splitext(where)[1].lower()
    if suffix == ".html":
        replace_file(where, document(title, [f"<h1>{escape(title)}</h1>"], figures).encode())
        return told(where, [])
    first = next(iter(figures))
    replace_file(where, _image(first, figures[first], suffix[1:], where, field))
    return told(where, list(figures))


def told(where: str, names: Sequence[str]) -> str:
    """That a file was written, with the first of those figures alone, for a terminal of 80 columns."""
    if len(names) < 2:
        return f"Written to {where}"
    left = f"({names[0]} alone; an .html has {', '.join(names[1:])} too)"
    line = f"Written to {where} {left}"
    return line if len(line) <= COLUMNS else f"Written to {where}\n{wrapped(left)}"


def _image(name: str, figure: Figure, suffix: str, where: str, field: str) -> bytes:
    """A figure as kaleido draws it in a headless browser, without asking the network."""
    import logging

    import kaleido
    from kaleido.errors import BrowserClosedError, BrowserFailedError, ChromeNotFoundError

    logging.getLogger("kaleido").setLevel(logging.CRITICAL)
    logging.getLogger("choreographer").setLevel(logging.CRITICAL)
    options: dict[str, Any] = {
        "format": suffix, "width": figure["layout"].get("width", WIDTH), "scale": 2 if suffix == "png" else 1,
        "height": figure["layout"].get("height", HEIGHT),
    }  # fmt: skip
    try:
        image: bytes = kaleido.calc_fig_sync(_on_white(name, figure), opts=options, kopts={"mathjax": False})
    except ChromeNotFoundError:
        raise InvalidInput([Problem(field, where, _NO_BROWSER)]) from None
    except (BrowserClosedError, BrowserFailedError, TimeoutError) as error:
        found = str(error).strip().split("\n")[0] or type(error).__name__
        raise InvalidInput([Problem(field, where, f"the browser did not draw it: {found}; .html needs none")]) from None
    return image


def _on_white(name: str, figure: Figure) -> Figure:
    """The figure on white, under its name where it has no title of its own."""
    layout = dict(figure["layout"]) | {"paper_bgcolor": "white", "plot_bgcolor": "white"}
    layout.pop("modebar", None)
    if not layout.get("title"):
        margin = dict(layout.get("margin", {}))
        layout["margin"] = margin | {"t": margin.get("t", 30) + 40}
        layout["title"] = {"text": name, "x": 0, "xref": "paper", "xanchor": "left", "y": 0.98, "yanchor": "top"}
    drawn: Figure = finite({"data": figure["data"], "layout": layout})
    return drawn
