"""A document on standard output, as text or JSON, and its charts in files: pages that open offline, or images."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from trainledger.report.chart import Chart
from trainledger.report.document import Document
from trainledger.report.table import WIDTH, wrapped
from trainledger.report.terminal import has_colour, text
from trainledger.spec.plain import check_target, finite, replace_file
from trainledger.spec.problem import InvalidInput, Problem, printable

SUFFIXES = (".html", ".png", ".svg")
NO_FONT = "this machine has no font for the words of a PNG"
_NO_RESVG = "a PNG needs resvg-py: pip install 'trainledger[web]'; the suffixes .html and .svg need nothing"


def show(
    document: Document,
    *,
    as_json: bool = False,
    full: bool = False,
    plot: str | os.PathLike[str] | None = None,
    width: int = WIDTH,
) -> None:
    """Print a document as ``width`` columns of text or as JSON, and write its figures to ``plot`` where that is given.

    Details are printed only where ``full``. What is not finite is null in JSON. Standard error says what was written.
    """
    if as_json:
        print(json.dumps(finite(document.data()), indent=2, allow_nan=False, default=str))
    else:
        print(text(document, colour=has_colour(sys.stdout), width=width, full=full))
    if plot is not None:
        written = write_plot(document.figures(), plot, title=document.title, about=document.about)
        print(printable(written), file=sys.stderr)


def check_plot(path: str | os.PathLike[str], field: str = "--plot") -> None:
    """Raise InvalidInput unless `write_plot` can write there: its suffix, its directory, and what draws a PNG."""
    where = os.fspath(path)
    stem, suffix = os.path.splitext(where)
    if suffix.lower() not in SUFFIXES:
        rule = f"the suffix says what is written, and must be one of {', '.join(SUFFIXES)}"
        raise InvalidInput([Problem(field, where, rule, f"{stem or 'figure'}.html")])
    check_target(where, field)
    if suffix.lower() == ".png" and find_spec("resvg_py") is None:
        raise InvalidInput([Problem(field, where, _NO_RESVG, f"{stem}.svg")])


def write_plot(
    charts: Sequence[Chart],
    path: str | os.PathLike[str],
    *,
    title: str,
    field: str = "--plot",
    about: Sequence[str] = (),
) -> str:
    """Write charts to out.html (nothing fetched), or one by one to out.png, out-2.png and so on, or .svg.

    ``about`` are sentences that a page has above them. The sentence that says what was written (`written`). Raises
    InvalidInput as `check_plot` does.

    >>> write_plot([], "out.gif", title="a run")
    Traceback (most recent call last):
    trainledger.InvalidInput: --plot = 'out.gif': the suffix says what is written, and must be one of \
.html, .png, .svg; nearest that works: out.html
    """
    check_plot(path, field)
    where = os.fspath(path)
    if not charts:
        raise InvalidInput([Problem(field, where, f"there is nothing to draw of {title}")])
    stem, ending = os.path.splitext(where)
    suffix = ending.lower()
    if suffix == ".html":
        from trainledger.report.html import paragraphs, whole_page

        replace_file(where, whole_page(title, paragraphs(about), charts).encode())
        return written({where: ""})
    files = {where if at == 1 else f"{stem}-{at}{ending}": chart for at, chart in enumerate(charts, 1)}
    for each in files:
        check_target(each, field)
    draw = png if suffix == ".png" else str.encode
    for file, image in [(file, draw(chart.svg())) for file, chart in files.items()]:
        if image is None:
            raise InvalidInput([Problem(field, where, NO_FONT, f"{stem}.svg")])
        replace_file(file, image)
    return written({file: chart.title for file, chart in files.items()})


def written(files: Mapping[str, str]) -> str:
    """That files were written, each with the chart it holds where there are several, a line each.

    >>> print(written({"out.png": "Time", "out-2.png": "Memory"}))
    Written to out.png (Time)
    Written to out-2.png (Memory)
    """
    lines = []
    for file, name in files.items():
        shown = f"({name})" if len(files) > 1 else ""
        line = f"Written to {file} {shown}".rstrip()
        lines.append(line if len(line) <= WIDTH else f"Written to {file}\n{wrapped(shown)}".rstrip())
    return "\n".join(lines)


def png(svg: str) -> bytes | None:
    """An SVG as a PNG of twice its pixels; None without resvg-py, or without a font: 0.5 leaves words out silently."""
    if find_spec("resvg_py") is None:
        return None
    import resvg_py

    image, word, none = (
        bytes(resvg_py.svg_to_bytes(svg_string=figure, zoom=2))
        for figure in (svg, Chart("i", ()).svg(), Chart(" ", ()).svg())
    )
    return None if word == none else image
