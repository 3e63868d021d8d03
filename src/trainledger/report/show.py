"""A document on standard output, as text or JSON, and its figures in a file."""

from __future__ import annotations

import json
import os
import sys

from trainledger.report.document import Document
from trainledger.report.table import WIDTH
from trainledger.report.terminal import has_colour, text
from trainledger.spec.plain import finite
from trainledger.spec.problem import printable


def check_figures(path: str | os.PathLike[str], field: str) -> None:
    """Raise InvalidInput where figures cannot be written to a file; asked before the work that they are made of."""
    from trainledger.report.plot import check_plot

    check_plot(path, field)


def show(
    document: Document, *, as_json: bool = False, plot: str | os.PathLike[str] | None = None, width: int = WIDTH
) -> None:
    """Print a document as ``width`` columns of text or as JSON, and write its figures to ``plot`` where that is given.

    What is not finite is null in JSON. What was written is said on standard error.
    """
    if as_json:
        print(json.dumps(finite(document.data()), indent=2, allow_nan=False, default=str))
    else:
        print(text(document, colour=has_colour(sys.stdout), width=width))
    if plot is not None:
        from trainledger.report.plot import write_plot

        written = write_plot(document.figures(), plot, title=document.title, about=document.about)
        print(printable(written), file=sys.stderr)
