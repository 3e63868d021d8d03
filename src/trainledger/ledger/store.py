"""Ledgers on disk: JSON, compressed where the name ends in .gz, and read back without loss."""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from dataclasses import fields
from pathlib import Path
from typing import Any

from trainledger.ledger.entry import Entry, TensorLife
from trainledger.ledger.ledger import Ledger
from trainledger.spec.plain import replace_file
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.units import GIB

FORMAT = 1
_ENTRY = {each.name: each.default for each in fields(Entry)}
_TENSOR = {each.name: each.default for each in fields(TensorLife)}
_PAIRS = ("allocated", "freed", "loop", "resident", "uncounted")
_SIZES = ("shape", "fused")


def to_json(ledger: Ledger) -> dict[str, Any]:
    """A ledger of numbers as plain data; fields at their defaults are left out.

    Raises TypeError for a ledger of arrays or symbols, which is not one run.
    """
    head = {name: getattr(ledger, name) for name in _HEAD}
    head |= {name: getattr(ledger, name) for name in _TRACED if getattr(ledger, name)}
    entries = [_told(each, _ENTRY) for each in ledger.entries]
    tensors = [_told(each, _TENSOR) for each in ledger.tensors]
    for record in (head, *entries, *tensors):
        for name, value in record.items():
            if not _is_plain(value):
                raise TypeError(f"{name} = {value!r} of a ledger is not a number that can be stored")
    lives = {"tensors": tensors} if tensors else {}
    return {"format": FORMAT, **head, "entries": entries, **lives}


def _told(record: Entry | TensorLife, defaults: dict[str, Any]) -> dict[str, Any]:
    facts = {name: getattr(record, name) for name in defaults}
    return {name: value for name, value in facts.items() if value != defaults[name]}


def from_json(data: dict[str, Any]) -> Ledger:
    """The ledger that `to_json` wrote; InvalidInput where it is not one."""
    try:
        if data["format"] != FORMAT:
            raise InvalidInput([Problem("format", data["format"], "is not a ledger this version reads", FORMAT)])
        entries = tuple(Entry(**_tuples(each)) for each in data["entries"])
        tensors = tuple(TensorLife(**_tuples(each)) for each in data.get("tensors", ()))
        traced = {"partial": data.get("partial", ""), "notes": tuple(data.get("notes", ()))}
        return Ledger(entries, **_tuples({name: data[name] for name in _HEAD}), **traced, tensors=tensors)
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidInput([Problem("ledger", None, f"is not what trainledger writes: {error}")]) from error


LARGEST_NBYTES = GIB  # of a ledger as text: a million entries
_TRACED = ("partial", "notes")  # what few ledgers have
_HEAD = tuple(each.name for each in fields(Ledger) if each.name not in ("entries", "tensors", *_TRACED))


def write_ledger(ledger: Ledger, path: str | os.PathLike[str]) -> None:
    """Store a ledger; the file appears whole or not at all, and equal ledgers give equal files."""
    content = json.dumps(to_json(ledger), separators=(",", ":"), allow_nan=False).encode()
    replace_file(path, gzip.compress(content, mtime=0) if os.fspath(path).endswith(".gz") else content)


def read_ledger(path: str | os.PathLike[str]) -> Ledger:
    """The ledger in a file; InvalidInput where it is missing, torn or something else."""
    where = os.fspath(path)
    try:
        content = Path(path).read_bytes()
        return from_json(json.loads(_unpacked(content) if where.endswith(".gz") else content))
    except OSError as error:
        rule = f"cannot be read: {error.strerror or error}"
        raise InvalidInput([Problem(Path(path).name, None, rule)], where) from error
    except (EOFError, zlib.error, ValueError, RecursionError) as error:
        if isinstance(error, InvalidInput):
            raise InvalidInput(list(error.problems), where) from error
        raise InvalidInput([Problem(Path(path).name, None, f"is torn or no ledger: {error}")], where) from error


def _unpacked(content: bytes) -> bytes:
    """The text of a compressed ledger; ValueError where it is longer than any ledger is."""
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        text = file.read(LARGEST_NBYTES + 1)
    if len(text) > LARGEST_NBYTES:
        raise ValueError(f"it has more than {LARGEST_NBYTES} bytes when it is decompressed")
    return text


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, str | int | float)


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    tuples = dict(record)
    for name, value in record.items():
        if name in _PAIRS:
            tuples[name] = tuple((str(key), amount) for key, amount in value)
        elif name in _SIZES:
            tuples[name] = tuple(value)
    return tuples
