"""The token store: memory-mapped shards of tokens, and an index that says what they are.

One directory per data: ``index.json`` (written last, so that a store with an index is complete),
``tokenizer.json`` and the files of each shard (see `shard`). Tokens are little-endian uint16 where the
vocabulary allows it, else uint32.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainledger.engine.data.files import (
    REMEDY,
    WRITTEN_HERE,
    Blocks,
    Verified,
    check_file,
    check_size,
    file_problem,
    identity,
)
from trainledger.engine.data.shard import (
    DAMAGED,
    SPLITS,
    ShardRecord,
    ends_file,
    parse_record,
    places_file,
    size_problems,
    token_file,
)
from trainledger.engine.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer
from trainledger.spec.dtypes import token_dtype
from trainledger.spec.durable import content_of, parse_json
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.runfile import vocabulary_problem

FORMAT = 2
INDEX = "index.json"
TOKENIZER = "tokenizer.json"
OPEN_MAPS = 256  # an open map holds a file descriptor, and many systems allow 1,024

Tokens = npt.NDArray[np.unsignedinteger[Any]]  # uint16 or uint32


class Split:
    """The train or the validation part: one stream of tokens, its documents each followed by an end token."""

    def __init__(
        self,
        directory: Path,
        name: str,
        dtype: str,
        vocab_size: int,
        records: Sequence[ShardRecord],
        verified: Verified,
    ) -> None:
        self.name = name
        self.vocab_size = vocab_size
        self._directory = directory
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.shards = len(records)
        self._files = [token_file(shard, name, dtype) for shard in range(len(records))]
        parts = [getattr(record, name) for record in records]
        self._tokens_before = [0, *itertools.accumulate(part.tokens for part in parts)]
        self.tokens: int = self._tokens_before[-1]
        self._documents_before = [0, *itertools.accumulate(part.documents for part in parts)]
        self.documents: int = self._documents_before[-1]
        self.text_nbytes: int = sum(part.text_nbytes for part in parts)
        self._records = {file.name: file for record in records for file in record.files}
        self._verified = verified
        self._map = functools.lru_cache(maxsize=OPEN_MAPS)(self._open)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per token, end tokens counted; loss in nats / ln 2 / this is bits per byte."""
        return self.text_nbytes / max(self.tokens, 1)

    def sequences(self, seq_len: int) -> int:
        """Sequences of ``seq_len`` predicted tokens in the stream, each token predicted at most once."""
        return max(self.tokens - 1, 0) // seq_len

    def read(self, start: int, count: int) -> Tokens:
        """Tokens ``start`` to ``start + count`` of the stream, across shards, in the dtype they are stored in.

        Raises InvalidInput naming file and bytes where a block is not as it was written, or a token is outside the
        vocabulary.
        """
        tokens: Tokens = self.read_rows([start], count)[0]
        return tokens

    # 256 rows of 1,025 tokens took 4.2 ms from slices of a memory map, 0.84 ms from plain arrays straight into the
    # batch, and 1.5 ms now with the check of each token and widening to int64; a copy of the same int64 takes 0.79 ms
    # (two cores).
    def read_rows(self, starts: Sequence[int], count: int) -> Tokens:
        """For each start the ``count`` tokens from it on, as `read` gives them: [starts, count]."""
        for start in (min(starts), max(starts)) if starts else ():
            if start < 0 or start + count > self.tokens:
                raise IndexError(f"tokens {start} to {start + count} of a {self.name} split of {self.tokens}")
        parts: list[Tokens] = [np.empty(0, self.dtype)]
        for start in starts:
            at, stop = start, start + count
            while at < stop:
                shard, offset = self._place(at)
                whole, blocks = self._map(shard)
                part = whole[offset : offset + stop - at]
                blocks.check(whole, offset, len(part))
                parts.append(part)
                at += len(part)
        rows = np.concatenate(parts).reshape(len(starts), count)
        if rows.size and rows.max() >= self.vocab_size:
            at, position = divmod(int(np.argmax(rows >= self.vocab_size)), count)
            raise self._outside(starts[at] + position, int(rows[at, position]))
        return rows

    def document_ends(self, shard: int) -> npt.NDArray[np.uint64]:
        """Where the documents of one shard end, counted in tokens of the shard's part of this split."""
        return self._numbers(ends_file(shard, self.name))

    def _numbers(self, name: str) -> npt.NDArray[np.uint64]:
        """A whole file of the index beside the tokens; InvalidInput where it is not as it was written."""
        path = self._directory / name
        numbers = np.fromfile(path, dtype="<u8")
        Blocks(path, self._records[name], self._verified).check(numbers, 0, len(numbers))
        return numbers

    def documents_in(self, start: int, count: int) -> Iterator[tuple[int, tuple[int, int, int]]]:
        """Every document with tokens ``start`` to ``start + count`` of the stream: its number in the split (the first
        is 0), and where it comes from (number of the file, and two numbers for the place in it)."""
        done = 0
        while done < count:
            shard, offset = self._place(start + done)
            length = min(count - done, self._tokens_before[shard + 1] - start - done)
            ends = self.document_ends(shard)
            places = self._numbers(places_file(shard, self.name)).reshape(-1, 3)
            first, last = np.searchsorted(ends, [offset, offset + length - 1], side="right").tolist()
            for index in range(first, last + 1):
                source, *at = places[index].tolist()
                yield self._documents_before[shard] + index, (source, at[0], at[1])
            done += length

    def _place(self, position: int) -> tuple[int, int]:
        shard = bisect.bisect_right(self._tokens_before, position) - 1
        return shard, position - self._tokens_before[shard]

    def _open(self, shard: int) -> tuple[npt.NDArray[Any], Blocks]:
        path = self._directory / self._files[shard]
        tokens = self._tokens_before[shard + 1] - self._tokens_before[shard]
        # A map reaching past the end of its file would end the process at the first look there.
        if problem := check_size(path, tokens * self.dtype.itemsize):
            raise InvalidInput([problem])
        # As a plain array: each slice of a np.memmap is one too, which costs more than the copy of a row.
        return np.asarray(np.memmap(path, dtype=self.dtype, mode="r")), Blocks(
            path, self._records[path.name], self._verified
        )

    def _outside(self, position: int, token: int) -> InvalidInput:
        shard, offset = self._place(position)
        path = self._directory / self._files[shard]
        rule = (
            f"the token at byte {offset * self.dtype.itemsize} is {token}, outside the vocabulary of {self.vocab_size}"
        )
        return InvalidInput([file_problem("data.cache", path, rule, REMEDY)])


@dataclass(frozen=True)
class TokenStore:
    """A prepared corpus: its two splits, its tokenizer, and what the text itself says of a model's loss.

    ``fingerprint`` names the data: stores with equal fingerprints give equal batches.
    ``unigram_entropy_nats`` is the loss on the held-out tokens of a model that knows only how often each token
    occurs in the train split, counts plus one.
    """

    directory: Path
    index: dict[str, Any]
    train: Split
    validation: Split

    @property
    def fingerprint(self) -> str:
        return str(self.index["fingerprint"])

    @property
    def vocab_size(self) -> int:
        return int(self.index["vocab_size"])

    @property
    def end_id(self) -> int:
        """The token that ends a document."""
        return int(self.index["end_id"])

    @property
    def unigram_entropy_nats(self) -> float:
        return float(self.index["unigram_entropy_nats"])

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per token of the validation split, which turns its loss into bits per byte."""
        return self.validation.bytes_per_token

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens.

        Raises InvalidInput where ``tokenizer.json`` is not the one the index names.
        """
        if self.index["tokenizer"]["name"] == "bytes":
            return ByteTokenizer()
        path = self.directory / TOKENIZER
        try:
            definition = content_of(path, WRITTEN_HERE)
        except (OSError, ValueError) as error:
            raise InvalidInput([file_problem("data.cache", path, f"cannot be read: {error}", _ANEW)]) from None
        tokenizer = JsonTokenizer(self.index["tokenizer"]["name"], definition, self.end_id)
        if tokenizer.fingerprint != self.index["tokenizer"]["fingerprint"]:
            rule = "is not the tokenizer that these tokens were made with"
            raise InvalidInput([file_problem("data.cache", path, rule, _ANEW)])
        return tokenizer

    def verify(self) -> None:
        """Read every file of the store and compare its SHA-256; InvalidInput names each that differs and where.

        What is whole is remembered for this machine.
        """
        self.tokenizer()
        verified, problems = Verified(self.directory), []
        for shard, table in enumerate(self.index["shards"]):
            for file in parse_record(table, shard).files:
                path = self.directory / file.name
                before = identity(path) if path.exists() else None
                if problem := check_file(path, file):
                    problems.append(problem)
                elif before is not None:
                    verified.remember(file.name, before)
        if problems:
            raise InvalidInput(problems)


_ANEW = "remove its directory and prepare again"


def with_checksum(index: dict[str, Any]) -> dict[str, Any]:
    """An index with the SHA-256 of all else that it says."""
    content = {name: each for name, each in index.items() if name != "sha256"}
    return {**content, "sha256": hashlib.sha256(json.dumps(content).encode()).hexdigest()}


def read_index(path: Path) -> tuple[dict[str, Any], list[ShardRecord]]:
    """An index and the records of its shards (none where it is of another format).

    Raises OSError, or one of `DAMAGED` where it is not as it was written.
    """
    index: dict[str, Any] = parse_json(content_of(path, WRITTEN_HERE))
    if index["format"] != FORMAT:
        return index, []
    if "sha256" in index and index != with_checksum(index):  # stores that were made before have none
        raise ValueError("its SHA-256 does not match its content")
    for name, kind in _INDEX.items():
        if type(index[name]) is not kind:
            raise TypeError(f"{name} is a {type(index[name]).__name__}")
    if index["dtype"] != token_dtype(index["vocab_size"]) or not 0 <= index["end_id"] < index["vocab_size"]:
        raise ValueError(f"{index['dtype']} tokens of a vocabulary of {index['vocab_size']} end in {index['end_id']}")
    for name in ("name", "fingerprint"):
        if not isinstance(index["tokenizer"][name], str):
            raise TypeError(f"tokenizer.{name} is no text")
    return index, [parse_record(each, shard) for shard, each in enumerate(index["shards"])]


# What is read of an index, in addition to the records of its shards.
_INDEX = {
    "fingerprint": str,
    "dtype": str,
    "vocab_size": int,
    "end_id": int,
    "tokenizer": dict,
    "corpus": dict,
    "unigram_entropy_nats": float,
    "repaired": int,
    "first_repaired": str,
    "shards": list,
}


def open_store(directory: Path) -> TokenStore:
    """The store in a directory, after a check of its index and of the size of every file.

    Raises InvalidInput naming what is missing, truncated or of another format.
    """
    path = directory / INDEX
    try:
        index, records = read_index(path)
    except OSError as error:
        raise InvalidInput([file_problem("data.cache", path, f"cannot be read: {error.strerror}", _ANEW)]) from None
    except DAMAGED as error:
        rule = f"is damaged and does not say what the store holds ({type(error).__name__}: {error})"
        raise InvalidInput([file_problem("data.cache", path, rule, _ANEW)]) from None
    if index["format"] != FORMAT:
        rule = f"is of format {index['format']}, and this version reads format {FORMAT}"
        raise InvalidInput([file_problem("data.cache", path, rule, _ANEW)])
    verified = Verified(directory)
    splits = [Split(directory, name, index["dtype"], index["vocab_size"], records, verified) for name in SPLITS]
    if problems := list(size_problems(directory, records)):
        raise InvalidInput(problems)
    return TokenStore(directory, index, *splits)


def check_vocabulary(store: TokenStore, model_vocab_size: int) -> None:
    """Raise InvalidInput where the model's vocabulary is smaller than the data's."""
    tokenizer = f"the tokenizer {store.index['tokenizer']['name']}, end of document included"
    if problem := vocabulary_problem(model_vocab_size, store.vocab_size, tokenizer):
        raise InvalidInput([problem])


def check_lengths(store: TokenStore, seq_len: int, name: str = "") -> None:
    """Raise InvalidInput where a split is shorter than one sequence and the token after it; ``name``: of a source."""
    problems, of = [], f"source {name} of data.mixture" if name else "corpus"
    for split in (store.train, store.validation):
        if not split.sequences(seq_len):
            rule = (
                f"needs {seq_len + 1} consecutive tokens, and the {split.name} split of the {of} in "
                f"{store.directory} has {split.tokens}"
            )
            nearest = split.tokens - 1 if split.tokens > 1 else "a larger corpus"
            problems.append(Problem("recipe.seq_len", seq_len, rule, nearest))
    if problems:
        raise InvalidInput(problems)
