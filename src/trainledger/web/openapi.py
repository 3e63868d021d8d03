"""How the API describes itself (OpenAPI 3.1): the fields of each calculator as parameters, and what comes back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainledger.web.calculator import Calculator
from trainledger.web.field import LONGEST, Field

Schema = dict[str, Any]
NARROWEST, WIDEST = 240, 2400  # pixels of a drawing
LAST_SEED = 2**31 - 1
_TEXT: Schema = {"type": "string"}


# The models of replies; dataclasses of the standard library, which FastAPI describes.
@dataclass
class Fault:
    """What is wrong, its value, what it must be, and the nearest value that works; ``sentence`` is all of that."""

    field: str
    value: Any
    rule: str
    nearest: Any
    sentence: str
    where: str


@dataclass
class Refusal:
    error: list[Fault]
    where: str


@dataclass
class Progress:
    what: str
    done: int
    of: int


@dataclass
class Working:
    working: Progress


@dataclass
class Headline:
    """A number of an answer; ``in_full`` has all digits of an exact one.

    ``interval`` is the one that holds four of five published runs, in words."""

    name: str
    title: str
    text: str
    value: float | None
    unit: str
    formula: str
    basis: str
    source: str
    in_full: str
    interval: str


@dataclass
class _Said:
    verdict: str
    tone: str
    headlines: list[Headline]
    paste: dict[str, str]


@dataclass
class Answer(_Said):
    calculator: str
    query: dict[str, str]
    data: dict[str, Any]
    figures: dict[str, Any]


@dataclass
class View(_Said):
    sections: list[Any]
    drawings: list[Any]
    fields: dict[str, Any]
    remedies: list[Any] | None


@dataclass
class Check:
    right: bool
    over: bool
    said: str


@dataclass
class Exercise:
    question: str
    unit: str
    query: dict[str, str]


@dataclass
class Listed:
    name: str
    fields: list[dict[str, Any]]
    presets: dict[str, dict[str, str]]


_SHORT = {**_TEXT, "maxLength": LONGEST}
_WIDTH = {"type": "integer", "minimum": NARROWEST, "maximum": WIDEST, "default": 960}
_SEED = {"type": "integer", "minimum": 0, "maximum": LAST_SEED}
# What each way to ask gives: its summary, its parameters before those of the calculator, and its answer.
WAYS: dict[str, tuple[str, dict[str, Schema], type | None]] = {
    "api": ("the answer as data", {}, Answer),
    "view": (
        "the answer as a page shows it: sections as HTML, drawings as SVG",
        {"width": _WIDTH, "held": _SHORT, "pinned": _SHORT},
        View,
    ),
    "figure": ("the first figure as a PNG", {}, None),
    "check": (
        "whether a guess of an exercise is right; a hint after the first miss, then the derivation",
        {"seed": _SEED, "guess": _SHORT, "misses": _SEED},
        Check,
    ),
    "exercise": ("an exercise with all that its answer needs, the same for a seed", {"seed": _SEED}, Exercise),
}
ASKED = ("api", "view", "figure")  # with the fields of the calculator


def refusals(*, with_token: bool) -> dict[int | str, dict[str, Any]]:
    """The refusals that every question may meet."""
    texts = {403: "an address that is not this server's", 429: "too many questions at once"}
    texts |= {401: "without the token"} if with_token else {}
    return {code: {"model": Refusal, "description": text} for code, text in texts.items()}


def operation(way: str, calculator: Calculator) -> dict[str, Any]:
    """The description of one way to ask one calculator, as arguments of a route."""
    does, _, answer = WAYS[way]
    responses: dict[int, dict[str, Any]] = {
        200: {"description": does, **({"model": answer} if answer else {"content": {"image/png": {}}})},
        422: {"model": Refusal, "description": "what is wrong with the query"},
    }
    if calculator.patient and way in ASKED:
        responses[202] = {"model": Working, "description": "not there yet: ask again with the same query"}
    return {
        "summary": f"{calculator.title}: {does}",
        "description": calculator.question,
        "responses": responses,
        "openapi_extra": {"parameters": list(_parameters(way, calculator))},
    }


def _parameters(way: str, calculator: Calculator) -> Iterator[dict[str, Any]]:
    for name, schema in WAYS[way][1].items():
        yield {"name": name, "in": "query", "required": "default" not in schema, "schema": schema}
    if way in ASKED:
        yield from map(_parameter, calculator.fields)
        if calculator.any_of_run:
            yield _any_of_run()


def _parameter(field: Field) -> dict[str, Any]:
    schema: Schema = {**_TEXT, "maxLength": field.longest}
    values = [value for value, _ in field.choices]
    if field.allowed:
        schema["enum"] = list(field.allowed)
    if field.default:
        schema["default"] = field.default
    texts = dict.fromkeys((field.default, *values[:3], *field.stops[:1], *field.stops[-1:]))
    made: dict[str, Any] = {
        "name": field.name,
        "in": "query",
        "description": ": ".join(filter(None, (field.title, field.about))),
    }
    if examples := {text[:40]: {"value": text} for text in texts if text}:
        made["examples"] = examples
    return {**made, "schema": schema}


def _any_of_run() -> dict[str, Any]:
    """Every other field of a run file, by its path."""
    names = {"pattern": r"^(model|recipe|layout|cluster|data|teacher)\.[a-z0-9_.]+$"}
    schema = {"type": "object", "propertyNames": names, "additionalProperties": {**_TEXT, "maxLength": LONGEST}}
    return {
        "name": "fields",
        "in": "query",
        "style": "form",
        "explode": True,
        "schema": schema,
        "description": "any field of a run file by its path, such as recipe.micro_batch",
    }
