"""A field of a calculator: what it is called, what a slider or a list offers for it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from trainledger import catalog
from trainledger.answers.question import question_of
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.reading import field_of, paths
from trainledger.spec.runfile import SECTIONS
from trainledger.spec.setting import rule_of
from trainledger.spec.units import NotAQuantity, parse_amount, parse_count, parse_nbytes, parse_number, parse_seconds

_READERS = (parse_number, parse_amount, parse_seconds, parse_nbytes)
_SERIES = ("1", "1.2", "1.5", "2", "2.5", "3", "4", "5", "6", "8")
LONGEST, LONG = 300, 20_000  # characters of a value, and of a pasted file
RUN, CONFIG, FILE = "run", "config", "file"  # the fields of a model, and of a pasted config.json and run file
Choices = tuple[tuple[str, str], ...]


@frozen(kw_only=True)
class Field:
    """One input. ``name`` is its key in the query; one with a dot is the field of a run (``recipe.micro_batch``).

    ``default`` is the text that is meant where the query has none; an empty one is not given. A slider goes through
    ``stops``; ``choices`` are values and what a list shows for them; where ``strict``, a page offers no other value,
    and where ``offered``, they come with an answer.
    ``long`` texts have several lines. ``group`` is the heading that it stands under.
    """

    name: str
    title: str
    default: str = ""
    about: str = ""
    stops: tuple[str, ...] = ()
    choices: Choices = ()
    strict: bool = False
    offered: bool = False
    long: bool = False
    group: str = ""

    @property
    def allowed(self) -> tuple[str, ...]:
        """The only values that it may have; none where it may have others, or where the rules of the run file say."""
        if not self.strict or "." in self.name:
            return ()
        return tuple(dict.fromkeys((self.default, *(each for each, _ in self.choices))))

    @property
    def longest(self) -> int:
        """Characters that a value may have."""
        return LONG if self.long else LONGEST


def of_run(name: str, title: str, **more: object) -> Field:
    """The field of a run, with its meaning as the run file's reader has it.

    >>> of_run("recipe.micro_batch", "micro-batch").about[:24]
    'sequences in one forward'
    """
    found = field_of(SECTIONS, name)
    assert found is not None, name
    about: str = rule_of(found).get("doc", "")
    return Field(**{"name": name, "title": title, "about": about, **more})  # type: ignore[arg-type]


def of_question(ask: Callable[..., object], name: str, title: str, **more: object) -> Field:
    """The field of an option of a question, with the default, the help and the choices of its signature.

    >>> from trainledger.answers.breaks import breaks
    >>> field = of_question(breaks, "exposed", "most exposed communication")
    >>> field.default, field.about
    ('20%', 'most exposed communication, or bubble, as a share of the step')
    """
    option = question_of(ask).options[name]
    known = {"default": option.written, "about": option.help, "choices": one_of(option.choices), "group": "Question"}
    return Field(**{"name": name, "title": title, **known, **more})  # type: ignore[arg-type]


def paths_of_run(fields: Iterable[Field]) -> list[str]:
    """The fields of a run that are not among these."""
    own = {field.name for field in fields}
    return [path for path in paths(SECTIONS) if path not in own]


def one_of(names: Iterable[str | list[str]], **titles: str) -> Choices:
    """Choices by name, shown as they are or under a title of their own.

    >>> one_of(["bf16", ["fp8", "8 bits"], "fp4"], fp4="4 bits")
    (('bf16', 'bf16'), ('fp8', '8 bits'), ('fp4', '4 bits'))
    """
    pairs = ((name, titles.get(name, name)) if isinstance(name, str) else name for name in names)
    return tuple((name, title) for name, title in pairs)


@cache
def table_of(name: str) -> dict[str, Any]:
    """A table of this room."""
    return tomllib.loads(files("trainledger.web").joinpath(name).read_text(encoding="utf-8"))


def declared(calculator: str, choices: Mapping[str, Choices], ask: Callable[..., object] | None) -> Iterator[Field]:
    """The fields of a calculator in calculators.toml, with the ``choices`` that follow from tables of the code.

    ``ask`` is the question whose options some of them are.
    """
    tables, models = table_of("calculators.toml"), one_of(catalog.model_names())
    devices = one_of(catalog.device_names())
    known = {RUN: models, "family": models, "device": devices, "cluster.device": devices} | dict(choices)
    shared = {row["name"]: row for row in tables["shared"]["fields"]}
    for written in tables[calculator]["fields"]:
        row = {"like": written} if isinstance(written, str) else dict(written)
        row = shared.get(row.pop("like", ""), {}) | row
        name, title = row.pop("name"), row.pop("title")
        row |= {"stops": _stops(row.get("stops", ()), tables["stops"])}
        if name in known or "choices" in row:
            row["choices"] = one_of(row["choices"]) if "choices" in row else known[name]
        if ask is not None and row.pop("question", False):
            yield of_question(ask, name, title, **row)
        elif "." in name and "about" not in row:
            yield of_run(name, title, **row)
        else:
            yield Field(name=name, title=title, **row)


def _stops(written: Any, named: Mapping[str, list[str]]) -> tuple[str, ...]:
    """Stops as calculators.toml has them: values, a name, powers of two, a rising series, or even steps."""
    match written:
        case {"powers": [low, high]}:
            return powers(low, high)
        case {"rising": [low, high]}:
            return rising(low, high)
        case {"from": low, "to": high, "by": by, **unit}:
            return tuple(f"{low + at * by:g}{unit.get('unit', '')}" for at in range(round((high - low) / by) + 1))
    return tuple(named[written] if isinstance(written, str) else written)


def rising(low: str, high: str, units: Iterable[str] = ("", "k", "M", "B", "T")) -> tuple[str, ...]:
    """About ten stops for each power of ten between two texts, each written as a person would.

    >>> rising("800M", "2B")
    ('800M', '1B', '1.2B', '1.5B', '2B')
    """
    names = list(units)
    every = [
        f"{float(step) * 10**power:g}{unit}"
        for unit in names
        for power in range(3)
        for step in _SERIES
        if float(step) * 10**power == int(float(step) * 10**power) or not power
    ]
    return tuple(every[every.index(low) : every.index(high) + 1])


def powers(low: int, high: int) -> tuple[str, ...]:
    """Powers of two.

    >>> powers(1, 8)
    ('1', '2', '4', '8')
    """
    return tuple(str(2**index) for index in range(low.bit_length() - 1, high.bit_length()))


def size_of(text: object, otherwise: int = 1) -> int:
    """A size that is given; ``otherwise`` where it is not, and 1 where it is none, which reading the run refuses.

    >>> size_of("2k"), size_of(None), size_of("", 8), size_of("many")
    (2000, 1, 8, 1)
    """
    try:
        return otherwise if text in (None, "") else max(1, parse_count(str(text)))
    except NotAQuantity:
        return 1


def place(field: Field, text: str) -> int:
    """Where a text stands among the stops of its field: at the last that is not above it; 0 where it is no quantity.

    >>> place(Field(name="n", title="", stops=("1k", "2k", "5k")), "3000")
    1
    """
    if text in field.stops:
        return field.stops.index(text)
    for reader in _READERS:
        try:
            value = reader(text)
            stops = [reader(stop) for stop in field.stops]
        except NotAQuantity:
            continue
        return max((at for at, stop in enumerate(stops) if stop <= value), default=0)
    return 0


@frozen
class Query:
    """What a person asks of a calculator: the texts of the fields that are given, and the defaults of the others."""

    given: Mapping[str, str]
    fields: Mapping[str, Field]

    def __getitem__(self, name: str) -> str:
        """The text of a field, its default where it is not given."""
        return self.given[name] if name in self.given else self.fields[name].default

    def get(self, name: str) -> str | None:
        """The text of a field, or None where it has none."""
        return self[name] or None

    def chosen(self, *names: str) -> dict[str, str]:
        """The texts of those fields that have one, for a function whose arguments have these names."""
        return {name: text for name in names if (text := self[name])}

    @property
    def overrides(self) -> dict[str, str]:
        """The fields of a run that have a text, by path; beside a pasted run file only those that are given."""
        own = (
            {} if self.given.get(FILE) else {name: field.default for name, field in self.fields.items() if "." in name}
        )
        texts = own | {name: text for name, text in self.given.items() if "." in name}
        return {name: text for name, text in texts.items() if text}


def read_query(fields: Iterable[Field], given: Mapping[str, str], *, any_of_run: bool = False) -> Query:
    """The query of texts by name; raises `InvalidInput` for a name that is unknown and a text that is too long.

    ``any_of_run`` allows every field of a run file, also those that the calculator has no slider for.
    """
    known = {each.name: each for each in fields}
    problems = []
    for name, text in given.items():
        field = known.get(name)
        if field is None and not (any_of_run and field_of(SECTIONS, name) is not None):
            near = nearest_text(name, known)
            problems.append(Problem(name[:60], None, "is no field of this calculator", near))
        longest = Field(name=name, title="").longest if field is None else field.longest
        if len(text) > longest:
            problems.append(Problem(name[:60], text, f"must have at most {longest:,} characters"))
        elif field is not None and field.allowed and text not in field.allowed:
            names = [each for each, _ in field.choices]
            rule = f"must be one of {', '.join(names)}"
            problems.append(Problem(name, text, rule, nearest_text(text, names)))
    if problems:
        raise InvalidInput(problems)
    return Query(dict(given), known)
