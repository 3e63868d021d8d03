"""Generated pages of docs and their tables: a page has text and short tables, the long ones are CSV files beside it.

A generator makes a `Page`; ``page.write()`` writes it with its tables, and a test asserts that ``page.stale()`` is
empty: that every file is what would be written today.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
_NUMBER = re.compile(r"([+-]?[\d,]*\d(?:\.\d+)?) ?%?")


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of a page; columns whose name ends in a colon are numbers.

    >>> print(markdown(("device", "rows:"), [("h100-sxm", "12")]), end="")
    | device | rows |
    |---|--:|
    | h100-sxm | 12 |
    """
    lines = [f"| {' | '.join(name.removesuffix(':') for name in header)} |"]
    lines.append(f"|{'|'.join('--:' if name.endswith(':') else '---' for name in header)}|")
    return "".join(f"{line}\n" for line in (*lines, *(f"| {' | '.join(row)} |" for row in rows)))


@dataclass(frozen=True)
class Table:
    """A table as a CSV file; numbers are written without commas and signs of percent, which the header has."""

    name: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    @property
    def path(self) -> Path:
        return DOCS / "tables" / f"{self.name}.csv"

    @property
    def link(self) -> str:
        return f"[{self.path.name}](tables/{self.path.name})"

    @property
    def text(self) -> str:
        """The file.

        >>> Table("x", ("row", "bytes", "error %"), [("a, b", "1,024", "+0.50 %")]).text
        'row,bytes,error %\\n"a, b",1024,+0.50\\n'
        """
        file = io.StringIO()
        table = csv.writer(file, lineterminator="\n")
        table.writerow(self.header)
        table.writerows(map(plain, row) for row in self.rows)
        return file.getvalue()


def plain(cell: str) -> str:
    """A cell without the commas and the sign of percent of a number."""
    number = _NUMBER.fullmatch(cell)
    return number[1].replace(",", "") if number else cell


@dataclass(frozen=True)
class Page:
    """A page of docs by its name, and the tables that it links."""

    name: str
    text: str
    tables: Sequence[Table] = ()

    @property
    def files(self) -> dict[Path, str]:
        return {DOCS / f"{self.name}.md": self.text, **{table.path: table.text for table in self.tables}}

    def write(self) -> None:
        for path, text in self.files.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def stale(self) -> list[str]:
        """The names of the files that are not what would be written today."""
        return [
            path.name
            for path, text in self.files.items()
            if not path.exists() or path.read_text(encoding="utf-8") != text
        ]
