"""What a calculator is, and what its reply consists of."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from trainledger.report.chart import Chart
from trainledger.report.document import Document, Number, Table, shown
from trainledger.spec.frozen import frozen
from trainledger.web.field import Choices, Field, Query, declared, table_of

Progress = Callable[[str, int, int], None]
GOOD, WARN, BAD = "good", "warn", "bad"
UNKNOWN, PLAIN = "unknown", "plain"  # plain: a number, neither yes nor no
_LONGEST = 40  # characters of a binary fraction that is written as a decimal number


@frozen(kw_only=True)
class Headline:
    """A number that answers, with its unit (of `document.UNITS`), formula with numbers put in, basis and source.

    ``name`` is that of the number in the answer's JSON; ``interval`` is the one that holds four of five published runs,
    in words.
    """

    name: str
    title: str
    value: Number | None
    unit: str
    formula: str
    basis: str
    source: str
    said: str = ""
    interval: str = ""

    @property
    def text(self) -> str:
        """The number as it is printed; ``said`` where that is not its unit's way."""
        return self.said or shown(self.value, self.unit) or "unknown"

    @property
    def in_full(self) -> str:
        """An exact number with all its digits, where ``text`` has fewer; empty where nothing is left out.

        >>> one = {"name": "n", "title": "n", "formula": "", "basis": "exact", "source": ""}
        >>> Headline(value=8030261248, unit="count", **one).in_full, Headline(value=4096, unit="integer", **one).in_full
        ('8,030,261,248', '')
        """
        if self.basis != "exact" or self.value is None:
            return ""
        full = in_full(self.value, binary=not self.unit)
        return "" if _digits(full) == _digits(self.text) else full


def headline(of: str, value: Number | None, formula: str, **more: Any) -> Headline:
    """A number of an answer, ``of`` a calculator and by a name under which calculators.toml has what it always says.

    ``more`` are other fields of it, and words for its title.

    >>> headline("serving.weights_nbytes", 8, "4 x 2 B").title
    'weights of a device'
    """
    calculator, _, name = of.partition(".")
    fields: dict[str, Any] = {"name": name, "value": value, "formula": formula}
    fields |= table_of("calculators.toml")[calculator]["headlines"].get(name, {}) | more
    own = {key: each for key, each in fields.items() if key in Headline.__dataclass_fields__}
    return Headline(**own | {"title": fields["title"].format(**more)})


def in_full(value: Number, *, binary: bool = False) -> str:
    """A number with all its digits; a ratio with 15. ``binary`` numbers are values of a format, and not rounded.

    >>> in_full(8030261248), in_full(1 / 3), in_full(0.10009765625, binary=True), in_full(2.0**-149, binary=True)
    ('8,030,261,248', '0.333333333333333', '0.10009765625', '1 x 2^-149')
    """
    if isinstance(value, int):
        return f"{value:,}"
    number = float(value)
    if not binary or not math.isfinite(number):
        return f"{number:,.15g}"
    text = format(Decimal(number), ",f")
    if len(text) <= _LONGEST:
        return text
    top, bottom = number.as_integer_ratio()
    power = (top & -top).bit_length() - 1  # of two, in a number too large for a fraction
    return f"{top >> power:,} x 2^{power or 1 - bottom.bit_length()}"


def _digits(text: str) -> str:
    """The digits of the first number of a text that count, wherever its point is."""
    number = re.match(r"[-\d.,]*", text)
    return "" if number is None else re.sub(r"\D", "", number[0]).strip("0")


@frozen(kw_only=True)
class Remedy:
    """Something that may mend an answer: the fields to set, by name; an empty text leaves a field out.

    ``calculator`` is the name of the one whose fields they are; empty: that of the answer. There, fields that are not
    named have their defaults. ``command`` is what the command line takes where the page cannot soon say it.
    """

    title: str
    fields: Mapping[str, str]
    calculator: str = ""
    command: tuple[str, ...] = ()


@frozen(kw_only=True)
class Drawing:
    """A chart, and the table of what it shows."""

    chart: Chart
    table: Table


@frozen(kw_only=True)
class Reply:
    """The answer of a calculator: a verdict, headlines, the document of the answer, drawings, and what to paste.

    ``values`` are the texts of fields that the query leaves open and the answer decides, such as the sizes of a
    preset; ``solved`` names those that cannot be given. ``unused`` has the fields that do not count in this question,
    with the reason. ``choices`` replace those of fields. ``remedies`` may mend what is wrong; None where a question
    has none, whatever its answer. ``words`` are those of the command line after ``trainledger``; ``python`` and
    ``run_file`` say the same. Where ``again_seconds`` is set, the answer changes by itself: ask again.
    """

    document: Document
    headlines: tuple[Headline, ...] = ()
    verdict: str = ""
    tone: str = UNKNOWN
    drawings: tuple[Drawing, ...] = ()
    values: Mapping[str, str]
    solved: tuple[str, ...] = ()
    unused: Mapping[str, str] | None = None
    choices: Mapping[str, Choices] | None = None
    remedies: tuple[Remedy, ...] | None = None
    words: tuple[str, ...] = ()
    python: str = ""
    run_file: str = ""
    notes: tuple[str, ...] = ()
    again_seconds: float | None = None


@frozen(kw_only=True)
class Calculator:
    """A question with its fields, and the function that answers it.

    ``presets`` are queries by title. ``any_of_run`` takes every field of a run file. ``needs`` names packages without
    which it cannot answer; ``patient`` says that it may take seconds. ``reply`` raises `InvalidInput`, and ``refuse``
    where a query is wrong that a patient calculator need not work on to find out.
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
    refuse: Callable[[Query], object] | None = None


def calculator(
    name: str,
    reply: Callable[[Query, Progress], Reply],
    choices: Mapping[str, Choices] | None = None,
    ask: Callable[..., object] | None = None,
    refuse: Callable[[Query], object] | None = None,
) -> Calculator:
    """A calculator as calculators.toml has it; ``choices`` and ``ask`` as `declared` takes them."""
    table = {key: value for key, value in table_of("calculators.toml")[name].items() if key != "headlines"}
    fields = tuple(declared(name, choices or {}, ask))
    return Calculator(**table | {"name": name, "fields": fields, "reply": reply, "refuse": refuse})
