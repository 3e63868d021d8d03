"""Parts of a section of a run file: tables in a table, each with a ``kind`` where there are several.

A part is a frozen dataclass, one class for each kind, so that a field exists only where it has a meaning. A field
inside of parts has a path: ``attention.n_heads`` of a model. Here parts become tables and paths, and come back; what
a person writes is checked in `trainledger.spec.reading`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, field, fields, replace
from functools import cache
from typing import Any, TypeVar

from trainledger.spec.setting import NONE

T = TypeVar("T")
KIND = "kind"


def part(doc: str, *kinds: type[Any], default: Any = MISSING) -> Any:
    """A dataclass field that is a part of one of these kinds; the first is taken where no kind is given."""
    known = {tag_of(kind): kind for kind in kinds}
    metadata = {
        "doc": doc, "quantity": "part", "kinds": known, "at_least": None, "above": None, "at_most": None, "unit": "",
        "choices": tuple(known) if len(known) > 1 else None,
    }  # fmt: skip
    return field(default=default, metadata=metadata)


def tag_of(kind: object) -> str:
    """The name of a kind in a run file; empty where a part has one kind only."""
    return getattr(kind, KIND, "")


def kinds_of(declared: Field[Any] | None) -> dict[str, type[Any]] | None:
    """The kinds of a part by name; None for a field that is no part."""
    return None if declared is None else declared.metadata.get("kinds")


def members_of(declared: Field[Any] | None) -> type[Any] | None:
    """The class of each table of a field that holds any number of them by name; None for another field."""
    return None if declared is None else declared.metadata.get("members")


def table_of(section: Any) -> dict[str, Any]:
    """Every field of a section or part as plain values, those of its parts in separate tables."""
    tag = tag_of(section)
    table: dict[str, Any] = {KIND: tag} if tag else {}
    for declared in fields(section):
        value = getattr(section, declared.name)
        if kinds_of(declared) is not None and value is not None:
            value = table_of(value)
        elif members_of(declared) is not None and value is not None:
            value = {name: table_of(one) for name, one in value}
        table[declared.name] = list(value) if isinstance(value, tuple) else value
    return table


def explicit(section: Any) -> dict[str, Any]:
    """The same for TOML, which has no null: what is absent is left out, or said to be none where that is no default.

    A section may name in ``replaced`` fields that others replace: these are left out too.
    """
    tag = tag_of(section)
    table: dict[str, Any] = {KIND: tag} if tag else {}
    replaced = getattr(section, "replaced", ())
    for declared in fields(section):
        value = getattr(section, declared.name)
        if declared.name in replaced:
            continue
        if value is None:
            if declared.default is not None:
                table[declared.name] = NONE
        elif type(value) in (kinds_of(declared) or {}).values():
            table[declared.name] = explicit(value)
        elif members_of(declared) is not None:
            table[declared.name] = {name: explicit(one) for name, one in value}
        else:
            table[declared.name] = list(value) if isinstance(value, tuple) else value
    return table


def fields_of(section: Any) -> dict[str, Any]:
    """Every field by its path; a part has its kind as value, followed by its fields.

    >>> from trainledger.spec.model import ModelSpec
    >>> from trainledger.spec.block import RMSNorm
    >>> fields_of(RMSNorm(eps=1e-6))
    {'eps': 1e-06, 'plus_one': False}
    """
    return dict(_paths(section, ""))


def _paths(section: Any, before: str) -> Iterator[tuple[str, Any]]:
    for declared in fields(section):
        value, path = getattr(section, declared.name), before + declared.name
        if kinds_of(declared) is None or value is None:
            yield path, value
        else:
            if tag_of(value):
                yield path, tag_of(value)
            yield from _paths(value, f"{path}.")


def chosen(section: Any, before: str = "") -> dict[str, Any]:
    """The fields that are not as by default, by path; a part of another kind than by default has that as value.

    >>> from trainledger.spec.block import Linear, Rope
    >>> chosen(Rope(dim=64, scaling=Linear(factor=2.0)))
    {'dim': 64, 'scaling': 'linear', 'scaling.factor': 2.0}
    """
    found: dict[str, Any] = {}
    for declared in fields(section):
        value, path = getattr(section, declared.name), before + declared.name
        if members_of(declared) is not None and value is not None:
            for name, one in value:
                found |= chosen(one, f"{path}.{name}.")
        elif kinds_of(declared) is None or value is None:
            found |= {path: value} if value != declared.default else {}
        else:
            found |= {path: tag_of(value)} if tag_of(value) != tag_of(declared.default) else {}
            found |= chosen(value, f"{path}.")
    return found


def field_at(section: Any, path: str) -> Any:
    """The value at a path, a part as its kind; None where the parts that there are have no such field.

    >>> from trainledger.spec.model import ModelSpec
    >>> tiny = from_fields(ModelSpec, {"vocab_size": 8, "d_model": 8, "n_layers": 1, "attention.n_heads": 2,
    ...     "feed_forward.d_ff": 8, "max_seq_len": 8})
    >>> field_at(tiny, "attention.n_heads"), field_at(tiny, "positions"), field_at(tiny, "positions.extra_rows")
    (2, 'rope', None)
    """
    for name in path.split("."):
        section = getattr(section, name, None)
    return tag_of(section) if hasattr(section, "__dataclass_fields__") else section


def from_fields(cls: type[T], given: Mapping[str, Any]) -> T:
    """A section of fields by name or path, unchecked: sizes may be arrays or symbols.

    What a kind has no field for may be None, or as it always is in that kind.
    """
    return cls(**_built(cls, merged(cls, {}, given)))


def with_fields(section: T, changes: Mapping[str, Any]) -> T:
    """The same section with other values at these paths, unchecked: sizes may be arrays or symbols.

    A text in place of a part is a kind; the fields that it shares with the one before keep their values, where those
    are not the defaults of that.

    >>> from trainledger.spec.block import Llama3, Rope
    >>> with_fields(Rope(scaling=Llama3(factor=8.0)), {"theta": 5e5, "scaling.factor": 4.0}).scaling.factor
    4.0
    """
    cls, known = type(section), known_fields(type(section))
    touched = {path.partition(".")[0] for path in changes}
    before = {name: getattr(section, name) for name in touched if name in known}
    return replace(section, **_built(cls, merged(cls, before, changes)))  # type: ignore[type-var]


def _built(cls: type[Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a table, parts as their classes."""
    known, fields = known_fields(cls), {}
    for name, value in table.items():
        kinds = kinds_of(known.get(name))
        if kinds is not None and isinstance(value, Mapping):
            inner = {key: one for key, one in value.items() if key != KIND}
            fields[name] = from_fields(kinds[value.get(KIND, first_kind(known[name]))], inner)
        elif name in known or value not in (None, getattr(cls, name, None)):
            fields[name] = tuple(value) if isinstance(value, list) else value
    return fields


def merged(cls: type[Any], base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A table of fields with those of another over it, part by part.

    Another kind of a part keeps what was chosen of the fields that it shares with the one before. A key may be a path.
    Tables by name are replaced as a whole, unless the path leads to a field of one of them.
    """
    table = dict(base)
    known = known_fields(cls)
    for path, value in sorted(own.items(), key=lambda item: item[0].count(".")):  # a part's kind before its fields
        name, dot, rest = path.partition(".")
        each = known.get(name)
        if members_of(each) is not None:
            table[name] = _merged_member(table.get(name), rest, value) if dot else _members(value)
            continue
        if kinds_of(each) is None:
            name = path
        elif dot:
            value = {rest: value}
        table[name] = value if each is None or kinds_of(each) is None else _merged_part(each, table.get(name), value)
    return table


def _merged_part(declared: Field[Any], before: object, value: Any) -> Any:
    """A part as it is written, over its value before: a table, or anything else that the reader refuses."""
    kinds = kinds_of(declared)
    assert kinds is not None
    if type(value) in kinds.values():
        return explicit(value)
    if isinstance(value, str) and len(kinds) > 1 and (value != NONE or NONE in kinds):
        value = {KIND: value}
    if not isinstance(value, Mapping):
        return value
    value = {str(name): one for name, one in value.items()}
    table = _table(before)
    tag, now = table.get(KIND, first_kind(declared)), value.get(KIND)
    cls = kinds.get(now if isinstance(now, str) else tag) if isinstance(now or tag, str) else None
    if cls is None:
        return {**table, **value}
    if now not in (None, tag):
        old: Mapping[str, Field[Any]] = known_fields(kinds[tag]) if tag in kinds else {}
        chosen = {name: one for name, one in table.items() if name not in old or one != old[name].default}
        table = {name: one for name, one in chosen.items() if name in known_fields(cls)}
    return merged(cls, table, value)


def _merged_member(before: object, path: str, value: Any) -> dict[str, Any]:
    """Tables by name with another value at a path (``code.weight``), or another table at a name."""
    tables = {str(name): one for name, one in before.items()} if isinstance(before, Mapping) else {}
    name, dot, rest = path.partition(".")
    inner = tables.get(name)
    tables[name] = {**(inner if isinstance(inner, Mapping) else {}), rest: value} if dot else value
    return tables


def _members(value: Any) -> Any:
    """Tables by name, of the classes that they may be given as; anything else is refused by the reader."""
    pairs = value.items() if isinstance(value, Mapping) else value if isinstance(value, tuple) else None
    if pairs is None:
        return value
    return {str(name): explicit(one) if hasattr(one, "__dataclass_fields__") else one for name, one in pairs}


def _table(value: object) -> dict[str, Any]:
    if hasattr(value, "__dataclass_fields__"):
        return explicit(value)
    if isinstance(value, str) and value != NONE:
        return {KIND: value}
    return dict(value) if isinstance(value, Mapping) else {}


def known_fields(cls: type[Any]) -> Mapping[str, Field[Any]]:
    """The fields of a section or a part by name."""
    return _by_name(cls)  # type: ignore[arg-type]


@cache
def _by_name(cls: type[Any]) -> Mapping[str, Field[Any]]:
    return {declared.name: declared for declared in fields(cls)}


def first_kind(declared: Field[Any]) -> str:
    """The kind of a part for which none is given."""
    return str(next(iter(declared.metadata["kinds"])))
