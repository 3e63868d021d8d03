"""Documents as tokens, to say what a model makes of each: those that a store holds out, and those of files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainledger.engine.data.corpus import find_corpus, plan_shards
from trainledger.engine.data.document import Document
from trainledger.engine.data.documents import documents
from trainledger.engine.data.store import TokenStore
from trainledger.engine.data.tokenizer import Tokenizer

_ENCODED_AT_ONCE = 64  # documents


@dataclass(frozen=True)
class TokenizedDocument:
    """A document's tokens, without an end token; where it was found, and the bytes of its text as UTF-8."""

    place: str
    ids: npt.NDArray[np.int64]
    text_nbytes: int
    source: str = ""


def held_out_documents(store: TokenStore, name: str = "") -> Iterator[TokenizedDocument]:
    """The documents of a store's validation split in their order, named by their number and the name of their source.

    The corpus itself is not read: it may be gone, and a store finds its documents without looking at the others.
    """
    split, tokenizer = store.validation, store.tokenizer()
    number, begin = 0, 0
    for shard in range(len(store.index["shards"])):
        shard_begin = begin
        for end in split.document_ends(shard).tolist():
            ids = split.read(begin, shard_begin + end - begin - 1).astype(np.int64)
            yield TokenizedDocument(
                f"{name} document {number}".lstrip(), ids, len(tokenizer.decode(ids.tolist()).encode()), name
            )
            number, begin = number + 1, shard_begin + end


def documents_of(
    paths: Sequence[str], tokenizer: Tokenizer, text_field: str, cache: Path
) -> Iterator[TokenizedDocument]:
    """The documents of files, directories and globs, cut and read as ``data.path`` is, each named by its place.

    Raises InvalidInput for what cannot be read.
    """
    corpus = find_corpus(tuple(paths), cache)
    found: Iterator[Document] = itertools.chain.from_iterable(
        documents(segment, text_field) for shard in plan_shards(corpus) for segment in shard
    )
    while some := list(itertools.islice(found, _ENCODED_AT_ONCE)):
        for document, ids in zip(some, tokenizer.encode([each.text for each in some]), strict=True):
            yield TokenizedDocument(document.place, ids.astype(np.int64), len(document.text.encode()))
