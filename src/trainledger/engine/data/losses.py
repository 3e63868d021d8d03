"""Documents as tokens, held out by a store or of files; a model's loss of each, and of all with its standard error."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainledger.engine.data.corpus import find_corpus, plan_shards
from trainledger.engine.data.documents import Document, documents
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


@dataclass(frozen=True)
class DocumentLoss:
    """The sum of the losses of a document's tokens, its end token among them; ``source``: of a mixture."""

    place: str
    tokens: int
    text_nbytes: int
    nats: float
    source: str = ""

    @property
    def perplexity(self) -> float:
        return perplexity(self.nats / self.tokens)


@dataclass(frozen=True)
class Losses:
    """What a model makes of documents: nats per token over all tokens, and how sure that is.

    >>> even = Losses((DocumentLoss("a", 10, 40, 20.0), DocumentLoss("b", 30, 120, 60.0)))
    >>> even.nats_per_token, even.standard_error, round(even.bits_per_byte, 3)
    (2.0, 0.0, 0.721)
    """

    documents: tuple[DocumentLoss, ...]

    @property
    def by_source(self) -> dict[str, Losses]:
        """Those of each source, in the order in which they come."""
        names = dict.fromkeys(document.source for document in self.documents)
        return {
            name: Losses(tuple(document for document in self.documents if document.source == name)) for name in names
        }

    @property
    def tokens(self) -> int:
        return sum(document.tokens for document in self.documents)

    @property
    def text_nbytes(self) -> int:
        return sum(document.text_nbytes for document in self.documents)

    @property
    def nats_per_token(self) -> float:
        return math.fsum(document.nats for document in self.documents) / self.tokens

    @property
    def perplexity(self) -> float:
        return perplexity(self.nats_per_token)

    @property
    def bits_per_byte(self) -> float:
        """Loss of a byte of text, which does not depend on the tokenizer."""
        return math.fsum(document.nats for document in self.documents) / math.log(2) / self.text_nbytes

    @property
    def standard_error(self) -> float | None:
        """Standard error of the nats per token over documents drawn alike (a ratio of sums; Cochran 1977, section 6.4);
        None of a single document."""
        return _standard_error([(document.nats, document.tokens) for document in self.documents])


@dataclass(frozen=True)
class PairedLosses:
    """What two models make of the same documents: the second's nats per token above the first's, and how sure that is.

    >>> one = Losses((DocumentLoss("a", 10, 40, 20.0), DocumentLoss("b", 30, 120, 90.0)))
    >>> other = Losses((DocumentLoss("a", 10, 40, 21.0), DocumentLoss("b", 30, 120, 93.0)))
    >>> paired = PairedLosses(one, other)
    >>> paired.nats_per_token, paired.standard_error, round(one.standard_error, 2)
    (0.1, 0.0, 0.38)
    """

    before: Losses
    after: Losses

    @property
    def nats_per_token(self) -> float:
        return math.fsum(nats for nats, _ in self._differences()) / self.before.tokens

    @property
    def standard_error(self) -> float | None:
        """That of the difference, document by document: what is hard for both models takes no part in it."""
        return _standard_error(self._differences())

    def _differences(self) -> list[tuple[float, int]]:
        pairs = zip(self.before.documents, self.after.documents, strict=True)
        return [(after.nats - before.nats, before.tokens) for before, after in pairs]


def _standard_error(sums: Sequence[tuple[float, int]]) -> float | None:
    """That of a sum of nats over a sum of tokens, of documents drawn alike."""
    count, tokens = len(sums), sum(each for _, each in sums)
    if count < 2:
        return None
    mean = math.fsum(nats for nats, _ in sums) / tokens
    rest = math.fsum((nats - mean * of) ** 2 for nats, of in sums)
    return math.sqrt(rest * count / (count - 1)) / tokens


def perplexity(nats_per_token: float) -> float:
    """exp of the loss; infinite where that is no number."""
    try:
        return math.exp(nats_per_token)
    except OverflowError:
        return math.inf
