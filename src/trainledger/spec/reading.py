"""Tables of a run file and overrides as sections: every wrong field a sentence with the nearest that works."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from typing import Any

from trainledger.spec.parts import KIND, first_kind, kinds_of, known_fields, members_of, merged
from trainledger.spec.problem import Problem, nearest_text
from trainledger.spec.setting import NONE, Broken, may_be_none, quantity_of, read_value, rule_of

Sections = Mapping[str, type[Any]]
MEMBER = re.compile(r"[A-Za-z0-9_-]{1,40}")  # a name that TOML takes without quotes
MOST_UNKNOWN = 20  # names that each get a sentence: the nearest known one takes milliseconds to find


class Reader:
    """Reads sections; ``problems`` has what is wrong, ``guessed`` the names of fields that are wrong or missing.

    Those get a placeholder, so that contradictions between the others are found as well.
    """

    def __init__(self, sections: Sections, problems: list[Problem]) -> None:
        self.sections = sections
        self.problems = problems
        self.guessed: set[str] = set()

    def read(self, at: str, cls: type[Any], table: Mapping[str, Any], *, complete: bool = True) -> Any:
        """One section or part; None where ``complete`` is false, as its base is not known."""
        known = known_fields(cls)
        values: dict[str, Any] = {}
        strangers: list[tuple[str, Any]] = []
        for name, value in table.items():
            if name in known:
                self._value(f"{at}.{name}", known[name], value, values)
            elif name == KIND or getattr(cls, name, MISSING) != value:  # what is always so in a kind may be said
                strangers.append((name, value))
        for name, value in strangers[:MOST_UNKNOWN]:
            self._stranger(at, name, value, cls)
        if more := strangers[MOST_UNKNOWN:]:
            self.problems.append(Problem(at, None, f"has {len(more):,} more unknown fields"))
        for name, field in known.items():
            if field.default is not MISSING or name in values:
                continue
            if kinds_of(field) is not None:
                silent = self if complete and name not in table else Reader(self.sections, [])
                silent._part(f"{at}.{name}", field, {}, values)
                self.guessed |= silent.guessed
                continue
            if complete and name not in table:
                self.problems.append(Problem(f"{at}.{name}", None, f"is missing ({rule_of(field)['doc']})"))
            values[name] = 1
            self.guessed.add(name)
        return cls(**values) if complete else None

    def _value(self, path: str, field: Field[Any], value: Any, values: dict[str, Any]) -> None:
        try:
            if kinds_of(field) is not None and not (may_be_none(field) and value in (None, NONE)):
                self._part(path, field, value, values)
            elif members_of(field) is not None and value not in (None, NONE):
                self._members(path, field, value, values)
            else:
                values[field.name] = read_value(field, value)
        except Broken as broken:
            self.problems.append(Problem(path, value, broken.rule, broken.nearest))
            self.guessed.add(field.name)

    def _part(self, path: str, field: Field[Any], value: Any, values: dict[str, Any], *, complete: bool = True) -> None:
        kinds = kinds_of(field)
        assert kinds is not None
        if isinstance(value, str) and len(kinds) > 1:
            value = {KIND: value}
        if not isinstance(value, Mapping):
            one = f", or one of {', '.join(kinds)}" if len(kinds) > 1 else f": {', '.join(known_fields(kinds['']))}"
            raise Broken(f"must be a table of fields{one}", NONE if may_be_none(field) else None)
        tag = value.get(KIND, first_kind(field)) if len(kinds) > 1 else ""
        try:
            tag = read_value(field, tag) if len(kinds) > 1 else tag
        except Broken as broken:
            self.guessed |= {field.name, KIND}
            self.problems.append(Problem(path, tag, broken.rule, broken.nearest))
            tag = first_kind(field)
        inner = {str(name): one for name, one in value.items() if name != KIND or len(kinds) == 1}
        values[field.name] = self.read(path, kinds[tag], inner)

    def _members(self, path: str, field: Field[Any], value: Any, values: dict[str, Any]) -> None:
        cls = members_of(field)
        assert cls is not None
        known = [one.name for one in fields(cls)]
        if not isinstance(value, Mapping) or not value:
            raise Broken(f"must be tables by name: [{path}.NAME] with {', '.join(known)} below each")
        found = []
        for name in sorted(map(str, value)):  # TOML's tables have no order, so none of a file's may count
            inner = value[name]
            if not MEMBER.fullmatch(name):
                rule = "is not a name: letters, digits, - and _ only, at most 40"
                self.problems.append(Problem(f"{path}.{name}", None, rule))
            elif isinstance(inner, Mapping):
                found.append((name, self.read(f"{path}.{name}", cls, inner)))
            else:
                rule = f"must be a table of fields: [{path}.{name}] with {', '.join(known)} below"
                self.problems.append(Problem(f"{path}.{name}", inner, rule))
        values[field.name] = tuple(found)
        if len(found) < len(value):
            self.guessed.add(field.name)

    def _stranger(self, at: str, name: str, value: Any, cls: type[Any]) -> None:
        path = f"{at}.{name}"
        if name == "layout" and value == "auto":
            rule = f'unknown field of [{at}]; layout = "auto" belongs above all sections'
            self.problems.append(Problem(path, value, rule, "auto = true in [layout]"))
            return
        if owners := self._kinds_that_have(at, name.partition(".")[0]):
            rule = f"belongs to {_enumerated(owners)}, and {at} is {getattr(cls, KIND, 'none')}"
            self.problems.append(Problem(path, value, rule, f"{at} = {owners[0]}"))
            return
        known = [field.name for field in fields(cls)]
        if name == KIND:  # of a part that has no kinds
            nearest = None
        elif "." in at and field_of(self.sections, at) is None:  # one of several tables by name
            near = nearest_text(name, known)
            nearest = near and f"{at}.{near}"
        else:
            nearest = nearest_path(self.sections, f"{at.partition('.')[0]}.{name}")
        rule = f"unknown field of [{at}]"
        if not nearest:
            rule += f", which has {', '.join(known)}" if known else ", which has none"
        self.problems.append(Problem(path, value, rule, nearest))

    def _kinds_that_have(self, at: str, name: str) -> list[str]:
        section, *inner = at.split(".")
        cls: type[Any] = self.sections[section]
        kinds: dict[str, type[Any]] = {}
        for part in inner:
            found = [field for one in ([cls] if not kinds else kinds.values()) for field in fields(one)]
            kinds = next((kinds_of(field) or {} for field in found if field.name == part), {})
        return [tag for tag, one in kinds.items() if name in {field.name for field in fields(one)}]


def _enumerated(words: list[str]) -> str:
    return " and ".join([*([", ".join(words[:-1])] if words[:-1] else []), words[-1]])


def field_of(sections: Sections, path: str) -> Field[Any] | None:
    """The field that a path names, for any kinds of its parts."""
    section = path.partition(".")[0]
    return _by_path(section, sections[section]).get(path) if section in sections else None  # type: ignore[arg-type]


@cache
def _by_path(section: str, cls: type[Any]) -> dict[str, Field[Any]]:
    found: dict[str, Field[Any]] = {}
    for path, field in _fields(section, cls):
        found.setdefault(path, field)
    return found


def paths(sections: Sections) -> list[str]:
    """The paths of all fields, of every kind of each part."""
    return [path for path, _ in _leaves(sections)]


def nearest_path(sections: Sections, path: str, more: Iterable[str] = ()) -> str | None:
    """The path that a wrong one probably means: one that ends alike, with or without the name of its part or kind.

    Those of its own section come first; ``more`` are other words that may be meant. None of a section alone.
    """
    if path in sections:
        return None
    section, last = path.partition(".")[0], path.rpartition(".")[2]
    if last in _LENGTHS:
        return _LENGTHS[last]
    last = _OF_OTHERS.get(last, last)
    for found in (
        _words(((section, sections[section]),)) if section in sections else {},
        _words(tuple(sections.items())),
    ):
        wanted = last if last in found else nearest_text(path, more) or nearest_text(last, found)
        if wanted:
            return found.get(wanted, wanted)
    return None


# Lengths of a run that are of its data, whose size nobody says.
_LENGTHS = dict.fromkeys(
    ["epochs", "num_epochs", "num_train_epochs", "samples", "train_samples"], "recipe.steps or recipe.tokens"
)
# What trainers and papers call a field; a misspelling of ours is nearer to another field than to what is meant.
_OF_OTHERS = {
    **dict.fromkeys(["sequence", "context", "context_length", "block_size", "max_length", "max_seq_length"], "seq_len"),
    **dict.fromkeys(["batch", "batch_size", "train_batch_size"], "global_batch"),
    **dict.fromkeys(["micro_batch_size", "per_device_train_batch_size"], "micro_batch"),
    **dict.fromkeys(["gradient_checkpointing", "recompute"], "activation_checkpointing"),
    "lr": "learning_rate",
    "max_steps": "steps",
    "gpus": "count",
}


@cache
def _words(sections: tuple[tuple[str, type[Any]], ...]) -> Mapping[str, str]:
    """The names of a field, and its path: its own name, that behind its part's or its kind's, the path."""
    words: dict[str, str] = {}
    of_name = dict(sections)
    for path, _ in _leaves(of_name):
        *parts, name = path.split(".")
        more = [f"{prefix}_{name}" for prefix in (*parts[1:], *_tags(of_name, path))]
        for word in (name, path, *more):
            words.setdefault(word, path)
    return words


def _leaves(sections: Sections) -> Iterator[tuple[str, Field[Any]]]:
    for section, cls in sections.items():
        yield from _fields(section, cls)


def _fields(at: str, cls: type[Any]) -> Iterator[tuple[str, Field[Any]]]:
    seen: set[str] = set()
    for field in fields(cls):
        yield f"{at}.{field.name}", field
        for one in (kinds_of(field) or {}).values():
            for path, inner in _fields(f"{at}.{field.name}", one):
                if path not in seen:
                    seen.add(path)
                    yield path, inner


def _tags(sections: Sections, path: str) -> list[str]:
    """The kinds of the part in which a path ends."""
    above = path.rpartition(".")[0]
    each = field_of(sections, above) if "." in above else None
    last = path.rpartition(".")[2]
    return [tag for tag, one in (kinds_of(each) or {}).items() if tag and last in {field.name for field in fields(one)}]


AUTO = "auto"  # layout = "auto" at the top of a file, or --set layout=auto, is layout.auto = true
Overrides = Mapping[str, Any] | Iterable[str]


def put_overrides(
    classes: Sections, sections: dict[str, dict[str, Any]], overrides: Overrides, problems: list[Problem]
) -> None:
    """Put overrides into the sections of a file, whose fields are those of ``classes``; what is wrong joins problems.

    A value of None (or empty text) takes the field out, or all of a section.
    """
    pairs = overrides.items() if isinstance(overrides, Mapping) else _split(classes, overrides, problems)
    for key, value in pairs:
        section, dot, name = str(key).partition(".")
        if section == "layout" and not dot and value == AUTO:
            sections[section][AUTO] = True
        elif section in classes and not dot and value is None:
            sections[section] = {}
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
    for part in parts:
        inner = table.get(part)
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
    """The value in the text of an override: TOML where it is TOML (and the field is no text), else the text itself.

    In a list of words these need no quotes: ``[gradients, experts]``. A number of another base (0x10) stays a text, as
    in a quantity that has no TOML.
    """
    quantity = None if field is None else quantity_of(field)
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        if quantity not in ("texts", "paths", "counts") or not (text.startswith("[") and text.endswith("]")):
            return text
        words = text[1:-1].strip().removesuffix(",").split(",")
        return [word.strip().strip("\"'") for word in words]
    value = table["value"] if len(table) == 1 else text
    of_another_base = isinstance(value, int) and text.startswith(("0x", "0o", "0b"))
    return text if of_another_base or (quantity == "text" and not isinstance(value, str)) else value
