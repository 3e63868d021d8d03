"""What a calculator is, and what its reply consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trainledger.document import Document, Figure, Number, Table, shown
from trainledger.frozen import frozen
from trainledger.web.field import Field, Query

Progress = Callable[[str, int, int], None]
GOOD, BAD, UNKNOWN, PLAIN = "good", "bad", "unknown", "plain"  # plain: a number, neither yes nor no


@frozen(kw_only=True)
class Headline:
    """A number that answers, with its unit (of `document.UNITS`), formula with numbers put in, basis and source.

    ``name`` is that of the number in the answer's JSON. ``asked`` says that an exercise may ask for it.
    """

    name: str
    title: str
    value: Number | None
    unit: str
    formula: str
    basis: str
    source: str
    asked: bool = False
    said: str = ""

    @property
    def text(self) -> str:
        """The number as it is printed; ``said`` where that is not its unit's way."""
        return self.said or shown(self.value, self.unit) or "unknown"


@frozen(kw_only=True)
class Drawing:
    """A figure, and the table of what it shows."""

    title: str
    figure: Figure
    table: Table


@frozen(kw_only=True)
class Reply:
    """The answer of a calculator: a verdict, headlines, the document of the answer, drawings, and what to paste.

    ``values`` are the texts of fields that the query leaves open and the answer decides, such as the sizes of a
    preset; ``solved`` names those that cannot be given. ``choices`` replace those of fields. ``words`` are those of the
    command line after ``trainledger``; ``python`` and ``run_file`` say the same. Where ``again_seconds`` is set, the
    answer changes by itself: ask again.
    """

    document: Document
    headlines: tuple[Headline, ...] = ()
    verdict: str = ""
    tone: str = UNKNOWN
    drawings: tuple[Drawing, ...] = ()
    values: Mapping[str, str]
    solved: tuple[str, ...] = ()
    choices: Mapping[str, tuple[tuple[str, str], ...]] | None = None
    words: tuple[str, ...] = ()
    python: str = ""
    run_file: str = ""
    notes: tuple[str, ...] = ()
    again_seconds: float | None = None


@frozen(kw_only=True)
class Calculator:
    """A question with its fields, and the function that answers it.

    ``presets`` are queries by title. ``any_of_run`` takes every field of a run file. ``needs`` names packages without
    which it cannot answer; ``patient`` says that it may take seconds. ``reply`` raises `InvalidInput`.
    """

    name: str
    title: str
    question: str
    fields: tuple[Field, ...]
    reply: Callable[[Query, Progress], Reply]
    presets: Mapping[str, Mapping[str, str]]
    any_of_run: bool = False
    needs: tuple[str, ...] = ()
    patient: bool = False
