"""Documents out of a Parquet file; the only module that needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainledger.data.document import Document, Segment, clean, imported, missing_field
from trainledger.data.files import file_problem
from trainledger.spec.problem import InvalidInput
from trainledger.units import MIB

ROWS_AT_ONCE = 256


def row_groups(path: str) -> int:
    """Row groups in a Parquet file, at least one."""
    with _opened(path) as file:
        return max(1, int(file.num_row_groups))


def parquet_documents(segment: Segment, text_field: str) -> Iterator[Document]:
    """The documents of a segment's row groups, a few rows in memory at a time; null texts are left out."""
    arrow = imported("pyarrow", segment.path)
    with _opened(segment.path) as file:
        fields = list(file.schema_arrow.names)
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
                    what = str(error).splitlines()[0]
                    rule = f"is corrupt in row group {group} after row {row}: {what}"
                    raise InvalidInput([file_problem("data.path", segment.path, rule)]) from None
                if batch is None:
                    break
                # Arrow does not check that its text is UTF-8, so the bytes are decoded here.
                for cell in batch.column(0).cast(_binary_like(arrow, kind)):
                    value = cell.as_py()
                    if value is not None:
                        yield _document(value, f"{segment.path} row group {group} row {row}")
                    row += 1


def _document(utf8: bytes, place: str) -> Document:
    try:
        text, repaired = utf8.decode(), ""
    except UnicodeDecodeError as error:
        text, repaired = utf8.decode(errors="replace"), f"{place}, {error.start} bytes into the text"
    return Document(clean(text)[0], place, repaired)


def _binary_like(arrow: Any, kind: Any) -> Any:
    return arrow.large_binary() if arrow.types.is_large_string(kind) else arrow.binary()


def _opened(path: str) -> Any:
    arrow, parquet = imported("pyarrow", path), imported("pyarrow.parquet", path)
    try:
        # Buffered reading decodes a column page by page; without it a whole row group is read at once.
        return parquet.ParquetFile(path, buffer_size=MIB, pre_buffer=False)
    except arrow.ArrowException as error:
        rule = f"is not a whole Parquet file: {str(error).splitlines()[0]}"
        raise InvalidInput([file_problem("data.path", path, rule)]) from None
