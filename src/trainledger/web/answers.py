"""Every way to ask a calculator: its answer as data, its view as a page shows it, and the exercise.

Everything that goes in is text by name and everything that comes out is plain JSON, so that a server and a worker in
the browser ask alike.
"""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

from trainledger.answers.question import silent
from trainledger.report.document import Document, Section, Text
from trainledger.report.draw.chart import svg
from trainledger.report.draw.scale import Held
from trainledger.report.html import parts, table_html
from trainledger.report.lesson import Exercise, after_miss, number
from trainledger.spec.frozen import frozen
from trainledger.spec.plain import finite
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.web.calculator import Calculator, Headline, Progress, Remedy, Reply
from trainledger.web.calculators import CALCULATORS, LESSON
from trainledger.web.field import RUN, Field, Query, paths_of_run, place, read_query, table_of
from trainledger.web.typography import device_title, in_words, title_of, typed, typeset

Calculators = Mapping[str, Calculator]
_TOLERANCE = 0.05  # relative: worked out with rounded numbers
_LARGEST_WRITTEN = 1e15  # with all its digits
_MOST_KEPT = 32  # replies
_kept: dict[Hashable, Reply] = {}  # the newest last
_TELEPHONE = 480  # pixels: the first drawing of a page as narrow leaves room for the form


def listing(calculators: Calculators = CALCULATORS) -> list[dict[str, Any]]:
    """The calculators with their fields, presets and slider stops: all that a page needs to draw its forms."""
    return [
        {
            "name": calculator.name, "title": calculator.title, "question": calculator.question,
            "needs": list(calculator.needs), "patient": calculator.patient,
            "presets": {title: dict(query) for title, query in calculator.presets.items()},
            "fields": [_field_data(field, calculator.name) for field in calculator.fields],
            "lesson": calculator.name in LESSON, "exercises": calculator.name in kinds_of_exercises(),
            "others": paths_of_run(calculator.fields) if calculator.any_of_run else [],
        }
        for calculator in calculators.values()
    ]  # fmt: skip


def _field_data(field: Field, calculator: str) -> dict[str, Any]:
    labels = table_of("labels.toml")
    helps, units = labels["help"], labels["unit"]
    return {
        "name": field.name, "title": field.title, "default": field.default, "unit": units.get(field.name, ""),
        "about": helps.get(f"{calculator}.{field.name}") or helps.get(field.name) or field.about,
        "stops": list(field.stops), "choices": _choices(field), "long": field.long,
        "longest": field.longest, "group": field.group, "strict": field.strict,
        "offered": field.offered,
    }  # fmt: skip


def _choices(field: Field) -> list[list[str]]:
    """The values of a list, each with what the list shows: models and devices by their titles."""
    last = field.name.rpartition(".")[2]
    titles = {"device": device_title, RUN: title_of, "family": title_of}.get(last)
    return [[value, titles(value) if titles and value else title] for value, title in field.choices]


def answer(
    name: str, given: Mapping[str, str], progress: Progress = silent, calculators: Calculators = CALCULATORS
) -> dict[str, Any]:
    """The answer as data: ``data`` is what the command line's ``--json`` has; raises `InvalidInput`.

    >>> found = answer("time", {"params": "70B", "tokens": "15T", "mfu": "50%"})
    >>> round(found["data"]["days"], 1), found["headlines"][0]["text"]
    (143.9, '143.9')
    """
    calculator, query, reply = ask(name, given, progress, calculators)
    made: dict[str, Any] = finite(
        {
            "calculator": calculator.name,
            "query": dict(query.given),
            "verdict": reply.verdict,
            "tone": reply.tone,
            "headlines": [_headline_data(headline) for headline in reply.headlines],
            "data": dict(reply.document.data()),
            "figures": {drawing.chart.title: svg(drawing.chart) for drawing in reply.drawings},
            "notes": list(reply.notes),
            "paste": _paste(reply),
        }
    )
    return made


def view(
    name: str,
    given: Mapping[str, str],
    width: int = 960,
    progress: Progress = silent,
    calculators: Calculators = CALCULATORS,
    held: str = "",
    pinned: str = "",
) -> dict[str, Any]:
    """The answer as a page shows it: headlines, sections as HTML, drawings as SVG of ``width`` pixels with tables.

    The axes of the first are ``held`` at these ends of x and of y, where its values allow, and show what is ``pinned``.
    """
    ends, pins = _ends("held", held), _ends("pinned", pinned)
    _, query, reply = ask(name, given, progress, calculators)
    return {
        "verdict": in_words(reply.verdict), "tone": reply.tone, "notes": [in_words(note) for note in reply.notes],
        "paste": _paste(reply),
        "headlines": [_printed(_headline_data(headline)) for headline in reply.headlines],
        "sections": [_section_data(section) for section in _sections(reply)],
        "drawings": [
            {
                "title": typeset(drawing.chart.title), "table": typeset(table_html(drawing.table)),
                "key": [in_words(line) for line in drawing.chart.key],
                "svg": typeset(
                    svg(drawing.chart, width, low=width <= _TELEPHONE, held=ends, pinned=pins)
                    if at == 0
                    else svg(drawing.chart, width)
                ),
            }
            for at, drawing in enumerate(reply.drawings)
        ],
        "fields": {name: _value_data(field, query, reply) for name, field in query.fields.items()},
        "choices": {name: [list(each) for each in found] for name, found in (reply.choices or {}).items()},
        "remedies": None if reply.remedies is None else [_remedy_data(remedy) for remedy in reply.remedies],
        "again_seconds": reply.again_seconds,
    }  # fmt: skip


def _ends(name: str, text: str) -> Held | None:
    """The ends of x and of y in a text of four numbers."""
    if not text:
        return None
    try:
        low, high, lower, higher = map(float, text.split(","))
    except ValueError:
        rule = "must be the ends of x and of y: four numbers with commas between them"
        raise InvalidInput([Problem(name, text[:60], rule)]) from None
    return {"x": (low, high), "y": (lower, higher)}


def check(name: str, seed: int, guess: str, misses: int, calculators: Calculators = CALCULATORS) -> dict[str, Any]:
    """Whether a guess of an exercise is right, and what is told after so many ``misses`` before it.

    That is a hint, then the derivation. Raises `InvalidInput` where the guess is no number, which is no miss.

    >>> check("time", 4, "1", 0)["said"][:40], check("time", 4, "1", 1)["over"]
    ('Too low. Hint: Forward takes a multiplic', True)
    """
    exercise, guess = _exercise(calculators, name, seed).exercise, typed(guess)
    if number(guess, exercise.unit) is None:
        raise InvalidInput([Problem("guess", guess, "is no number; write it as 12.6, 1.5e3, 2^-7, 80B or 50%")])
    fault = exercise.fault(guess)
    said = (
        after_miss(exercise, fault, misses + 1) if fault else f"Right: {exercise.shown_answer}. {exercise.derivation}"
    )
    return {"right": not fault, "over": not fault or misses > 0, "said": typeset(said)}


def exercise(name: str, seed: int, calculators: Calculators = CALCULATORS) -> dict[str, Any]:
    """An exercise: its question, the unit of its answer, and the query whose answer has it; the same for a seed.

    >>> exercise("time", 1) == exercise("time", 1)
    True
    """
    made = _exercise(calculators, name, seed)
    return {"question": typeset(made.exercise.question), "unit": made.exercise.unit, "query": dict(made.query)}


def _exercise(calculators: Calculators, name: str, seed: int) -> Drawn:
    calculator = _calculator(calculators, name)
    if name not in kinds_of_exercises():
        raise InvalidInput([Problem("calculator", name, "has no exercises", next(iter(kinds_of_exercises())))])
    return drawn(name, {field.name for field in calculator.fields}, seed)


@frozen
class Drawn:
    """An exercise, the query of the calculator that it is about, and the number of the answer that it asks for."""

    exercise: Exercise
    query: Mapping[str, str]
    asks: str


def kinds_of_exercises() -> Mapping[str, list[dict[str, Any]]]:
    """The kinds of exercises by calculator."""
    return table_of("exercises.toml")


def lesson(calculators: Calculators = CALCULATORS) -> list[dict[str, Any]]:
    """The screens of the lesson whose calculators are there."""
    return [screen for screen in table_of("lesson.toml")["screen"] if screen["calculator"] in calculators]


def drawn(name: str, fields: Collection[str], seed: int) -> Drawn:
    """The exercise of a seed, the same for everybody: kinds in turn, their numbers by chance.

    >>> drawn("tensor", ("shape", "dtype"), 4).exercise.question[:48]
    'A tensor has the shape [1,024, 4,096] and the dt'
    """
    kinds = kinds_of_exercises()[name]
    row, chance = kinds[seed % len(kinds)], random.Random(f"{name} {seed}")
    given = {key: chance.choice(texts) for key, texts in row.get("draw", {}).items()}
    given |= chance.choice(row.get("cases", [{}]))
    shown = {key.rpartition(".")[2]: text for key, text in given.items()}
    values = {key: value for key, text in shown.items() if (value := number(text)) is not None}
    query = {key: text for key, text in given.items() if "." in key or key in fields}
    query |= {key: text.format(**shown) for key, text in row.get("query", {}).items()}
    written = {key: f"{int(text):,}" if text.isdecimal() else text for key, text in shown.items()}
    exercise = Exercise(
        question=row["question"].format(**written),
        answer=_rounded(_worth(row["answer"], values)),
        derivation=f"{_put_in(row['answer'], written)}.",
        hint=row["hint"],
        unit=row["unit"],
        tolerance=row.get("tolerance", _TOLERANCE),
        mistakes={_worth(wrong, values): remark for wrong, remark in row.get("mistakes", {}).items()},
    )
    return Drawn(exercise, query, row["asks"].format(**shown))


def _worth(formula: str, values: Mapping[str, float]) -> float:
    result: float = eval(formula, {"__builtins__": {"max": max, "round": round}}, dict(values))
    return result


def _rounded(value: float) -> float:
    """A number with four digits, a whole one as it is."""
    short = value if float(value).is_integer() else float(f"{value:.4g}")
    return int(short) if float(short).is_integer() and abs(short) < _LARGEST_WRITTEN else short


def _put_in(formula: str, written: Mapping[str, str]) -> str:
    """A formula with its numbers, as people write it."""
    text = re.sub(r"\b\d{4,}\b", lambda digits: f"{int(digits[0]):,}", formula)
    text = re.sub(r"\b[a-z_]\w*", lambda name: written.get(name[0], name[0]), text)
    return text.replace(" ** ", "^").replace("*", "×")


def _calculator(calculators: Calculators, name: str) -> Calculator:
    if name not in calculators:
        near = nearest_text(name, calculators)
        raise InvalidInput([Problem("calculator", name, f"is none of {', '.join(calculators)}", near)])
    return calculators[name]


def ask(
    name: str, given: Mapping[str, str], progress: Progress = silent, calculators: Calculators = CALCULATORS
) -> tuple[Calculator, Query, Reply]:
    """The reply to a query; that of a patient calculator is kept, for other widths and other ways to ask."""
    calculator = _calculator(calculators, name)
    query = read_query(calculator.fields, given, any_of_run=calculator.any_of_run)
    if not calculator.patient:
        return calculator, query, calculator.reply(query, progress)
    key = calculator.reply, frozenset(query.given.items())
    reply = _kept.pop(key, None)
    if reply is None:
        reply = calculator.reply(query, progress)
        progress("", 0, 0)  # raises where the search was cancelled, and gave what it had so far
    _kept[key] = reply
    for oldest in list(_kept)[:-_MOST_KEPT]:
        _kept.pop(oldest, None)
    return calculator, query, reply


def _headline_data(each: Headline) -> dict[str, Any]:
    return {
        "name": each.name, "title": each.title, "text": each.text, "value": finite(each.value), "unit": each.unit,
        "formula": each.formula, "basis": each.basis, "source": each.source,
        "in_full": each.in_full, "interval": each.interval,
    }  # fmt: skip


def _printed(data: dict[str, Any]) -> dict[str, Any]:
    """A headline in the words and the typography of the page."""
    texts = ("title", "text", "formula", "source", "in_full", "interval")
    return data | {name: in_words(data[name]) for name in texts}


def _sections(reply: Reply) -> list[Section]:
    """The document without what the verdict and the notes say already; those without a title joined to one."""
    said = {note.lower().removesuffix(".") for note in (reply.verdict, *reply.notes)}
    sections: list[Section] = []
    for section in reply.document.sections:
        parts = tuple(
            part
            for part in section.parts
            if not (isinstance(part, Text) and {line.lower().removesuffix(".") for line in part.lines} <= said)
        )
        if not section.title and sections and not sections[-1].title:
            sections[-1] = Section("", (*sections[-1].parts, *parts))
        elif parts:
            sections.append(Section(section.title, parts))
    return sections


def _section_data(each: Section) -> dict[str, str]:
    return {"title": in_words(each.title), "html": typeset("".join(parts(Document("", (Section("", each.parts),)))))}


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
        "title": in_words(each.title),
        "fields": dict(each.fields),
        "calculator": each.calculator,
        "command": _command(each.command),
    }


def _paste(reply: Reply) -> dict[str, str]:
    texts = {"command": _command(reply.words), "run_file": reply.run_file, "python": reply.python}
    return {name: text for name, text in texts.items() if text}


def _command(words: Sequence[str]) -> str:
    return shlex.join(("trainledger", *words)) if words else ""
