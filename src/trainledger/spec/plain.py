"""Frozen dataclasses from plain data (what TOML and JSON files hold) and back, every wrong field a sentence."""

from __future__ import annotations

import json
import os
import tomllib
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from trainledger.spec.durable import content_of, parse_json
from trainledger.spec.problem import InvalidInput, Problem, nearest_text

T = TypeVar("T")
_WORDS = {str: "a text", int: "a whole number", float: "a finite number", bool: "true or false"}
NO_FIELD = "is not a known field"
_LARGEST = 2**120  # beyond every quantity of a run; ratios and sums of what is within it are finite floats


def table_beside(module: str, name: str = "") -> dict[str, Any]:
    """The TOML table beside a module, given by its ``__file__``: of the module's own name, or another."""
    path = Path(module)
    return tomllib.loads((path.with_name(name) if name else path.with_suffix(".toml")).read_text(encoding="utf-8"))


def to_plain(value: Any) -> dict[str, Any]:
    """A dataclass as a dict of plain values; fields that are None are left out, as TOML has no word for them."""

    def filled(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: inner for key, inner in pairs if inner is not None}

    return asdict(value, dict_factory=filled)


def from_plain(cls: type[T], data: object, where: str = "") -> T:
    """A dataclass from a dict, its fields checked against their types; InvalidInput has every problem found.

    The ``problems()`` of a dataclass are contradictions between its fields.
    """
    problems: list[Problem] = []
    value = _dataclass(cls, data, "", problems)
    if problems:
        raise InvalidInput(problems, where)
    return typing.cast(T, value)


def read_json(cls: type[T], path: str | os.PathLike[str]) -> T:
    """A dataclass from a JSON file; InvalidInput where the file is missing, torn or says something else."""
    where = os.fspath(path)
    try:
        data = parse_json(content_of(path))
    except OSError as error:
        raise InvalidInput([Problem(Path(path).name, None, f"cannot be read: {error.strerror}")], where) from error
    except ValueError as error:
        raise InvalidInput([Problem(Path(path).name, None, f"is not whole JSON: {error}")], where) from error
    return from_plain(cls, data, where)


def write_json(value: Any, path: str | os.PathLike[str]) -> None:
    """A dataclass as a JSON file, which appears whole or not at all."""
    replace_file(path, (json.dumps(to_plain(value), indent=1, allow_nan=False) + "\n").encode())


def finite(value: Any) -> Any:
    """Plain data with None for every number that JSON cannot write.

    >>> finite({"a": [1.5, float("inf")], "b": float("nan")})
    {'a': [1.5, None], 'b': None}
    """
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def is_amount(value: object) -> bool:
    """A value is a number that can be a quantity: finite, and neither absurdly large nor absurdly small."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value == 0 or 1 / _LARGEST <= abs(value) <= _LARGEST  # false for nan


def check_target(path: str | os.PathLike[str], field: str = "file") -> None:
    """Raise InvalidInput unless a file can be put there: over none or a regular one, where files may be written."""
    where = os.fspath(path)
    parent = os.path.dirname(where) or "."
    if not where:
        raise InvalidInput([Problem(field, where, "must not be empty")])
    if os.path.isdir(where):
        raise InvalidInput([Problem(field, where, "is a directory; name a file in it")])
    if os.path.exists(where) and not os.path.isfile(where):
        raise InvalidInput([Problem(field, where, "is not a regular file, and only regular files are replaced")])
    if not os.path.isdir(parent):
        rule = f"{parent!r} is not a directory" if os.path.exists(parent) else f"there is no directory {parent!r}"
        raise InvalidInput([Problem(field, where, rule)])
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InvalidInput([Problem(field, where, f"cannot be written: the directory {parent!r} takes no new files")])


def replace_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file in one motion: a reader sees the old content or the new, and a crash leaves one of them.

    Raises InvalidInput as `check_target` does.
    """
    check_target(path)
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(draft, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except OSError as error:
        raise not_written(error, path) from None
    finally:
        draft.unlink(missing_ok=True)


def not_written(error: OSError, path: str | os.PathLike[str], field: str = "file") -> OSError | InvalidInput:
    """The error to raise where the system refused a file whose place `check_target` found good.

    Where the disk is full that is no wrong input: the same error, with the file's own name.
    """
    from trainledger.spec.durable import is_full

    where = os.fspath(path)
    if is_full(error):
        return OSError(error.errno, error.strerror, where)
    return InvalidInput([Problem(field, where, f"cannot be written: {error.strerror}")])


def _dataclass(cls: type[Any], data: object, at: str, problems: list[Problem]) -> Any:
    if not isinstance(data, dict):
        problems.append(Problem(at or "file", None, f"must be a table of fields, not {type(data).__name__}"))
        return None
    hints = _hints(cls)  # type: ignore[arg-type]  # classes hash; mypy overlooks it
    known = {field.name: field for field in fields(cls)}
    found = [
        Problem(_join(at, key), data[key], NO_FIELD, nearest_text(str(key), known))
        for key in data.keys() - known.keys()
    ]
    values = {}
    for name, declared in known.items():
        if name in data:
            values[name] = _value(hints[name], data[name], _join(at, name), found)
        elif declared.default is MISSING and declared.default_factory is MISSING:
            found.append(Problem(_join(at, name), None, "is missing"))
    if not found:
        value = cls(**values)
        ask = getattr(value, "problems", None)
        found = [
            Problem(_join(at, problem.field), problem.value, problem.rule, problem.nearest) for problem in _asked(ask)
        ]
        if not found:
            return value
    problems.extend(found)
    return None


@cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _asked(ask: Any) -> Iterator[Problem]:
    return ask() if ask is not None else iter(())


def _value(hint: Any, data: Any, at: str, problems: list[Problem]) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return None if data is None else _value(inner[0], data, at, problems)
    if is_dataclass(hint):
        return _dataclass(typing.cast(type[Any], hint), data, at, problems)
    if origin is tuple:
        if isinstance(data, list | tuple):
            return tuple(_value(inner[0], item, f"{at}[{place}]", problems) for place, item in enumerate(data))
        problems.append(Problem(at, data, "must be a list"))
        return None
    if origin is dict:
        if isinstance(data, dict) and all(isinstance(key, str) for key in data):
            return {key: _value(inner[1], each, _join(at, key), problems) for key, each in data.items()}
        problems.append(Problem(at, data, "must be a table"))
        return None
    fits = isinstance(data, (int, float) if hint is float else hint) and (isinstance(data, bool) == (hint is bool))
    if not fits or (isinstance(data, float) and not isfinite(data)):
        problems.append(Problem(at, data, f"must be {_WORDS[hint]}"))
    elif hint in (int, float) and not is_amount(data):
        problems.append(Problem(at, data, "is too large or too small to be a quantity of a run"))
    return data


def _join(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name
