"""A document as text of 80 columns or another width, in colour where a terminal has it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import TextIO

from trainledger.report.document import (
    Bars,
    Document,
    Facts,
    Items,
    Listing,
    Part,
    Section,
    Table,
    Terms,
    Text,
    shown,
    signed,
)
from trainledger.report.table import WIDTH, table, wrapped
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import printable
from trainledger.spec.units import format_percent

_BOLD, _DIM, _RED, _CYAN, _END = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[36m", "\x1b[0m"
_ALARMING = re.compile(r"[Dd]oes NOT fit|\bPARTIAL\b|\b[Ii]mpossible\b")
_NO_BREAK = "\u2060"  # where a line may not break
_MOST_NAMED = 4  # details
_INDENT = 12  # of a fact's text
_LABEL, _AMOUNT, _SHARE, _BAR = 26, 10, 8, 32  # columns of a bar; the amount's and the share's at least
_LONGEST_LABEL = 44
_NUMBER, _LEAST_SOURCE = 5, 6  # columns of a listing's numbers but for the first, and of its source


def text(document: Document, *, colour: bool = False, width: int = WIDTH, full: bool = False) -> str:
    """The verdict and the sections, apart by an empty line, without a trailing newline; details only where ``full``."""
    writer = _Writer(colour, width)
    shown = [section for section in document.sections if full or not section.detail]
    parts = ["\n".join(writer.section(section)) for section in shown]
    if document.verdict:
        parts.insert(0, writer.verdict(document.verdict))
    details = list(dict.fromkeys(section.detail for section in document.sections if section.detail))
    named = ", ".join(details[:_MOST_NAMED]) + (", ..." if len(details) > _MOST_NAMED else "")
    more = [f"--full ({named})"] if details and not full else []
    if more or document.more:
        parts.append(writer.more([*more, *document.more]))
    written = "\n\n".join(parts)
    return _ALARMING.sub(lambda match: f"{_RED}{match[0]}{_END}", written) if colour else written


def has_colour(stream: TextIO) -> bool:
    """Whether a stream is a terminal that shows colours, and NO_COLOR is not set (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@frozen
class _Writer:
    colour: bool
    width: int

    def verdict(self, sentence: str) -> str:
        return self._styled(self._wrapped(sentence), _BOLD)

    def more(self, commands: Sequence[str]) -> str:
        return self._styled(self._wrapped(f"More: {'; '.join(commands)}"), _DIM)

    def section(self, section: Section) -> Iterator[str]:
        if section.title:
            yield self._styled(self._wrapped(section.title), _BOLD)
        for part in section.parts:
            yield from self._part(part)

    def _part(self, part: Part) -> Iterator[str]:
        match part:
            case Table():
                head, rule, *body = table(part.columns, part.texts(), align=part.sides, width=self.width).split("\n")
                if any(part.columns):
                    yield from (self._styled(head, _BOLD), self._styled(rule, _DIM))
                yield from body
            case Facts():
                yield from self._facts(part)
            case Text():
                written = "\n".join(map(self._wrapped, part.lines))
                yield self._styled(written, _DIM) if part.note else written
            case Bars():
                yield from self._bars(part)
            case Listing():
                yield from self._listing(part)
            case Items():
                yield from self._items(part)
            case Terms():
                yield from self._terms(part)
            case _:
                yield printable(part.text)

    def _styled(self, words: str, style: str) -> str:
        """Each line in a separate style, so that a pager that cuts lines leaves none open."""
        return "\n".join(f"{style}{part}{_END}" for part in words.split("\n")) if self.colour and words else words

    def _wrapped(self, words: str, room: int = 0) -> str:
        return wrapped(words, self.width - room)

    def _facts(self, part: Facts) -> Iterator[str]:
        for name, said in part.pairs:
            # A number and its percent sign stay together.
            lines = self._wrapped(said.replace(" %", f"{_NO_BREAK}%"), _INDENT).replace(_NO_BREAK, " ").split("\n")
            first = f"{printable(name):<{_INDENT - 1}} "
            yield (self._styled(first, _CYAN) if name else first) + lines[0]
            yield from (" " * _INDENT + line for line in lines[1:])

    def _items(self, part: Items) -> Iterator[str]:
        apart = any("\n" in each.text for each in part.items)
        for at, item in enumerate(part.items, 1):
            head = f"{at:>2}. " if part.numbered else ""
            first, *others = "\n".join(self._wrapped(each, len(head)) for each in item.text.split("\n")).split("\n")
            yield head + first
            yield from (" " * len(head) + other for other in others)
            if item.code:
                yield self._styled(printable(item.code), _CYAN)
            if apart and at < len(part.items):
                yield ""

    def _listing(self, part: Listing) -> Iterator[str]:
        widths = [max(len(column), _NUMBER * bool(at)) for at, column in enumerate(part.columns)]
        room = max(_LEAST_SOURCE, self.width - sum(widths) - len(widths) - 1)

        def row(cells: tuple[str, ...], source: str) -> str:
            source = source.expandtabs(4)
            numbers = " ".join(cell.rjust(size) for cell, size in zip(cells, widths, strict=True))
            return printable(f"{numbers}  {source if len(source) <= room else f'{source[: room - 1]}…'}".rstrip())

        yield self._styled(row(part.columns, "source"), _BOLD)
        yield self._styled(row(tuple("-" * width for width in widths), "-" * room), _DIM)
        for line in part.lines:
            yield row(line.cells, line.source)
            for note in line.notes:
                first, *others = self._wrapped(note, 8).split("\n")
                yield f"      ^ {first}"
                yield from (f"        {other}" for other in others)

    def _terms(self, part: Terms) -> Iterator[str]:
        """The total and each line with its formula; a source that all lines share is printed once, under the title."""
        yield self._styled(self._between(part.title, shown(part.total, part.unit)), _BOLD)
        sources = {term.source for term in part.terms}
        shared = len(part.terms) > 1 and len(sources) == 1
        if shared:
            yield self._wrapped(f"({sources.pop()})")
        for term in part.terms:
            yield self._between(f"  {term.what}", f"{shown(term.value, part.unit)}  {term.basis}")
            for words in filter(None, (term.formula, "" if shared else term.source)):
                yield from (f"      {line}" for line in self._wrapped(words, 6).split("\n"))

    def _between(self, left: str, right: str) -> str:
        """Both in one line, the right one at the right edge; in two where they do not fit."""
        left, right = printable(left), printable(right)
        if len(left) + len(right) + 2 <= self.width:
            return left + right.rjust(self.width - len(left))
        return f"{self._wrapped(left)}\n{right.rjust(self.width)}"

    def _bars(self, part: Bars) -> Iterator[str]:
        """Each part with its amount, its share of the whole and a bar; a bar of ``-`` takes away."""
        total = part.ends[-1][2]
        highest = max(0, *(end for _, _, end in part.ends))
        amounts = [signed(end - start, part.unit).lstrip("+") for _, start, end in part.ends]
        shares = [format_percent((end - start) / total) if total else "" for _, start, end in part.ends]
        label = min(_LONGEST_LABEL, max(_LABEL, *(len(name) + 1 for name, _, _ in part.ends)))
        widths = (label, max(_AMOUNT, *map(len, amounts)), max(_SHARE, *map(len, shares)))
        room = min(_BAR, self.width - sum(widths) - 3)
        for (name, start, end), length, share in zip(part.ends, amounts, shares, strict=True):
            low, high = (round(room * each / highest) if highest else 0 for each in sorted((start, end)))
            bar = self._styled(("#" if end > start else "-") * (high - low), _CYAN if end > start else _RED)
            line = f"{printable(name):<{widths[0]}}{length:>{widths[1]}} {share:>{widths[2]}}  {' ' * low}{bar}"
            yield line.rstrip()
