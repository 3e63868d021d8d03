"""Changes of single fields of a run file, as ``--set`` writes them: ``recipe.micro_batch=2``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field
from typing import Any

from trainledger.spec.parts import merged
from trainledger.spec.problem import Problem
from trainledger.spec.reading import Sections, field_of, nearest_path
from trainledger.spec.setting import rule_of

AUTO = "auto"  # layout = "auto" at the top of a file, or --set layout=auto, is layout.auto = true
Overrides = Mapping[str, Any] | Iterable[str]


def put_overrides(
    classes: Sections, sections: dict[str, dict[str, Any]], overrides: Overrides, problems: list[Problem]
) -> None:
    """Put overrides into the sections of a file, whose fields are those of ``classes``; what is wrong joins problems.

    A value of None (or empty text) takes the field out.
    """
    pairs = overrides.items() if isinstance(overrides, Mapping) else _split(classes, overrides, problems)
    for key, value in pairs:
        section, dot, name = str(key).partition(".")
        if section == "layout" and not dot and value == AUTO:
            sections[section][AUTO] = True
        elif section == "layout" and not dot:
            rule = f'must be "{AUTO}", or is set field by field, such as layout.tensor=8'
            problems.append(Problem(section, value, rule, AUTO))
        elif not dot or section not in classes:
            rule = "an override names section.field, such as recipe.micro_batch=2"
            problems.append(Problem(str(key), value, rule, nearest_path(classes, str(key))))
        elif value is None:
            _take_out(sections[section], name)
        else:
            sections[section] = merged(classes[section], sections[section], {name: value})


def _take_out(table: dict[str, Any], path: str) -> None:
    *parts, last = path.split(".")
    for each in parts:
        inner = table.get(each)
        if not isinstance(inner, dict):
            return
        table = inner
    table.pop(last, None)


def _split(classes: Sections, overrides: object, problems: list[Problem]) -> Iterator[tuple[str, Any]]:
    """The pairs of one text or of several."""
    texts = [overrides] if isinstance(overrides, str) else overrides
    for each in texts if isinstance(texts, Iterable) else [texts]:
        if not isinstance(each, str):
            rule = "overrides are a dict of fields, or texts written section.field=value"
            problems.append(Problem("overrides", each, rule))
            continue
        key, equals, text = each.partition("=")
        key = key.strip()
        if not equals:
            problems.append(Problem(each, None, "an override is written section.field=value"))
        else:
            yield key, value_of(field_of(classes, key), text.strip()) if text.strip() else None


def value_of(field: Field[Any] | None, text: str) -> Any:
    """What the text of an override says: TOML where it is TOML (and the field is no text), else the text itself.

    In a list of words these need no quotes: ``[gradients, experts]``.
    """
    quantity = None if field is None else rule_of(field)["quantity"]
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        if quantity not in ("texts", "counts") or not (text.startswith("[") and text.endswith("]")):
            return text
        words = text[1:-1].strip().removesuffix(",").split(",")
        return [each.strip().strip("\"'") for each in words]
    value = table["value"] if len(table) == 1 else text
    return text if quantity == "text" and not isinstance(value, str) else value
