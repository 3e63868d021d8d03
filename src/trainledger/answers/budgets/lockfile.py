"""The lock: a TOML file with what each target cost when it was last accepted, made to be read in a diff."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainledger.answers.budgets.summary import Collectives, Place, Summary
from trainledger.answers.budgets.target import Target, read_target
from trainledger.spec.durable import opened
from trainledger.spec.frozen import frozen
from trainledger.spec.plain import from_plain, replace_file
from trainledger.spec.problem import InvalidInput, Problem

LOCK = "trainledger.lock"
FORMAT = 1
_WRITER = "Written by `trainledger lock`"
_HEAD = f"""\
# What each target costs in one optimizer step: counts, FLOPs, and bytes (kept, peak, payload).
# {_WRITER}; `trainledger check` fails where one becomes more. Commit it, do not edit it.
"""
TOTALS = {"parameters", "flops", "model_flops", "kept", "peak"}
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_LARGEST_NBYTES = 2**26
_ANEW = "take it from version control, or remove it and write it anew with `trainledger lock`"


@frozen
class Locked:
    """A target as it was locked: what it was, with which versions, and its figures."""

    target: Target
    versions: str
    summary: Summary


@frozen
class _Line:
    """A place in the file, its name left out."""

    parameters: int = 0
    flops: int = 0
    peak: int = 0
    kept: dict[str, int] | None = None


@frozen
class _Figures:
    """The figures of a target in the file."""

    totals: dict[str, int]
    versions: str = ""
    peak: dict[str, int] | None = None
    collectives: dict[str, Collectives] | None = None
    uncounted: dict[str, int] | None = None
    places: dict[str, _Line] | None = None
    functions: dict[str, str] | None = None


def read_lock(path: Path) -> dict[str, Locked]:
    """The targets of a lock by name; raises `InvalidInput` where it is missing, torn, or of another format."""
    where = os.fspath(path)
    try:
        with opened(path) as file:
            content = file.read(_LARGEST_NBYTES + 1)
        if len(content) > _LARGEST_NBYTES:
            raise InvalidInput([Problem(path.name, None, f"is longer than {_LARGEST_NBYTES:,} bytes")])
        table = tomllib.loads(content.decode())
    except FileNotFoundError:
        rule = "is not there; `trainledger lock` writes it, to be committed with the code"
        raise InvalidInput([Problem(where, None, rule)]) from None
    except OSError as error:
        raise InvalidInput([Problem(where, None, f"cannot be read: {error.strerror or error}")]) from None
    except RecursionError:
        raise InvalidInput([Problem(where, None, "is nested too deeply")]) from None
    except ValueError as error:  # of TOML or of UTF-8
        if isinstance(error, InvalidInput):
            raise
        rule = f"is not TOML: {error}; {_ANEW}"
        if any(line.startswith((b"<<<<<<< ", b">>>>>>> ")) for line in content.splitlines()):
            rule = "has the marks of a merge in it; take either side, then write it anew with `trainledger lock`"
        raise InvalidInput([Problem(path.name, None, rule)], where) from None
    lockeds = _parse(table, where)
    if not content.endswith(b"\n"):  # a figure may have lost its last digits
        raise InvalidInput([Problem(path.name, None, f"is torn: its last line has no end; {_ANEW}")], where)
    return lockeds


def is_a_lock(path: Path) -> bool:
    """Whether a file is a lock by its name or its first lines, be the rest what it may."""
    if path.suffix == ".lock":
        return True
    with opened(path) as file:
        return _WRITER.encode() in file.read(len(_HEAD))


def _parse(table: dict[str, Any], where: str) -> dict[str, Locked]:
    if "format" not in table and table:
        rule = (
            "is no lock of trainledger's: a lock says its format; name another file (--lock), or remove this one where "
            "it was a lock"
        )
        raise InvalidInput([Problem(Path(where).name, None, rule)], where)
    if table.get("format") != FORMAT:
        from trainledger import __version__

        rule = (
            f"is not a format that this version, trainledger {__version__}, reads; use the version that wrote it, or "
            "remove the file and write it anew with `trainledger lock`"
        )
        raise InvalidInput([Problem("format", table.get("format"), rule, FORMAT)], where)
    targets = table.get("targets", {})
    problems = [Problem(name, None, "is not of a lock") for name in table.keys() - {"format", "targets"}]
    if not isinstance(targets, dict):
        raise InvalidInput([*problems, Problem("targets", targets, "must be a table")], where)
    found = {}
    for name, fields in targets.items():
        try:
            found[name] = _locked(fields, f"targets.{name}")
        except InvalidInput as error:
            problems.extend(error.problems)
    if problems:
        rule = "is not what `trainledger lock` writes; remove it and write it anew"
        raise InvalidInput([*problems, Problem(Path(where).name, None, rule)], where)
    return found


def _locked(fields: object, at: str) -> Locked:
    if not isinstance(fields, Mapping):
        raise InvalidInput([Problem(at, fields, "must be a table")])
    own = _Figures.__dataclass_fields__
    target = read_target({key: value for key, value in fields.items() if key not in own}, at)
    try:
        figures = from_plain(_Figures, {key: value for key, value in fields.items() if key in own})
    except InvalidInput as error:
        raise InvalidInput(
            [Problem(f"{at}.{problem.field}", problem.value, problem.rule) for problem in error.problems]
        ) from None
    below = [Problem(f"{at}.{where}", value, "must not be negative") for where, value in _negative(fields)]
    if below:
        raise InvalidInput(below)
    for name in figures.totals.keys() ^ TOTALS:
        rule = "is missing" if name in TOTALS else "is not a total of a lock"
        raise InvalidInput([Problem(f"{at}.totals.{name}", None, rule)])
    places = tuple(_place(key, line) for key, line in (figures.places or {}).items())
    kinds = figures.peak or {}, figures.collectives or {}, figures.uncounted or {}
    return Locked(target, figures.versions, Summary(figures.totals, *kinds, places, figures.functions or {}))


def _negative(value: object, at: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _negative(each, f"{at}.{key}" if at else key)
    elif isinstance(value, int) and value < 0:
        yield at, value


def _place(key: str, line: _Line) -> Place:
    where, _, text = key.partition(": ")
    return Place(where, text, line.parameters, line.flops, line.peak, tuple((line.kept or {}).items()))


def write_lock(path: Path, targets: Mapping[str, Locked]) -> None:
    """Write a lock in one motion; equal targets give equal bytes."""
    replace_file(path, to_toml(targets).encode())


def to_toml(targets: Mapping[str, Locked]) -> str:
    """The text of a lock: targets by name, and in each the figures in a fixed order, one to a line."""
    lines = [f"{_HEAD}format = {FORMAT}"]
    for name, locked in sorted(targets.items()):
        at = f"targets.{_key(name)}"
        summary = locked.summary
        lines += ["", f"[{at}]", *(f"{key} = {_value(value)}" for key, value in locked.target.described().items())]
        lines.append(f"versions = {_value(locked.versions)}")
        places = {place.key: _line(place) for place in summary.places}
        collectives = {kind: vars(collective) for kind, collective in summary.collectives.items()}
        peak = dict(sorted(summary.peak.items()))
        sections: dict[str, Mapping[str, Any]] = {"totals": summary.totals, "peak": peak, "collectives": collectives}
        sections |= {"uncounted": summary.uncounted, "places": places, "functions": summary.functions}
        for section, table in sections.items():
            if table:
                lines += ["", f"[{at}.{section}]", *(f"{_key(key)} = {_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _line(place: Place) -> dict[str, Any]:
    amounts = {"parameters": place.parameters, "flops": place.flops, "peak": place.peak, "kept": dict(place.kept)}
    return {name: amount for name, amount in amounts.items() if amount}


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:_}"
    if isinstance(value, str):
        return '"' + "".join(_ESCAPES.get(each) or _shown(each) for each in value) + '"'
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{_key(key)} = {_value(each)}" for key, each in value.items()) + " }" if value else "{}"
        )
    return "[" + ", ".join(_value(each) for each in value) + "]"


_ESCAPES = {"\\": "\\\\", '"': '\\"'}


def _shown(character: str) -> str:
    return character if character.isprintable() else f"\\U{ord(character):08x}"
