"""A document as HTML: a fragment for a notebook, and pages of figures that open offline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import zip_longest
from pathlib import Path

from trainledger.report.chart import COLOURS, Chart
from trainledger.report.document import (
    Bars,
    Code,
    Document,
    Facts,
    Items,
    Listing,
    Part,
    Table,
    Terms,
    Text,
    shown,
    signed,
)
from trainledger.report.draw.chart import drawing
from trainledger.report.draw.elements import STYLE, element, paint
from trainledger.spec.units import format_percent

# Nothing is fetched and no script runs, whatever the data contains: the policy forbids it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

_NOTEBOOK = "\n" + Path(__file__).with_name("notebook.css").read_text(encoding="utf-8")
_STYLE = "\n" + Path(__file__).with_name("page.css").read_text(encoding="utf-8") + STYLE


def fragment(document: Document) -> str:
    """The document's text, tables and bars as HTML without scripts, as a notebook shows it."""
    return f'<div class="trainledger"><style>{_NOTEBOOK}</style>{"".join(parts(document))}</div>'


def parts(document: Document) -> Iterator[str]:
    """The verdict and the sections as parts of a page; details are folded."""
    if document.verdict:
        yield f"<p><strong>{escape(document.verdict)}</strong></p>"
    for section in document.sections:
        if section.detail:
            yield f"<details><summary>{escape(section.detail)}</summary>"
        if section.title:
            yield f"<h2>{escape(section.title)}</h2>"
        yield from (_part(part) for part in section.parts)
        if section.detail:
            yield "</details>"


def _part(part: Part) -> str:
    match part:
        case Table():
            return table_html(part)
        case Facts():
            return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(said)}</dd>' for name, said in part.pairs)}</dl>"
        case Text():
            return "".join(paragraphs(part.lines) if part.note else (f"<p>{escape(line)}</p>" for line in part.lines))
        case Bars():
            return _bars(part)
        case Items():
            code = [f"<pre>{escape(item.code)}</pre>" if item.code else "" for item in part.items]
            texts = zip((escape(item.text).replace("\n", "<br>") for item in part.items), code, strict=True)
            return f"<ol>{''.join(f'<li>{text}{pasted}</li>' for text, pasted in texts)}</ol>"
        case Terms():
            columns = (part.title, shown(part.total, part.unit), "basis", "formula", "source")
            rows = tuple((term.what, term.value, term.basis, term.formula, term.source) for term in part.terms)
            return table_html(Table("", columns, rows, units=("", part.unit), align="lrlll"))
        case Listing():
            return _listing(part)
        case Code():
            return f"<pre>{escape(part.text)}</pre>"


def table_html(part: Table) -> str:
    """A table with its numbers to the right."""
    classes = [' class="number"' if side == "r" else "" for side in part.sides]

    def row(cells: Sequence[str], tag: str) -> str:
        tags = [tag if cell else "td" for cell in cells]  # a heading says something
        own = (f"<{tag}{each}>{escape(cell)}</{tag}>" for tag, each, cell in zip(tags, classes, cells, strict=True))
        return f"<tr>{''.join(own)}</tr>"

    body = "".join(row(text, "td") for text in part.texts())
    head = f"<thead>{row(part.columns, 'th')}</thead>" if any(part.columns) else ""
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'


def _listing(part: Listing) -> str:
    """Source with heat behind the numbers."""
    rows = []
    for line in part.lines:
        numbers = zip_longest(line.cells, line.shares, fillvalue=0)
        cells = "".join(f"<td{_heat(float(share))}>{escape(str(cell))}</td>" for cell, share in numbers)
        marked = ' class="found"' if line.marked else ""
        rows.append(f'<tr{marked}>{cells}<td class="code">{escape(line.source)}</td></tr>')
        wide = f'<tr class="mark"><td colspan="{len(line.cells) + 1}">'
        rows += (f"{wide}{escape(note)}</td></tr>" for note in line.notes)
    heads = "".join(f"<th>{escape(column)}</th>" for column in part.columns)
    head = f'<thead><tr>{heads}<th class="code">source</th></tr></thead>'
    return f'<div class="wide"><table class="source">{head}<tbody>{"".join(rows)}</tbody></table></div>'


def _heat(share: float) -> str:
    return f' style="background: rgba(230,159,0,{min(1, 0.1 + share):.2f})"' if share > 0.01 else ""


def _bars(part: Bars) -> str:
    """Bars that begin where the one before ended; without styles, which a page's policy may forbid."""
    total = part.ends[-1][2]
    highest = max([1, *(end for _, _, end in part.ends)])
    rows = []
    for name, start, end in part.ends:
        low, high = (100 * max(0, each) / highest for each in sorted((start, end)))
        colour = COLOURS[0] if name == "in all" else COLOURS[5] if end > start else COLOURS[2]
        bar = element("rect", x=low, width=high - low, height=1, **paint(colour))
        drawn = f'<svg class="bar" viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">{bar}</svg>'
        share = format_percent((end - start) / total) if total else ""
        numbers = f'<td class="number">{signed(end - start, part.unit).lstrip("+")}</td><td class="number">{share}</td>'
        rows.append(f'<tr><td>{escape(name)}</td>{numbers}<td class="bars">{drawn}</td></tr>')
    return f"<table>{''.join(rows)}</table>"


def whole_page(title: str, parts: Iterable[str], charts: Iterable[Chart]) -> str:
    """A page that opens offline and has no scripts: parts of HTML, then charts under their titles."""
    lines = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>",
        *parts,
    ]
    for chart in charts:
        heading = "" if chart.title == title else f"<h2>{escape(chart.title)}</h2>"
        lines.append(f"{heading}{drawing(chart)}")
    return "\n".join([*lines, "</body></html>\n"])


def paragraphs(sentences: Sequence[str]) -> list[str]:
    """Sentences as parts of a page."""
    return [f'<p class="note">{escape(sentence)}</p>' for sentence in sentences]
