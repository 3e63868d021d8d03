"""Documents out of a piece of a corpus, one at a time, never a whole file that is large.

A document is a small text file, a piece of a large one, or a record of JSONL or Parquet. Bytes that are not
UTF-8, and halves of surrogate pairs in JSON, become U+FFFD, and the document says where the first of them stood:
real corpora contain some, and one bad byte must not end a preparation of hours.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from trainledger.engine.data.files import file_problem
from trainledger.engine.data.tokenizer import chat_text
from trainledger.spec.durable import opened
from trainledger.spec.problem import InvalidInput
from trainledger.spec.units import KIB, MIB

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
    with opened(segment.path) as file:
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


LONGEST_LINE_NBYTES = 256 * MIB  # a record is in memory at once
MOST_EXPANSION = 500  # text shrinks some 3 to 20 times, equal lines 100 to 300; a gzip bomb 1,000
FREE_NBYTES = 64 * MIB  # decompressed before the expansion is judged
ROWS_AT_ONCE = 256  # of a Parquet file


def documents(segment: Segment, text_field: str) -> Iterator[Document]:
    """The documents of a segment in order, those without text left out.

    Raises InvalidInput naming file and offset or line for what cannot be read.
    """
    try:
        present = os.stat(segment.path).st_size
        if present != segment.file_nbytes:
            rule = f"has {present} bytes and had {segment.file_nbytes} when preparing began: it is being changed"
            raise InvalidInput([file_problem("data.path", segment.path, rule, "prepare again when it is not")])
        if segment.kind == "parquet":
            found = _rows(segment, text_field)
        else:
            found = text_documents(segment) if segment.kind == "text" else _records(segment, text_field)
        for document in found:
            if document.text:
                yield document
    except OSError as error:
        raise problem_of_reading(segment.path, error) from None


def held_out(utf8: bytes, fraction: float) -> bool:
    """Whether a document is held out, decided by a keyed hash of its text: equal documents never part."""
    return split_hash(utf8) < fraction


def split_hash(utf8: bytes) -> float:
    """A document's place in [0, 1), uniform over documents."""
    digest = hashlib.blake2b(utf8, digest_size=8, key=b"trainledger: held out").digest()
    return int.from_bytes(digest, "big") / 2**64


# JSON lines.


def _records(segment: Segment, text_field: str) -> Iterator[Document]:
    """The texts of a file's records: its lines, or the elements of its array."""
    of_array = segment.kind == "json"
    for number, (offset, decoded, damaged) in enumerate(_array(segment) if of_array else _decoded_lines(segment), 1):
        place = f"{segment.path} byte {offset}" if segment.start else f"{segment.path}:{number}"
        record, repaired = decoded, "" if damaged is None else f"{place}, {damaged} bytes into the line"
        if isinstance(decoded, str):
            if not decoded.strip():
                continue
            try:
                record = json.loads(decoded)
            except (ValueError, RecursionError) as error:
                raise _bad_line(segment, offset, number, f"is not JSON: {_why(error)}", "data.path") from None
        if not isinstance(record, dict):
            rule = f"is a JSON {_json_kind(record)}, not an object with a field {text_field!r}"
            raise _bad_line(segment, offset, number, rule, "data.path")
        if text_field not in record:
            raise _bad_line(segment, offset, number, missing_field(text_field, list(record)), "data.text_field")
        text = record[text_field]
        text = chat_text(text) or text if isinstance(text, list) else text
        text = json.dumps(text) if isinstance(text, bool) and text_field == "label" else text  # of a single answer
        if text is None:
            continue
        if not isinstance(text, str):
            rule = f"its field {text_field!r} is a JSON {_json_kind(text)}, not text"
            raise _bad_line(segment, offset, number, rule, "data.text_field")
        text, had_halves = clean(text)
        yield Document(text, place, repaired or (place if had_halves else ""), (offset, 0))


def _decoded_lines(segment: Segment) -> Iterator[tuple[int, Any, int | None]]:
    """Where each line begins, its text, and the first byte of it that is no UTF-8."""
    for offset, line in _lines(segment):
        try:
            yield offset, line.decode("utf-8-sig" if offset == 0 else "utf-8"), None
        except UnicodeDecodeError as error:
            yield offset, line.decode(errors="replace"), error.start


def _array(segment: Segment) -> Iterator[tuple[int, Any, int | None]]:
    """The elements of a file that is one JSON array, by their numbers."""
    if segment.file_nbytes > LONGEST_LINE_NBYTES:
        rule = f"is a JSON array of {segment.file_nbytes} bytes, and at most {LONGEST_LINE_NBYTES} are read at once"
        raise InvalidInput([file_problem("data.path", segment.path, rule, "write it as JSON lines")])
    with opened(segment.path) as file:
        content = file.read()
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        line = f" in line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InvalidInput(
            [file_problem("data.path", segment.path, f"is not a JSON array: {_why(error)}{line}")]
        ) from None
    # A record that is itself text would be taken for a line.
    yield from ((number, None if isinstance(each, str) else each, None) for number, each in enumerate(found))


def _why(error: ValueError | RecursionError) -> str:
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def _json_kind(value: object) -> str:
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return kinds.get(type(value), "null")


def _bad_line(segment: Segment, offset: int, number: int, rule: str, field: str) -> InvalidInput:
    if segment.kind == "json":
        return InvalidInput([file_problem(field, f"{segment.path} record {number}", rule)])
    if segment.start:  # lines before the segment were not read, so they are counted now
        with opened(segment.path) as file:
            remaining = offset
            number = 1
            while remaining and (block := file.read(min(MIB, remaining))):
                number += block.count(b"\n")
                remaining -= len(block)
    return InvalidInput([file_problem(field, f"{segment.path}:{number}", f"{rule} (the line begins at byte {offset})")])


def _lines(segment: Segment) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in the segment, with the byte of the (decompressed) file where each begins."""
    if not segment.compression:
        with opened(segment.path) as file:
            # A line belongs to the segment in which it begins: the one running into this segment is read over.
            offset = 0
            if segment.start:
                file.seek(segment.start - 1)
                while not (line := file.readline(MIB)).endswith(b"\n") and line:
                    offset += len(line)
                offset += segment.start - 1 + len(line)
            while offset < segment.stop and (line := file.readline(LONGEST_LINE_NBYTES + 1)):
                _check_length(segment, offset, line)
                yield offset, line
                offset += len(line)
        return
    offset, kept = 0, bytearray()
    for chunk in _decompressed(segment):
        first, *others = chunk.split(b"\n")
        kept += first
        _check_length(segment, offset, kept)
        for following in others:
            yield offset, bytes(kept)
            offset += len(kept) + 1
            kept = bytearray(following)
    if kept:
        yield offset, bytes(kept)


def _check_length(segment: Segment, offset: int, line: bytes | bytearray) -> None:
    if len(line) > LONGEST_LINE_NBYTES:
        rule = f"has a line of more than {LONGEST_LINE_NBYTES} bytes (it begins at byte {offset})"
        raise InvalidInput([file_problem("data.path", segment.path, rule, "one record a line")])


def _decompressed(segment: Segment) -> Iterator[bytes]:
    """The bytes of a gzip or Zstandard file in pieces of at most a few MiB."""
    with opened(segment.path) as file:
        if segment.compression == "gz":
            stream = gzip.GzipFile(fileobj=file)
            pieces = iter(lambda: stream.read(MIB), b"")
        else:
            pieces = _unzstandard(file)
        nbytes = 0
        try:
            for piece in pieces:
                yield piece
                nbytes += len(piece)
                if nbytes > FREE_NBYTES and nbytes > MOST_EXPANSION * file.tell():
                    rule = f"expands more than {MOST_EXPANSION} times when it is decompressed, which no text does"
                    raise InvalidInput([file_problem("data.path", segment.path, rule, "leave it out")])
        except (EOFError, gzip.BadGzipFile, zlib.error, _DamagedError) as error:
            cut = isinstance(error, EOFError)
            what = "is truncated: its compressed stream ends" if cut else f"is corrupt ({error}): decompressing failed"
            rule = f"{what} by byte {file.tell()} of {segment.file_nbytes}"
            raise InvalidInput([file_problem("data.path", segment.path, rule)]) from None


class _DamagedError(Exception):
    """What zstandard says of a bad frame."""


def _unzstandard(file: BinaryIO) -> Iterator[bytes]:
    # stream_reader ends quietly on a truncated frame, so the frames are followed by hand.
    zstandard = imported("zstandard", file.name)
    frame = None
    pending = b""
    while pending or (pending := file.read(16 * KIB)):
        if frame is None:
            frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            yield frame.decompress(pending)
        except zstandard.ZstdError as error:
            raise _DamagedError(str(error)) from None
        pending = frame.unused_data if frame.eof else b""
        if frame.eof:
            frame = None
    if frame is not None:
        raise EOFError


# Parquet.


def row_groups(path: str) -> int:
    """Row groups in a Parquet file, at least one."""
    with _opened(path) as file:
        return max(1, int(file.num_row_groups))


def _rows(segment: Segment, text_field: str) -> Iterator[Document]:
    """The documents of a segment's row groups, a few rows in memory at a time; null texts are left out."""
    arrow = imported("pyarrow", segment.path)
    with _opened(segment.path) as file:
        fields = list(file.schema_arrow.names)
        if fields.count(text_field) > 1:
            rule = f"has {fields.count(text_field)} columns {text_field!r}, and which is the text is not known"
            raise InvalidInput([file_problem("data.text_field", segment.path, rule)])
        if text_field not in fields:
            rule = missing_field(text_field, fields)
            raise InvalidInput([file_problem("data.text_field", segment.path, rule)])
        kind = file.schema_arrow.field(text_field).type
        if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
            rule = f"its column {text_field!r} holds {kind}, not text"
            raise InvalidInput([file_problem("data.text_field", segment.path, rule)])
        for group in range(segment.start, min(segment.stop, file.num_row_groups)):
            row = 0
            batches = file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=[text_field], use_threads=False)
            while True:
                try:
                    batch = next(batches, None)
                except (arrow.ArrowException, OSError) as error:
                    rule = f"is corrupt in row group {group} after row {row}: {str(error).splitlines()[0]}"
                    raise InvalidInput([file_problem("data.path", segment.path, rule)]) from None
                if batch is None:
                    break
                # Arrow does not check that its text is UTF-8, so the bytes are decoded here.
                binary = arrow.large_binary() if arrow.types.is_large_string(kind) else arrow.binary()
                for cell in batch.column(0).cast(binary):
                    value = cell.as_py()
                    if value is not None:
                        yield _row_document(value, f"{segment.path} row group {group} row {row}", (group, row))
                    row += 1


def _row_document(utf8: bytes, place: str, at: tuple[int, int]) -> Document:
    try:
        text, repaired = utf8.decode(), ""
    except UnicodeDecodeError as error:
        text, repaired = utf8.decode(errors="replace"), f"{place}, {error.start} bytes into the text"
    return Document(clean(text)[0], place, repaired, at)


def _opened(path: str) -> Any:
    arrow, parquet = imported("pyarrow", path), imported("pyarrow.parquet", path)
    try:
        # Buffered reading decodes a column page by page; without it a whole row group is read at once.
        return parquet.ParquetFile(path, buffer_size=MIB, pre_buffer=False)
    except arrow.ArrowException as error:
        rule = f"is not a whole Parquet file: {str(error).splitlines()[0]}"
        raise InvalidInput([file_problem("data.path", path, rule)]) from None
