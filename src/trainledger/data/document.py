"""A document, the piece of a corpus that it comes from, and what readers of every kind of file share."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from trainledger.data.files import file_problem
from trainledger.spec.problem import InvalidInput


@dataclass(frozen=True)
class Segment:
    """A part of a file: bytes ``start`` to ``stop`` (row groups of a Parquet file).

    ``piece_nbytes`` is the nominal size of the documents that a large text file is cut into, 0 where the file is
    one document.
    """

    path: str
    kind: str
    compression: str
    file_nbytes: int
    start: int
    stop: int
    piece_nbytes: int = 0


@dataclass(frozen=True)
class Document:
    """A text and where it stands; ``repaired`` names the first place that was not UTF-8, empty where all was."""

    text: str
    place: str
    repaired: str = ""


def clean(text: str) -> tuple[str, bool]:
    """The text with lone halves of surrogate pairs replaced, and whether there were any.

    >>> clean("a\\ud83d\\ude00"), clean("a\\ud83d")
    (('a😀', True), ('a\ufffd', True))
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"), True
    return text, False


def imported(package: str, path: str) -> Any:
    """A package that only some corpora need, or the sentence that says how to get it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        rule = f"needs the package {package.split('.')[0]} to be read, which is not installed"
        raise InvalidInput([file_problem("data.path", path, rule, "pip install 'trainledger[train]'")]) from None


def problem_of_reading(path: str, error: OSError) -> InvalidInput:
    """A corpus file that cannot be read, as a sentence."""
    return InvalidInput([file_problem("data.path", path, f"cannot be read: {error.strerror or error}")])


def missing_field(wanted: str, fields: list[str]) -> str:
    """The rule broken by a record without its text field."""
    return f"has no field {wanted!r}; its fields are {', '.join(map(repr, fields)) or 'none'}"
