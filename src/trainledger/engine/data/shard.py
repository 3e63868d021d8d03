"""One shard of a token store: a part of the corpus, tokenized, in files that are whole or not there.

Shard 3 consists of ``00003.train.u16`` and ``00003.validation.u16`` (tokens), ``….ends.u64`` for each (where
its documents end, counted in tokens), ``….places.u64`` for each (where its documents come from: the number of the file,
and two numbers for the place in it), ``00003.counts.u64`` (how often each token occurs, train then validation), and
``00003.json``, written last, which records the others; a shard with a record is finished.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainledger.engine.data.documents import Document, Segment, documents, split_hash
from trainledger.engine.data.files import (
    BLOCK_NBYTES,
    WRITTEN_HERE,
    FileRecord,
    FileWriter,
    check_size,
    problem_of_writing,
    write_whole,
)
from trainledger.engine.data.tokenizer import Tokenizer
from trainledger.spec.dtypes import token_dtype
from trainledger.spec.durable import content_of, parse_json, sync
from trainledger.spec.problem import Problem
from trainledger.spec.units import ceil_div

SPLITS = ("train", "validation")
TOKENIZED_AT_ONCE = 2**16  # characters; an encoding takes some hundred bytes of memory per token
DTYPES = {"uint16": "u16", "uint32": "u32"}


@dataclass(frozen=True)
class SplitRecord:
    """How much of one split a shard holds."""

    tokens: int
    documents: int
    text_nbytes: int


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard: its files, its amounts, and what was not as it should be.

    ``repaired`` counts documents with bytes that are no UTF-8, the first of them at ``first_repaired``.
    ``smallest_hash`` is the smallest place of a document in [0, 1): with a validation fraction above it, that
    document would be held out.
    """

    files: tuple[FileRecord, ...]
    train: SplitRecord
    validation: SplitRecord
    repaired: int
    first_repaired: str
    smallest_hash: float


def token_file(shard: int, split: str, dtype: str) -> str:
    return f"{shard:05d}.{split}.{DTYPES[dtype]}"


def ends_file(shard: int, split: str) -> str:
    return f"{shard:05d}.{split}.ends.u64"


def places_file(shard: int, split: str) -> str:
    return f"{shard:05d}.{split}.places.u64"


def counts_file(shard: int) -> str:
    return f"{shard:05d}.counts.u64"


def write_shard(
    directory: Path,
    shard: int,
    segments: Iterable[Segment],
    *,
    text_field: str,
    tokenizer: Tokenizer,
    validation_fraction: float,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> ShardRecord:
    """Tokenize the segments into the files of one shard and record it; ``advance`` gets the bytes of text done.

    The bytes written depend on the arguments and the text alone. Raises InvalidInput for text that cannot be
    read and for a disk that cannot be written; nothing unfinished is left behind then.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    names = [
        name
        for split in SPLITS
        for name in (token_file(shard, split, dtype), ends_file(shard, split), places_file(shard, split))
    ]
    writers: list[FileWriter] = []
    try:
        writers.extend(FileWriter(directory / name) for name in (*names, counts_file(shard)))
        tokens, ends, places = writers[0:6:3], writers[1:6:3], writers[2:6:3]
        end = np.array([tokenizer.end_id], dtype=np.uint32)
        counts = np.zeros((len(SPLITS), tokenizer.vocab_size), dtype=np.uint64)
        totals = np.zeros((len(SPLITS), 3), dtype=np.int64)  # tokens, documents, bytes of text
        repaired, first_repaired, smallest = 0, "", 1.0
        for batch in _batches((segment.source, documents(segment, text_field)) for segment in segments):
            chosen: tuple[list[npt.NDArray[np.uint32]], ...] = ([], [])
            done = 0
            encoded = tokenizer.encode([document.text for _, document in batch])
            for (source, document), ids in zip(batch, encoded, strict=True):
                utf8 = document.text.encode()
                place = split_hash(utf8)
                side = int(place < validation_fraction)
                chosen[side].extend((ids, end))
                totals[side] += (len(ids) + 1, 1, len(utf8))
                ends[side].write(int(totals[side, 0]).to_bytes(8, "little"))
                places[side].write(np.array([source, *document.at], dtype="<u8").tobytes())
                smallest = min(smallest, place)
                first_repaired = first_repaired or document.repaired
                repaired += bool(document.repaired)
                done += len(utf8)
            for side, arrays in enumerate(chosen):
                if arrays:
                    together = np.concatenate(arrays)
                    counts[side] += np.bincount(together, minlength=tokenizer.vocab_size).astype(np.uint64)
                    tokens[side].write(together.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
            advance(done)
        writers[-1].write(counts.astype("<u8").tobytes())
        train, validation = (SplitRecord(*(int(each) for each in row)) for row in totals)
        files = tuple(writer.finish() for writer in writers)
        record = ShardRecord(files, train, validation, repaired, first_repaired, smallest)
        sync(directory)
        write_whole(directory / f"{shard:05d}.json", json.dumps(asdict(record)).encode())
    except OSError as error:
        raise problem_of_writing(directory, error) from None
    finally:
        for writer in writers:
            writer.abandon()
    return record


def read_record(directory: Path, shard: int) -> ShardRecord | None:
    """The record of a shard; None where it is not finished or a file of it has not the recorded size."""
    try:
        record = parse_record(parse_json(content_of(directory / f"{shard:05d}.json", WRITTEN_HERE)), shard)
    except (OSError, *DAMAGED):
        return None
    return None if any(check_size(directory / file.name, file.nbytes) for file in record.files) else record


# What a record or an index that is not as it was written gives while it is read.
DAMAGED = (ValueError, KeyError, TypeError, AttributeError, IndexError)


def parse_record(table: dict[str, Any], shard: int) -> ShardRecord:
    """A record out of its JSON; ValueError where its figures do not fit each other."""
    files = tuple(FileRecord(**each | {"crc32": tuple(each["crc32"])}) for each in table["files"])
    splits = {name: SplitRecord(**table[name]) for name in SPLITS}
    record = ShardRecord(**table | {"files": files} | splits)
    sizes = {file_record.name: file_record.nbytes for file_record in files}
    itemsizes = {token_file(shard, "train", dtype): np.dtype(dtype).itemsize for dtype in DTYPES}
    itemsize = next((each for name, each in itemsizes.items() if name in sizes), None)
    if itemsize is None:
        raise ValueError(f"shard {shard} has no file of tokens")
    dtype = f"uint{8 * itemsize}"
    for name in SPLITS:
        part: SplitRecord = getattr(record, name)
        if not all(type(each) is int and each >= 0 for each in (part.tokens, part.documents, part.text_nbytes)):
            raise ValueError(f"shard {shard} has invalid amounts of {name}")
        wanted = {token_file(shard, name, dtype): part.tokens * itemsize, ends_file(shard, name): part.documents * 8}
        if wanted.items() - sizes.items():
            raise ValueError(f"shard {shard} has files of {name} of other sizes than its amounts")
    for file in files:
        if len(file.crc32) != ceil_div(file.nbytes, BLOCK_NBYTES) or not isinstance(file.sha256, str):
            raise ValueError(f"{file.name} has another number of checksums than blocks")
    return record


def read_counts(directory: Path, shard: int) -> npt.NDArray[np.uint64]:
    """How often each token occurs in a shard: [2, vocab_size], train then validation."""
    return np.fromfile(directory / counts_file(shard), dtype="<u8").reshape(len(SPLITS), -1)


def size_problems(directory: Path, records: Iterable[ShardRecord]) -> Iterator[Problem]:
    """Every file of finished shards that is missing or has not its recorded size."""
    for record in records:
        for file in record.files:
            if problem := check_size(directory / file.name, file.nbytes):
                yield problem


def _batches(sources: Iterable[tuple[int, Iterator[Document]]]) -> Iterator[list[tuple[int, Document]]]:
    """The documents in order, each with the number of its file, gathered so that a batch has about
    `TOKENIZED_AT_ONCE` characters."""
    batch: list[tuple[int, Document]] = []
    characters = 0
    for number, source in sources:
        for document in source:
            batch.append((number, document))
            characters += len(document.text)
            if characters >= TOKENIZED_AT_ONCE:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch
