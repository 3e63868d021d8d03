"""A document, the piece of a corpus that it comes from, and the documents of a text file."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from trainledger.engine.data.files import file_problem
from trainledger.spec.problem import InvalidInput
from trainledger.spec.units import KIB

_PARAGRAPH_END = re.compile(rb"\n\r?\n")


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
    source: int = 0  # the number of the file in the corpus


@dataclass(frozen=True)
class Document:
    """A text and its place; ``repaired`` names the first place that was not UTF-8, empty where all was.

    ``at`` is where it begins in its file: a byte (of the decompressed text) and 0, or a row group and a row.
    """

    text: str
    place: str
    repaired: str = ""
    at: tuple[int, int] = (0, 0)


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


def text_documents(segment: Segment) -> Iterator[Document]:
    with open(segment.path, "rb") as file:
        nul = file.read(8 * KIB).find(b"\0")
        if nul >= 0:
            rule = f"has a NUL byte at byte {nul}, so it is binary or UTF-16, not UTF-8 text"
            raise InvalidInput([file_problem("data.path", segment.path, rule, "convert it, or leave it out")])
        if not segment.piece_nbytes:
            file.seek(0)
            yield _decoded(file.read(), segment.path, 0)
            return
        piece = segment.piece_nbytes
        start = _piece_start(file, segment.start, segment)
        for nominal in range(segment.start + piece, segment.stop + piece, piece):
            stop = _piece_start(file, min(nominal, segment.stop), segment)
            file.seek(start)
            yield _decoded(file.read(stop - start), segment.path, start)
            start = stop


def _piece_start(file: BinaryIO, nominal: int, segment: Segment) -> int:
    """Where the piece nominally at ``nominal`` begins: after the first paragraph end from there on, else after
    the first line end, else at the first character; a function of the file and ``nominal`` alone, so that
    segments agree on it without having read each other."""
    if nominal in (0, segment.file_nbytes):
        return nominal
    file.seek(nominal)
    window = file.read(segment.piece_nbytes)
    paragraph = _PARAGRAPH_END.search(window)
    if paragraph:
        return nominal + paragraph.end()
    line_end = window.find(b"\n")
    if line_end >= 0:
        return nominal + line_end + 1
    continuation = 0
    while continuation < min(3, len(window)) and window[continuation] & 0xC0 == 0x80:
        continuation += 1
    return nominal + continuation


def _decoded(data: bytes, path: str, offset: int) -> Document:
    place = f"{path} byte {offset}"
    try:
        return Document(data.decode(), place, at=(offset, 0))
    except UnicodeDecodeError as error:
        return Document(data.decode(errors="replace"), place, f"{path} byte {offset + error.start}", (offset, 0))
