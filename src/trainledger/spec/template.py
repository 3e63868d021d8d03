"""The commented run file that ``trainledger init`` writes, made from the metadata of the fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from textwrap import TextWrapper
from typing import Any

from trainledger.spec.runfile import SECTIONS
from trainledger.spec.setting import NONE, rule_of

_WIDTH = 80
_COLUMN = 34  # where comments begin
_NARROWEST = 16  # of the room behind a value, for the first words of its comment
_ABOUT = {
    "model": "The model: a name of the catalog (trainledger catalog models), or its fields.",
    "recipe": "The recipe: how it is trained.",
    "layout": "The layout: over how many devices, and how.",
    "cluster": "The cluster: which devices.",
    "data": "The data: which text, and how it becomes tokens.",
}


def commented(table: Mapping[str, Mapping[str, Any]], base: Mapping[str, Any] | None = None) -> str:
    """A run file with every field: given ones as they are, the others as comments that show their default.

    ``base`` holds the model fields that a preset stands for, which are shown as the model's defaults.
    """
    lines = [
        "# A run file of trainledger. Lines that begin with # are not read: they show",
        "# the defaults.",
        '# Quantities may be written as text: "15T" tokens, "80GB"; none means no value.',
    ]
    for section, cls in SECTIONS.items():
        given = table.get(section, {})
        lines += ["", f"# {_ABOUT[section]}", f"[{section}]"]
        if section == "model" and "preset" in given:
            lines.append(_line("preset", given["preset"]))
        for each in fields(cls):
            lines.extend(_field(each, given, base if section == "model" and base else {}))
    return "\n".join(lines) + "\n"


def _field(each: Field[Any], given: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[str]:
    """``name = value  # what it means``, commented out where the value is the default."""
    rule = rule_of(each)
    doc = rule["doc"]
    if rule["choices"] and not all(choice in doc for choice in rule["choices"]):
        doc += f" ({', '.join(rule['choices'])})"
    if each.name in given:
        line = _line(each.name, given[each.name])
    else:
        default = base.get(each.name, each.default)
        line = f"# {each.name} = " if default is MISSING else "# " + _line(each.name, default)
    room = _WIDTH - max(_COLUMN, len(line) + 1) - len("# ")
    if room < _NARROWEST:
        yield line
        line, room = "#", _WIDTH - _COLUMN - len("# ")
    for part in _lines_of(doc, room):
        yield f"{line:<{_COLUMN - 1}} # {part}"
        line = "#"


def _lines_of(doc: str, first: int) -> list[str]:
    """A sentence as lines, the first of them at most so many characters wide."""
    rest = _WIDTH - _COLUMN - len("# ")
    wrapper = TextWrapper(rest, initial_indent=" " * (rest - first), break_long_words=False, break_on_hyphens=False)
    return [each.lstrip() for each in wrapper.wrap(doc)]


def _line(name: str, value: Any) -> str:
    import tomli_w

    plain = NONE if value is None else list(value) if isinstance(value, tuple) else value
    text = tomli_w.dumps({name: plain}).strip()
    return text if "\n" not in text else " ".join(text.split()).replace(", ]", " ]")
