"""Answers, and the document of one: headed sections of facts, tables with units, bars, text and figures, built once.

Writers read it: `report.terminal` (text of 80 columns), `report.html` (a page, a notebook), `report.show` (JSON on
standard output, figures in a file). `records` gives a table to pandas or polars.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from importlib import import_module
from typing import Any

from trainledger.report.chart import Chart
from trainledger.spec.frozen import frozen
from trainledger.spec.units import (
    format_count,
    format_flops,
    format_flops_per_second,
    format_nbytes,
    format_percent,
    format_seconds,
)

Number = int | float | Fraction


@frozen
class Amount:
    """A number and its unit (of `UNITS`), where the unit is not that of the whole column."""

    value: Number
    unit: str


Cell = str | int | float | Amount | None

# How the numbers of each unit are written.
UNITS: dict[str, Callable[[float], str]] = {
    "": str,
    "integer": lambda value: f"{value:,}",
    "count": format_count,
    "tokens": lambda value: f"{format_count(value)} tokens",
    "tokens_per_second": format_count,
    "passes": lambda value: f"{value:.3g} passes",
    "factor": lambda value: f"{value:.3g}x",
    "ratio": lambda value: f"{value:,.3g}",
    "rate": lambda value: f"{value:,.0f}",
    "amount": lambda value: f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}",
    "nbytes": format_nbytes,
    "nbytes_per_second": lambda value: f"{format_nbytes(value)}/s",
    "flops": format_flops,
    "flops_per_second": format_flops_per_second,
    "seconds": format_seconds,
    "nanoseconds": lambda value: format_seconds(value / 10**9),
    "share": format_percent,
    "change": lambda value: format_percent(value, signed=True),
}


@frozen
class Table:
    """Rows under columns; ``units`` has one of `UNITS` for each column of numbers (absent or empty: text as it is).

    ``name`` is that of `records`. ``align`` has a letter per column, ``l`` or ``r``; where it is silent, numbers stand
    to the right.
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    units: tuple[str, ...] = ()
    align: str = ""

    @property
    def sides(self) -> str:
        """``align`` with a letter for every column."""
        return self.align + "".join(
            "r" if any(not isinstance(row[at], str | None) for row in self.rows) else "l"
            for at in range(len(self.align), len(self.columns))
        )

    def texts(self) -> list[list[str]]:
        """The cells as they are printed."""
        units = (*self.units, *("" for _ in range(len(self.columns) - len(self.units))))
        return [[_text(cell, unit) for cell, unit in zip(row, units, strict=True)] for row in self.rows]


@frozen
class Facts:
    """A name and what is said of it to a line; a fact without a name goes on with the one before."""

    pairs: tuple[tuple[str, str], ...]


@frozen
class Text:
    """Sentences, each on separate lines; ``note`` marks those that qualify the parts above them."""

    lines: tuple[str, ...]
    note: bool = False


@frozen
class Bars:
    """Signed parts in the order in which they add up, each bar beginning where the one before it ended."""

    bars: tuple[tuple[str, int], ...]
    unit: str = "nanoseconds"

    @property
    def ends(self) -> list[tuple[str, int, int]]:
        """What each bar is, where it begins and where it ends: those that are not 0, and the whole.

        >>> Bars((("compute", 3), ("overlap", -1), ("nothing", 0))).ends
        [('compute', 0, 3), ('overlap', 3, 2), ('in all', 0, 2)]
        """
        ends, at = [], 0
        for name, amount in self.bars:
            if amount:
                ends.append((name, at, at + amount))
            at += amount
        return [*ends, ("in all", 0, at)]


@frozen
class Code:
    """Lines to paste into a file or a shell, as they are."""

    text: str


@frozen
class Listed:
    """A line of source with short numbers before it and ``notes`` below it.

    ``shares`` say how much of a whole each number is, for its background colour; ``marked`` lines are highlighted.
    """

    cells: tuple[str, ...]
    source: str
    notes: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    marked: bool = False


@frozen
class Listing:
    """Lines of source in columns as wide as their heads and at least 5, the source cut where a line is full."""

    columns: tuple[str, ...]
    lines: tuple[Listed, ...]


@frozen
class Item:
    """One entry of a list, of one line or several, with a command to paste below it."""

    text: str
    code: str = ""


@frozen
class Items:
    """A list, numbered unless it is one remark with its command."""

    items: tuple[Item, ...]
    numbered: bool = True


@frozen
class Term:
    """One line of a sum: what it is, its value, how that is known, its formula with numbers, and the rule's source."""

    what: str
    value: float
    basis: str
    formula: str
    source: str


@frozen
class Terms:
    """Lines that add up to a total."""

    title: str
    total: float
    terms: tuple[Term, ...]
    unit: str


Part = Table | Facts | Text | Bars | Code | Listing | Items | Terms


@frozen
class Section:
    """Parts under one title, which may be empty.

    A section with a ``detail`` is no part of the short answer; ``detail`` names it there.
    """

    title: str
    parts: tuple[Part, ...]
    detail: str = ""


@frozen
class Document:
    """One answer, ready to be written: the verdict, then sections, of which the short answer leaves out the details.

    ``more`` are commands that tell more. ``about`` are the sentences that a page of charts has above them. ``data``
    makes what JSON holds, ``figures`` the charts; both are made only on request.
    """

    title: str
    sections: tuple[Section, ...]
    about: tuple[str, ...] = ()
    data: Callable[[], Mapping[str, Any]] = dict
    figures: Callable[[], Sequence[Chart]] = tuple
    verdict: str = ""
    more: tuple[str, ...] = ()

    @property
    def tables(self) -> dict[str, Table]:
        """The tables by name; bars of time are one of seconds by cause."""
        parts = [part for section in self.sections for part in section.parts]
        tables = {part.name: part for part in parts if isinstance(part, Table)}
        times = [part for part in parts if isinstance(part, Bars) and part.unit == "nanoseconds"]
        return tables | ({"time": _in_seconds(times[-1])} if times else {})


def _in_seconds(bars: Bars) -> Table:
    rows = tuple((cause, nanoseconds / 1e9) for cause, nanoseconds in bars.bars)
    return Table("time", ("cause", "seconds"), rows, units=("", "seconds"))


def records(document: Document, name: str = "") -> list[dict[str, Any]]:
    """The rows of a table as plain dicts, for ``pandas.DataFrame(rows)``: numbers in whole units, not as texts.

    Without a ``name`` it is the first. Raises KeyError with the names that there are.

    >>> bytes_of = Table("memory", ("category", "bytes"), (("parameters", 2_000_000),), units=("", "nbytes"))
    >>> records(Document("a run", (Section("", (bytes_of,)),)))
    [{'category': 'parameters', 'bytes': 2000000}]
    """
    tables = document.tables
    name = name or next(iter(tables), "")
    if name not in tables:
        raise KeyError(f"no table {name!r}; there are: {', '.join(tables)}")
    table = tables[name]
    keys = [column or ("name" if not at else f"column {at + 1}") for at, column in enumerate(table.columns)]
    return [{key: _value(cell) for key, cell in zip(keys, row, strict=True)} for row in table.rows]


def _value(cell: Cell) -> Any:
    return cell.value if isinstance(cell, Amount) else cell


def _text(cell: Cell, unit: str) -> str:
    if isinstance(cell, Amount):
        return shown(cell.value, cell.unit)
    return cell if isinstance(cell, str) else shown(cell, unit)


def shown(value: Number | None, unit: str) -> str:
    """A number in its unit; empty where there is none.

    >>> shown(2_000_000, "nbytes"), shown(None, "seconds"), shown(0.5, "share"), shown(0, "flops")
    ('2 MB', '', '50.0 %', '0')
    """
    if value is None:
        return ""
    if not value and unit in ("nbytes", "flops", "seconds", "nanoseconds"):
        return "0"
    if isinstance(value, Fraction):
        value = int(value) if value.denominator == 1 else float(value)
    return UNITS[unit](value)


def signed(value: Number, unit: str) -> str:
    """A difference with its sign, which what rounds to nothing has not.

    >>> signed(-2_000_000, "nbytes"), signed(0, "nbytes"), signed(1e-9, "share")
    ('-2 MB', '0', '0.0 %')
    """
    if not value:
        return "0"
    text = shown(-value if value < 0 else value, unit)
    if not any(each in "123456789" for each in text):
        return text
    return ("+" if value > 0 else "-") + text


Content = Section | Part | str | Iterable[str] | None


def section(title: str, *content: Part | str | Iterable[str] | None, detail: str = "") -> Section:
    """A section of parts, a string or strings being lines of text; what is None or has no lines is left out.

    >>> section("Memory", "It fits.", None, ["Times are bounds.", "No run is faster."]).parts
    (Text(lines=('It fits.',), note=False), Text(lines=('Times are bounds.', 'No run is faster.'), note=False))
    """
    return Section(title, tuple(part for each in content if (part := _part(each)) is not None), detail)


def sections(*content: Content) -> tuple[Section, ...]:
    """Sections for `Document`: what is no section is one without a title; what is None or empty is left out."""
    found = (each if isinstance(each, Section) else section("", each) for each in content)
    return tuple(each for each in found if each.parts)


def details(name: str, *content: Content) -> tuple[Section, ...]:
    """Sections that are no part of the short answer, where ``name`` stands for them."""
    return tuple(replace(part, detail=name) for part in sections(*content))


def _part(content: Part | str | Iterable[str] | None) -> Part | None:
    if isinstance(content, str):
        return Text((content,)) if content else None
    if content is None or isinstance(content, Part):
        return None if isinstance(content, Text) and not content.lines else content
    lines = tuple(content)
    return Text(lines) if lines else None


def notes(sentences: Iterable[str]) -> Text:
    """Sentences that qualify the answer."""
    return Text(tuple(sentences), note=True)


class Answer:
    """A result that prints as its document, whose records go to pandas or polars, and which a notebook shows as HTML.

    The rooms that answer know nothing of reports: ``report`` names the module of `trainledger.answers` whose
    ``page(answer)`` writes the answer, and it is imported when the answer is shown.
    """

    _report: str

    def __init_subclass__(cls, *, report: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        if report:
            cls._report = report

    def document(self, **options: Any) -> Document:
        """The answer as headed tables, facts, bars and figures (`trainledger.report.document`).

        ``options`` are those of its report's ``page``, such as ``most`` rows of its tables.
        """
        made: Document = import_module(f"trainledger.answers.{self._report}").page(self, **options)
        return made

    def records(self, table: str = "") -> list[dict[str, Any]]:
        """A table of the document as dicts of numbers, for ``pandas.DataFrame(...)``; raises KeyError (its names)."""
        return records(self.document(), table)

    def __str__(self) -> str:
        return str(import_module("trainledger.report.terminal").text(self.document()))

    def _repr_html_(self) -> str:
        return str(import_module("trainledger.report.html").fragment(self.document()))
