"""Every way to ask a calculator: its answer as data, its view as a page shows it, and the exercise.

Everything that goes in is text by name and everything that comes out is plain JSON, so that a server and a worker in
the browser ask alike.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from trainledger.report.document import Document, Section, Text
from trainledger.report.draw.chart import svg
from trainledger.report.draw.scale import Held
from trainledger.report.html import parts, table_html
from trainledger.spec.plain import finite
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.units import NotAQuantity, format_percent, parse_amount, parse_nbytes, parse_number, parse_seconds
from trainledger.web.calculator import Calculator, Headline, Progress, Remedy, Reply
from trainledger.web.calculators import CALCULATORS, LESSON
from trainledger.web.field import Field, Query, paths_of_run, place, read_query

Calculators = Mapping[str, Calculator]
_CLOSE = 0.05  # relative: an answer of an exercise that is right
_TRIES = 20  # draws of an exercise
_TELEPHONE = 480  # pixels: the first drawing of a page as narrow leaves room for the form
_NEAR = 2.0  # a factor: the right order of magnitude
_PARSERS = {
    "nbytes": parse_nbytes,
    "seconds": parse_seconds,
    "share": parse_number,
    "ratio": parse_number,
}


def _silent(what: str, done: int, of: int) -> None:
    """Nobody looks on."""


def listing(calculators: Calculators = CALCULATORS) -> list[dict[str, Any]]:
    """The calculators with their fields, presets and slider stops: all that a page needs to draw its forms."""
    return [
        {
            "name": each.name, "title": each.title, "question": each.question, "needs": list(each.needs),
            "patient": each.patient, "presets": {title: dict(query) for title, query in each.presets.items()},
            "fields": [_field_data(field) for field in each.fields], "lesson": each.name in LESSON,
            "others": paths_of_run(each.fields) if each.any_of_run else [],
        }
        for each in calculators.values()
    ]  # fmt: skip


def _field_data(field: Field) -> dict[str, Any]:
    return {
        "name": field.name, "title": field.title, "default": field.default, "about": field.about,
        "stops": list(field.stops), "choices": [list(each) for each in field.choices], "long": field.long,
        "longest": field.longest, "group": field.group, "strict": field.strict,
        "offered": field.offered,
    }  # fmt: skip


def answer(
    name: str, given: Mapping[str, str], progress: Progress = _silent, calculators: Calculators = CALCULATORS
) -> dict[str, Any]:
    """The answer as data: ``data`` is what the command line's ``--json`` has; raises `InvalidInput`.

    >>> found = answer("time", {"params": "70B", "tokens": "15T", "mfu": "50%"})
    >>> round(found["data"]["days"], 1), found["headlines"][0]["text"]
    (143.9, '143.9')
    """
    calculator, query, reply = _asked(calculators, name, given, progress)
    made: dict[str, Any] = finite(
        {
            "calculator": calculator.name,
            "query": dict(query.given),
            "verdict": reply.verdict,
            "tone": reply.tone,
            "headlines": [_headline_data(each) for each in reply.headlines],
            "data": dict(reply.document.data()),
            "figures": {each.chart.title: svg(each.chart) for each in reply.drawings},
            "notes": list(reply.notes),
            "paste": _paste(reply),
        }
    )
    return made


def view(
    name: str,
    given: Mapping[str, str],
    width: int = 960,
    progress: Progress = _silent,
    calculators: Calculators = CALCULATORS,
    held: str = "",
) -> dict[str, Any]:
    """The answer as a page shows it: headlines, sections as HTML, drawings as SVG of ``width`` pixels with tables.

    The axes of the first are ``held`` at these ends of x and of y, where its values allow.
    """
    ends = _ends(held)
    _, query, reply = _asked(calculators, name, given, progress)
    return {
        "verdict": reply.verdict, "tone": reply.tone, "notes": list(reply.notes), "paste": _paste(reply),
        "headlines": [_headline_data(each) for each in reply.headlines],
        "sections": [_section_data(each) for each in _sections(reply)],
        "drawings": [
            {
                "title": each.chart.title, "table": table_html(each.table), "key": list(each.chart.key),
                "svg": svg(each.chart, width, low=not at and width <= _TELEPHONE, held=None if at else ends),
            }
            for at, each in enumerate(reply.drawings)
        ],
        "fields": {name: _value_data(field, query, reply) for name, field in query.fields.items()},
        "choices": {name: [list(each) for each in found] for name, found in (reply.choices or {}).items()},
        "remedies": None if reply.remedies is None else [_remedy_data(each) for each in reply.remedies],
        "again_seconds": reply.again_seconds,
    }  # fmt: skip


def _ends(held: str) -> Held | None:
    """The ends of x and of y in a text of four numbers."""
    if not held:
        return None
    try:
        low, high, lower, higher = map(float, held.split(","))
    except ValueError:
        rule = "must be the ends of x and of y: four numbers with commas between them"
        raise InvalidInput([Problem("held", held[:60], rule)]) from None
    return {"x": (low, high), "y": (lower, higher)}


def check(
    name: str,
    given: Mapping[str, str],
    of: str,
    guess: str,
    progress: Progress = _silent,
    calculators: Calculators = CALCULATORS,
) -> dict[str, Any]:
    """Whether a guess of one headline is right, within 5 %; raises `InvalidInput` where it is no such number.

    >>> check("time", {"params": "70B", "tokens": "15T", "mfu": "50%"}, "days", "140")["right"]
    True
    """
    _, _, reply = _asked(calculators, name, given, progress)
    asked = {each.name: each for each in reply.headlines if each.asked and each.value}
    if of not in asked:
        rule = f"is no number that is asked for; there are: {', '.join(asked)}"
        raise InvalidInput([Problem("of", of, rule, nearest_text(of, asked))])
    right = asked[of]
    ratio = _guessed(guess, right) / float(right.value or 1)
    close, near = abs(ratio - 1) <= _CLOSE, 1 / _NEAR <= ratio <= _NEAR
    said = f"{guess} is {format_percent(ratio - 1, signed=True)} off" if near else f"{guess} is {ratio:.3g} times that"
    said = f"Right: it is {right.text}" if close else f"{'Close' if near else 'No'}: it is {right.text}, and {said}"
    return {"right": close, "near": near, "ratio": ratio, "said": f"{said}.", "headline": _headline_data(right)}


def exercise(name: str, seed: int, calculators: Calculators = CALCULATORS) -> dict[str, Any]:
    """A query for an exercise: the default one with some sliders elsewhere, the same for the same seed.

    It is one that the calculator answers with a number to ask for, unless finding out would take seconds.

    >>> exercise("time", 1) == exercise("time", 1)
    True
    """
    drawn = random.Random(seed)
    calculator = _calculator(calculators, name)
    for _ in range(_TRIES):
        query = _drawn(calculator, drawn)
        if _asks(calculator, query):
            return {"query": query}
    return {"query": dict(next(iter(calculator.presets.values()), {}))}


def _drawn(calculator: Calculator, drawn: random.Random) -> dict[str, str]:
    """A preset with two sliders elsewhere."""
    sliders = [each for each in calculator.fields if each.stops and each.default]
    query = dict(drawn.choice(list(calculator.presets.values()) or [{}]))
    for field in drawn.sample(sliders, min(2, len(sliders))):
        at = place(field, query.get(field.name, field.default))
        near = field.stops[max(0, at - 6) : at + 7]
        query[field.name] = drawn.choice(near)
    return query


def _asks(calculator: Calculator, given: Mapping[str, str]) -> bool:
    """Whether a query is answered with a number that an exercise may ask for; of a patient calculator, if it may be."""
    try:
        query = read_query(calculator.fields, given, any_of_run=calculator.any_of_run)
        if calculator.patient:
            if calculator.refuse is not None:
                calculator.refuse(query)
            return True
        return any(each.asked and each.value for each in calculator.reply(query, _silent).headlines)
    except InvalidInput:
        return False


def _calculator(calculators: Calculators, name: str) -> Calculator:
    if name not in calculators:
        near = nearest_text(name, calculators)
        raise InvalidInput([Problem("calculator", name, f"is none of {', '.join(calculators)}", near)])
    return calculators[name]


def _asked(
    calculators: Calculators, name: str, given: Mapping[str, str], progress: Progress
) -> tuple[Calculator, Query, Reply]:
    calculator = _calculator(calculators, name)
    query = read_query(calculator.fields, given, any_of_run=calculator.any_of_run)
    return calculator, query, calculator.reply(query, progress)


def _guessed(guess: str, right: Headline) -> float:
    """The number of a guess, which may have its unit or its title behind it ("158 TFLOP", "12 days")."""
    parse = _PARSERS.get(right.unit, parse_amount)
    for unit in ("", "FLOP/s", "FLOP", right.title):
        try:
            return float(parse(guess.strip().removesuffix(unit)))
        except NotAQuantity as error:
            wrong = error
    raise InvalidInput([Problem("guess", guess, wrong.rule, wrong.nearest)])


def _headline_data(each: Headline) -> dict[str, Any]:
    return {
        "name": each.name, "title": each.title, "text": each.text, "value": finite(each.value), "unit": each.unit,
        "formula": each.formula, "basis": each.basis, "source": each.source, "asked": each.asked,
        "in_full": each.in_full, "interval": each.interval,
    }  # fmt: skip


def _sections(reply: Reply) -> list[Section]:
    """The document without what the verdict and the notes say already; those without a title joined to one."""
    said = {each.lower().removesuffix(".") for each in (reply.verdict, *reply.notes)}
    found: list[Section] = []
    for section in reply.document.sections:
        parts = tuple(
            each
            for each in section.parts
            if not (isinstance(each, Text) and {line.lower().removesuffix(".") for line in each.lines} <= said)
        )
        if not section.title and found and not found[-1].title:
            found[-1] = Section("", (*found[-1].parts, *parts))
        elif parts:
            found.append(Section(section.title, parts))
    return found


def _section_data(each: Section) -> dict[str, str]:
    return {"title": each.title, "html": "".join(parts(Document("", (Section("", each.parts),))))}


def _value_data(field: Field, query: Query, reply: Reply) -> dict[str, Any]:
    """What a field shows: its text, its place among its stops, whether others decide it, and why it does not count."""
    text = reply.values.get(field.name, query[field.name])
    return {
        "text": text,
        "at": place(field, text) if field.stops else 0,
        "follows": field.name in reply.solved,
        "unused": (reply.unused or {}).get(field.name, ""),
    }


def _remedy_data(each: Remedy) -> dict[str, Any]:
    """A remedy; of another calculator with its name."""
    return {
        "title": each.title,
        "fields": dict(each.fields),
        "calculator": each.calculator,
        "command": _command(each.command),
    }


def _paste(reply: Reply) -> dict[str, str]:
    texts = {"command": _command(reply.words), "run_file": reply.run_file, "python": reply.python}
    return {name: text for name, text in texts.items() if text}


def _command(words: Sequence[str]) -> str:
    return shlex.join(("trainledger", *words)) if words else ""
