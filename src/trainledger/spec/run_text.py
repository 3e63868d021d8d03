"""A run as text: its commented file, and the overrides that turn one run into another."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, replace
from textwrap import TextWrapper
from typing import Any

from trainledger.spec import runfile
from trainledger.spec.frozen import frozen
from trainledger.spec.layers import checkpointed
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import KIND, chosen, explicit, first_kind, kinds_of, members_of, merged
from trainledger.spec.run import Run
from trainledger.spec.runfile import SECTIONS
from trainledger.spec.setting import NONE, rule_of


@frozen
class Difference:
    """One field of a run file in which two runs differ; None where it is absent."""

    field: str
    a: Any
    b: Any


def differences(a: Run, b: Run) -> tuple[Difference, ...]:
    """Every field that differs, in the order of the run file; of parts of two kinds those that were chosen."""
    ours, theirs = runfile.flat(a), runfile.flat(b)
    own = {
        f"{name}.{path}" for run in (a, b) for name, part in runfile.sections_of(run).items() for path in chosen(part)
    }
    return tuple(
        Difference(path, ours.get(path, NONE), theirs.get(path, NONE))
        for path in dict.fromkeys([*ours, *theirs])
        if path in own and ours.get(path, NONE) != theirs.get(path, NONE)
    )


def changed(run: Run, changes: Mapping[str, Any]) -> Run:
    """The run after overrides (``{"recipe.micro_batch": 2}``); raises InvalidInput where it is none that works."""
    return runfile.parse(runfile.resolved(run), changes)


def as_override(field: str, value: Any) -> str:
    """A change as ``--set`` takes it.

    >>> as_override("layout.stage_layers", (2, 2)), as_override("recipe.compile", True)
    ('layout.stage_layers=[2,2]', 'recipe.compile=true')
    """
    return f"{field}={_text(value)}"


def overrides(a: Run, b: Run) -> tuple[str, ...]:
    """The overrides that turn one run into the other, each as ``--set`` takes it."""
    theirs, found = runfile.flat(b), {}
    for difference in differences(a, b):
        path = difference.field
        while path not in theirs and "." in path:  # of a part that the other run has in another kind, or not at all
            path = path.rpartition(".")[0]
        found[path] = theirs.get(path, "")  # nothing is left of a section
    chosen_there = [f"{name}.{path}" for name, part in runfile.sections_of(b).items() for path in chosen(part)]
    for part in tuple(found):  # a part of another kind begins with the defaults of that kind
        found |= {path: theirs[path] for path in chosen_there if path.startswith(f"{part}.")}
    return tuple(as_override(path, value) for path, value in found.items())


def pasted_overrides(a: Run, b: Run) -> tuple[str, ...]:
    """The overrides that turn one run into the other, also where they are pasted before the search for its layout."""
    if not a.origin.searched:
        return overrides(a, b)
    asked = replace(a, layout=Layout(auto=True), recipe=checkpointed(replace(a.recipe, micro_batch=None), "none"))
    return tuple(dict.fromkeys((*overrides(asked, b), *overrides(a, b), *assumed_batch(a, b))))


def layout_overrides(a: Run, b: Run) -> tuple[str, ...]:
    """Those of `pasted_overrides` that spread a run over devices."""
    fields = ("layout.", "cluster.count", "recipe.micro_batch", "recipe.activation_checkpointing")
    batch = assumed_batch(a, b)
    return tuple(
        pasted_override
        for pasted_override in pasted_overrides(a, b)
        if pasted_override.startswith(fields) or pasted_override in batch
    )


def assumed_batch(a: Run, b: Run) -> tuple[str, ...]:
    """The batch that was assumed of ``a``, where the layout of ``b``, once given, would have another assumed."""
    unit = b.layout.data_ranks * b.layout.pipeline * (b.recipe.micro_batch or 1)
    batch = a.recipe.global_batch
    kept = "recipe.global_batch" in a.origin.assumed and batch == b.recipe.global_batch and batch % unit
    return (as_override("recipe.global_batch", batch),) if kept else ()


def found_layout(run: Run) -> tuple[str, ...]:
    """The overrides that lay a run out as the search for its layout did; none where there was no search."""
    return layout_overrides(run, run)


def _text(value: Any) -> str:
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return "[" + ",".join(_toml(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}={_toml(inner)}" for name, inner in value.items()) + "}"
    return str(value)


def _toml(value: Any) -> str:
    """A value inside of another one."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else _text(value)


_WIDTH = 80
_COLUMN = 34  # where comments begin
_NARROWEST = 16  # of the room after a value, for the first words of its comment
_ABOUT = {
    "model": "The model: a name of the catalog (trainledger catalog models), or its fields.",
    "recipe": "The recipe: how it is trained.",
    "layout": "The layout: over how many devices, and how.",
    "cluster": "The cluster: which devices.",
    "data": "The data: which text, and how it becomes tokens.",
    "teacher": "The teacher of distillation: a model of the catalog, or its fields.",
}


def commented(
    table: Mapping[str, Mapping[str, Any]],
    base: Mapping[str, Any] | None = None,
    *,
    why: Mapping[str, str] | None = None,
    every: bool = False,
) -> str:
    """A run file with the given fields, each with ``why`` it has its value (by path), or with what it means.

    With ``every`` it has all fields, the others as comments that show their default; ``base`` holds the model fields
    that a preset stands for, which are shown as the model's defaults.
    """
    why = why or {}
    lines = ["# A run file of trainledger: what differs from the defaults."]
    if every:
        lines = ["# A run file of trainledger. Lines that begin with # are not read: they show", "# the defaults."]
    lines.append('# Quantities may be written as text: "15T" tokens, "80GB"; none means no value.')
    for section, cls in SECTIONS.items():
        given = table.get(section, {})
        if not given and (not every or section == "teacher"):
            continue
        lines += ["", f"# {_ABOUT[section]}", f"[{section}]"]
        if cls is ModelSpec and "preset" in given:
            lines.extend(_commented(_line("preset", given["preset"]), why.get(f"{section}.preset", "")))
        own = {name: value for name, value in given.items() if name != "preset"}
        defaults = merged(cls, {}, base if section == "model" and base else {})
        reasons = {path.removeprefix(f"{section}."): reason for path, reason in why.items()}
        lines.extend(_fields(cls, merged(cls, {}, own), defaults, "", reasons, every=every))
    return "\n".join(lines) + "\n"


def _fields(
    cls: type[Any],
    given: Mapping[str, Any],
    base: Mapping[str, Any],
    before: str,
    why: Mapping[str, str],
    *,
    every: bool,
) -> Iterator[str]:
    for field in fields(cls):
        kinds, ours, theirs = kinds_of(field), given.get(field.name), base.get(field.name)
        path = before + field.name
        if kinds is not None and isinstance(ours or theirs or field.default, str | None):
            if every:
                yield from _field(path, field, None, field.default, _kinds_said(field))
        elif kinds is not None:
            mine = ours if isinstance(ours, Mapping) else {}
            default: Mapping[str, Any] = {} if field.default in (MISSING, None) else explicit(field.default)
            default = theirs if isinstance(theirs, Mapping) else default
            kind = mine.get(KIND) or default.get(KIND) or first_kind(field)
            if len(kinds) > 1 and (every or KIND in mine):
                said = why.get(path, "") or (_kinds_said(field, kind) if every else "")
                yield from _field(f"{path}.{KIND}", field, mine.get(KIND), kind, said)
            yield from _fields(kinds[kind], mine, default, f"{path}.", why, every=every)
        elif (member := members_of(field)) is not None and isinstance(ours, Mapping):
            for name, one in ours.items():
                yield from _fields(member, one, {}, f"{path}.{name}.", why, every=every)
        elif every or field.name in given:
            yield from _field(path, field, ours, base.get(field.name, field.default), why.get(path, ""))


def _kinds_said(part: Field[Any], shown: str | None = None) -> str:
    """The kinds of a part that its doc does not name, or that have fields which the one that is shown has not."""
    kinds = kinds_of(part) or {}
    own = {field.name for field in fields(kinds[shown])} if shown is not None else set()
    said = []
    for tag, kind in kinds.items():
        more = ", ".join(field.name for field in fields(kind) if field.name not in own)
        if more or tag not in rule_of(part)["doc"]:
            said.append(f"{tag} ({more})" if tag and more else tag or more)
    return f"{'a table of' if len(kinds) == 1 else 'kinds:'} {', '.join(said)}" if said else ""


def _field(path: str, field: Field[Any], value: Any, default: Any, said: str = "") -> Iterator[str]:
    """``name = value  # what it means``, commented out where no value is given."""
    rule = rule_of(field)
    doc = rule["doc"]
    if kinds_of(field) is not None:
        doc = "; ".join(filter(None, (doc, said))) if value is None else said or doc
    elif said:
        doc = said
    elif rule["choices"] and not all(choice in doc for choice in rule["choices"]):
        doc += f" ({', '.join(rule['choices'])})"
    if value is not None:
        line = _line(path, value)
    else:
        line = f"# {path} = " if default is MISSING else "# " + _line(path, default)
    yield from _commented(line, doc)


def _commented(line: str, doc: str) -> Iterator[str]:
    if not doc:
        yield line
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
    return [line.lstrip() for line in wrapper.wrap(doc)]


def _line(path: str, value: Any) -> str:
    import tomli_w

    plain = NONE if value is None else list(value) if isinstance(value, tuple) else value
    text = tomli_w.dumps({"x": plain}).strip().removeprefix("x")
    return path + (text if "\n" not in text else " " + " ".join(text.split()).replace(", ]", " ]"))
