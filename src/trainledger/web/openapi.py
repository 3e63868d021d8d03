"""How the API describes itself (OpenAPI 3.1): the fields of each calculator as parameters, and what comes back."""

from __future__ import annotations

from typing import Any

from trainledger.web.calculator import Calculator
from trainledger.web.field import LONGEST, Field

Schema = dict[str, Any]
NARROWEST, WIDEST = 240, 2400  # pixels of a drawing
LAST_SEED = 2**31 - 1

_TEXT: Schema = {"type": "string"}
_PROBLEM: Schema = {
    "type": "object",
    "required": ["field", "value", "rule", "nearest", "sentence", "where"],
    "properties": {
        "field": {**_TEXT, "description": "what is wrong"},
        "value": {"description": "its value; null where none was given"},
        "rule": {**_TEXT, "description": "what it must be"},
        "nearest": {"description": "the nearest value that works; null where none is known"},
        "sentence": {**_TEXT, "description": "all of that as the command line prints it"},
        "where": _TEXT,
    },
}
SCHEMAS: dict[str, Schema] = {
    "Problem": _PROBLEM,
    "Refusal": {
        "type": "object",
        "required": ["error", "where"],
        "properties": {
            "error": {"type": "array", "minItems": 1, "items": {"$ref": "#/components/schemas/Problem"}},
            "where": _TEXT,
        },
    },
    "Working": {
        "type": "object",
        "required": ["working"],
        "properties": {
            "working": {
                "type": "object",
                "required": ["what", "done", "of"],
                "properties": {"what": _TEXT, "done": {"type": "integer"}, "of": {"type": "integer"}},
            }
        },
    },
    "Headline": {
        "type": "object",
        "required": ["name", "title", "text", "value", "unit", "formula", "basis", "source", "asked", "in_full"],
        "properties": {
            **dict.fromkeys(("name", "title", "text", "unit", "formula", "basis", "source"), _TEXT),
            "value": {"type": ["number", "null"]},
            "asked": {"type": "boolean", "description": "an exercise may ask for it"},
            "in_full": {**_TEXT, "description": "an exact number with all digits, where text has fewer; or empty"},
        },
    },
}
_HEADLINES: Schema = {"type": "array", "items": {"$ref": "#/components/schemas/Headline"}}
_TEXTS: Schema = {"type": "object", "additionalProperties": _TEXT}
_SAID: dict[str, Schema] = {"verdict": _TEXT, "tone": _TEXT, "headlines": _HEADLINES, "paste": _TEXTS}
# What each way to ask gives: its summary, its parameters before those of the calculator, and its answer.
WAYS: dict[str, tuple[str, dict[str, Schema], dict[str, Schema]]] = {
    "api": (
        "the answer as data",
        {},
        {"calculator": _TEXT, "query": _TEXTS, **_SAID, "data": {"type": "object"}, "figures": {"type": "object"}},
    ),
    "view": (
        "the answer as a page shows it: sections as HTML, drawings as SVG",
        {"width": {"type": "integer", "minimum": NARROWEST, "maximum": WIDEST, "default": 960}},
        {**_SAID, "sections": {"type": "array"}, "drawings": {"type": "array"}, "fields": {"type": "object"},
         "remedies": {"type": "array"}},
    ),
    "check": (
        "whether a guess of a headline that an exercise asks for is right, within 5 %",
        {"of": {**_TEXT, "maxLength": LONGEST}, "guess": {**_TEXT, "maxLength": LONGEST}},
        {"right": {"type": "boolean"}, "near": {"type": "boolean"}, "ratio": {"type": ["number", "null"]},
         "said": _TEXT, "headline": {"$ref": "#/components/schemas/Headline"}},
    ),
    "exercise": (
        "a query for an exercise, the same for the same seed",
        {"seed": {"type": "integer", "minimum": 0, "maximum": LAST_SEED}},
        {"query": _TEXTS},
    ),
}  # fmt: skip
LISTING: dict[str, Any] = {
    "responses": {
        "200": {
            "description": "the calculators",
            "content": {
                "application/json": {
                    "schema": {"type": "array", "items": {"type": "object", "required": ["name", "fields", "presets"]}}
                }
            },
        }
    }
}


def operation(way: str, calculator: Calculator) -> dict[str, Any]:
    """The description of one way to ask one calculator."""
    does, own, gives = WAYS[way]
    parameters = [_own(name, schema) for name, schema in own.items()]
    if way != "exercise":
        parameters += [_parameter(each) for each in calculator.fields]
        parameters += [_any_of_run()] * calculator.any_of_run
    answer = {"type": "object", "required": list(gives), "properties": gives}
    found = {200: _reply(does, answer), 422: _reply("what is wrong with the query", _ref("Refusal"))}
    if calculator.patient and way != "exercise":
        found[202] = _reply("not there yet: ask again with the same query", _ref("Working"))
    return {
        "summary": f"{calculator.title}: {does}",
        "description": calculator.question,
        "openapi_extra": {"parameters": parameters, "responses": {str(code): each for code, each in found.items()}},
    }


def whole(document: dict[str, Any], *, with_token: bool) -> dict[str, Any]:
    """The document of all operations with the schemas that they name, and the refusals that each may meet."""
    parts = document.setdefault("components", {})
    parts["schemas"] = SCHEMAS
    if with_token:
        parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    more = {"403": "an address that is not this server's", "429": "too many questions at once"}
    if with_token:
        more["401"] = "without the token"
    for path in document["paths"].values():
        for each in path.values():
            each["responses"] |= {code: _reply(text, _ref("Refusal")) for code, text in more.items()}
    return document


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


def _own(name: str, schema: Schema) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": "default" not in schema, "schema": schema}


def _any_of_run() -> dict[str, Any]:
    """Every other field of a run file, by its path."""
    names = {"pattern": r"^(model|recipe|layout|cluster|data)\.[a-z0-9_.]+$"}
    schema = {"type": "object", "propertyNames": names, "additionalProperties": {**_TEXT, "maxLength": LONGEST}}
    return {
        "name": "fields",
        "in": "query",
        "style": "form",
        "explode": True,
        "schema": schema,
        "description": "any field of a run file by its path, such as recipe.micro_batch",
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _reply(text: str, schema: Schema) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": schema}}}
