"""A document as text of 80 columns, in colour where a terminal has it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TextIO

from trainledger.document import Bars, Document, Facts, Items, Part, Section, Table, Terms, Text, shown
from trainledger.report.table import WIDTH, table, wrapped
from trainledger.spec.problem import printable
from trainledger.units import format_percent

_BOLD, _DIM, _RED, _CYAN, _END = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[36m", "\x1b[0m"
_ALARMING = re.compile(r"[Dd]oes NOT fit|\bPARTIAL\b|\b[Ii]mpossible\b")
_NO_BREAK = "\u2060"  # where a line may not break
_INDENT = 12  # of what is said of a fact
_LABEL, _AMOUNT, _SHARE, _BAR = 26, 10, 8, 32  # columns of a bar; the amount's and the share's at least


def text(document: Document, *, colour: bool = False) -> str:
    """The whole document, sections apart by an empty line, without a trailing newline."""
    written = "\n\n".join("\n".join(_section(each, colour)) for each in document.sections)
    return _ALARMING.sub(lambda found: f"{_RED}{found[0]}{_END}", written) if colour else written


def has_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal that shows colours, and NO_COLOR is not set (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _section(section: Section, colour: bool) -> Iterator[str]:
    if section.title:
        yield _styled(wrapped(section.title), _BOLD, colour)
    for part in section.parts:
        yield _part(part, colour)


def _part(part: Part, colour: bool) -> str:
    match part:
        case Table():
            return _table(part, colour)
        case Facts():
            return "\n".join(_facts(part, colour))
        case Text():
            return _styled("\n".join(wrapped(each) for each in part.lines), _DIM, colour and part.note)
        case Bars():
            return _bars(part, colour)
        case Items():
            return "\n".join(_items(part, colour))
        case Terms():
            return "\n".join(_terms(part, colour))
    return printable(part.text)


def _styled(words: str, style: str, colour: bool) -> str:
    """Each line in a style of its own, so that a pager that cuts lines leaves none open."""
    return "\n".join(f"{style}{each}{_END}" for each in words.split("\n")) if colour else words


def _table(part: Table, colour: bool) -> str:
    head, rule, *body = table(part.columns, part.texts(), align=part.sides).split("\n")
    above = [_styled(head, _BOLD, colour), _styled(rule, _DIM, colour)] if any(part.columns) else []
    return "\n".join([*above, *body])


def _facts(part: Facts, colour: bool) -> Iterator[str]:
    for name, said in part.pairs:
        # A number and its percent sign stay together.
        lines = wrapped(said.replace(" %", f"{_NO_BREAK}%"), WIDTH - _INDENT).replace(_NO_BREAK, " ").split("\n")
        first = f"{printable(name):<{_INDENT - 1}} "
        yield _styled(first, _CYAN, colour and bool(name)) + lines[0]
        yield from (" " * _INDENT + each for each in lines[1:])


def _items(part: Items, colour: bool) -> Iterator[str]:
    for at, item in enumerate(part.items, 1):
        head = f"{at:>2}. " if part.numbered else ""
        first, *others = wrapped(item.text, WIDTH - len(head)).split("\n")
        yield head + first
        yield from (" " * len(head) + each for each in others)
        if item.code:
            yield _styled(printable(item.code), _CYAN, colour)


def _terms(part: Terms, colour: bool) -> Iterator[str]:
    """The total and each line with its formula; a source that all lines share stands once, under the title."""
    yield _styled(_between(part.title, shown(part.total, part.unit)), _BOLD, colour)
    sources = {each.source for each in part.terms}
    shared = len(part.terms) > 1 and len(sources) == 1
    if shared:
        yield wrapped(f"({sources.pop()})")
    for each in part.terms:
        yield _between(f"  {each.what}", f"{shown(each.value, part.unit)}  {each.basis}")
        for text in (each.formula, *([] if shared else [each.source])):
            yield from (f"      {line}" for line in wrapped(text, WIDTH - 6).split("\n"))


def _between(left: str, right: str) -> str:
    """Both in one line, the right one at the right edge; in two where they do not fit."""
    left, right = printable(left), printable(right)
    if len(left) + len(right) + 2 <= WIDTH:
        return left + right.rjust(WIDTH - len(left))
    return "\n".join([*wrapped(left).split("\n"), right.rjust(WIDTH)])


def _bars(part: Bars, colour: bool) -> str:
    """Each part with its amount, its share of the whole and a bar; a bar of ``-`` takes away, and 0 is left out."""
    total = sum(amount for _, amount in part.bars)
    ends, at = [], 0
    for name, amount in part.bars:
        if amount:
            ends.append((name, at, at + amount))
        at += amount
    highest = max([0, *(end for _, _, end in ends)])
    ends.append(("in all", 0, total))
    texts = [(shown(abs(end - start), part.unit), end < start) for _, start, end in ends]
    amounts = [f"-{each}" if negative else each for each, negative in texts]
    shares = [format_percent((end - start) / total) if total else "" for _, start, end in ends]
    widths = (_LABEL, max(_AMOUNT, *map(len, amounts)), max(_SHARE, *map(len, shares)))
    room = min(_BAR, WIDTH - sum(widths) - 3)
    lines = []
    for (name, start, end), length, share in zip(ends, amounts, shares, strict=True):
        low, high = (round(room * each / highest) if highest else 0 for each in sorted((start, end)))
        bar = ("#" if end > start else "-") * (high - low)
        bar = " " * low + (_styled(bar, _CYAN if end > start else _RED, colour) if bar else "")
        lines.append(f"{printable(name):<{widths[0]}}{length:>{widths[1]}} {share:>{widths[2]}}  {bar}".rstrip())
    return "\n".join(lines)
