"""Several token stores as one: which source each row of a batch comes from, a pure function of data, seed and row.

Rows are counted over the whole run: row 5 of step 2 is 2 x the global batch + 5. Every `BLOCK_ROWS` rows have the same
number of sequences from each source, in an order drawn by the seed and the number of the block. So how many rows of a
source precede a row is a sum, and each source has separate epochs without a state. A corpus alone is a
mixture of one source.

The train split is cut into sequences of ``seq_len`` tokens that do not overlap, each read with the token after it. An
epoch visits every one once, in an order given by a keyed permutation that is computed for the places asked for, not
stored; the next epoch has another key and begins where the last one ended, in the middle of a batch if need be.

Shapes: B sequences, T = seq_len, so that a batch is [B, T + 1] tokens.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainledger.engine.data.prepare import prepare_each
from trainledger.engine.data.store import Split, Tokens, TokenStore, check_lengths, check_vocabulary
from trainledger.engine.data.tokenizer import Tokenizer
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import BLOCK_ROWS, DataSpec, dealt
from trainledger.spec.units import ceil_div

Places = npt.NDArray[np.uint64]
ROUNDS = 6


def permute(places: Places, n: int, key: bytes) -> Places:
    """Where each place in 0 … n - 1 goes under a permutation of them that the key names.

    A Feistel network on a grid of a x b >= n cells (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002):
    each round adds to one coordinate a keyed hash of the other, which can be undone whatever the hash; a place that
    lands in one of the fewer than a cells beyond n is sent on until it does not.

    >>> sorted(permute(np.arange(10, dtype=np.uint64), 10, b"key").tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    a = np.uint64(math.isqrt(n - 1) + 1)
    b = np.uint64(ceil_div(n, int(a)))
    digest = hashlib.blake2b(key, digest_size=8 * ROUNDS).digest()
    round_keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    moved = places.copy()
    outside = np.ones(len(places), dtype=bool)
    while outside.any():
        left, right = np.divmod(moved[outside], b)
        for number, round_key in enumerate(round_keys):
            if number % 2:
                right = (right + _mixed(left, round_key) % b) % b
            else:
                left = (left + _mixed(right, round_key) % a) % a
        moved[outside] = left * b + right
        outside = moved >= n
    return moved


def _mixed(values: Places, key: np.uint64) -> Places:
    """A hash of each value: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    mixed = values ^ key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def sequences_of_step(n: int, *, seed: int, step: int, global_batch: int, first: int, count: int) -> Places:
    """The sequences, numbered 0 to n - 1, in rows ``first`` to ``first + count`` of the global batch of ``step``.

    Steps count from 0. The step's place in the order of all epochs is ``step * global_batch``, so nothing depends on
    how the batch is split into micro-batches or ranks.
    """
    return sequences_at(n, seed=seed, begin=step * global_batch + first, count=count)


def sequences_at(n: int, *, seed: int, begin: int, count: int, name: str = "") -> Places:
    """The sequences, numbered 0 to n - 1, at places ``begin`` to ``begin + count`` in the order of all epochs.

    A source of a mixture has a separate order by its ``name``.
    """
    chosen = np.empty(count, dtype=np.uint64)
    done = 0
    while done < count:
        epoch, place = divmod(begin + done, n)
        length = min(count - done, n - place)
        places = np.arange(place, place + length, dtype=np.uint64)
        key = " ".join(filter(None, ("trainledger order", str(seed), str(epoch), name)))
        chosen[done : done + length] = permute(places, n, key.encode())
        done += length
    return chosen


def train_batch(
    store: TokenStore, *, seed: int, step: int, global_batch: int, seq_len: int, rank: int = 0, ranks: int = 1
) -> Tokens:
    """The batch of a step, or what one of ``ranks`` ranks has of its rows: [B / ranks, T + 1] tokens as stored.

    Raises InvalidInput where the train split is shorter than a sequence or holds a token outside the vocabulary.
    """
    if global_batch % ranks:
        raise ValueError(f"a global batch of {global_batch} does not split over {ranks} ranks")
    n = store.train.sequences(seq_len)
    if not n:
        check_lengths(store, seq_len)
    rows = global_batch // ranks
    chosen = sequences_of_step(n, seed=seed, step=step, global_batch=global_batch, first=rank * rows, count=rows)
    return read_sequences(store.train, chosen, seq_len)


def validation_batch(store: TokenStore, *, first: int, count: int, seq_len: int) -> Tokens:
    """Held-out sequences ``first`` to ``first + count`` of a fixed order that is spread over the split: [count, T + 1].

    Fewer rows where the split has no more. Raises InvalidInput as `train_batch` does.
    """
    n = store.validation.sequences(seq_len)
    if not n:
        check_lengths(store, seq_len)
    places = np.arange(first, max(min(first + count, n), first), dtype=np.uint64)
    return read_sequences(store.validation, permute(places, n, b"trainledger validation order"), seq_len)


def read_sequences(split: Split, sequences: Places, seq_len: int) -> Tokens:
    """The tokens of sequences, each with the token after it: [B, T + 1]."""
    return split.read_rows([each * seq_len for each in sequences.tolist()], seq_len + 1)


@dataclass(frozen=True)
class Source:
    """A token store, its name (empty where there is no other), and how many of `BLOCK_ROWS` sequences are from it."""

    name: str
    store: TokenStore
    rows: int

    @property
    def share(self) -> float:
        """The share of all sequences that are from it."""
        return self.rows / BLOCK_ROWS


@dataclass(frozen=True)
class Mixture:
    """Sources in the order of their names, tokenized alike; mixtures with equal fingerprints give equal batches."""

    sources: tuple[Source, ...]

    @property
    def fingerprint(self) -> str:
        if len(self.sources) == 1:
            return self.sources[0].store.fingerprint
        identity = [[source.name, source.rows, source.store.fingerprint] for source in self.sources]
        return hashlib.sha256(json.dumps({"rows": BLOCK_ROWS, "sources": identity}).encode()).hexdigest()

    @property
    def unigram_entropy_nats(self) -> float:
        """Loss of a model that knows of each source only how often each token occurs in it."""
        return sum(source.share * source.store.unigram_entropy_nats for source in self.sources)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all sources; raises InvalidInput as that of a store does."""
        return self.sources[0].store.tokenizer()

    def check_vocabulary(self, model_vocab_size: int) -> None:
        """Raise InvalidInput where the model's vocabulary is smaller than the data's."""
        check_vocabulary(self.sources[0].store, model_vocab_size)

    def check_lengths(self, seq_len: int) -> None:
        """Raise InvalidInput for each source of which a split is shorter than a sequence and the token after it."""
        problems: list[Problem] = []
        for source in self.sources:
            try:
                check_lengths(source.store, seq_len, source.name)
            except InvalidInput as error:
                problems.extend(error.problems)
        if problems:
            raise InvalidInput(problems)

    def verify(self) -> None:
        """Compare every file with its SHA-256; raises InvalidInput as the store that differs does."""
        for source in self.sources:
            source.store.verify()

    def evaluated(self, sequences: int, seq_len: int) -> Mapping[str, int]:
        """How many held-out sequences of each source an evaluation of so many takes: as the sources are mixed, at
        least one of each, and no more than there are."""
        wanted = dealt(sequences, [source.rows for source in self.sources])
        return {
            source.name: min(max(count, 1), source.store.validation.sequences(seq_len))
            for source, count in zip(self.sources, wanted, strict=True)
        }

    def epochs(self, rows: int, *, seed: int, seq_len: int) -> Mapping[str, float]:
        """How often the first so many rows go through the sequences of each source."""
        _, taken = self._rows(seed, rows, 0)
        return {
            source.name: taken[at] / max(1, source.store.train.sequences(seq_len))
            for at, source in enumerate(self.sources)
        }

    def sequences(
        self, *, seed: int, begin: int, count: int, seq_len: int
    ) -> Iterator[tuple[Source, npt.NDArray[np.int64], Places]]:
        """Of each source that has rows ``begin`` to ``begin + count``: which of them, counted from ``begin``, and the
        number of the sequence in each."""
        chosen, before = self._rows(seed, begin, count)
        for at, source in enumerate(self.sources):
            rows = np.flatnonzero(chosen == at)
            n = source.store.train.sequences(seq_len)
            if len(rows):
                yield source, rows, sequences_at(n, seed=seed, begin=before[at], count=len(rows), name=source.name)

    def _rows(self, seed: int, begin: int, count: int) -> tuple[npt.NDArray[np.int64], list[int]]:
        """The source of each row by its number, and how many rows of each source precede them."""
        block, first = divmod(begin, BLOCK_ROWS)
        last = (begin + count - 1) // BLOCK_ROWS if count else block
        sizes = tuple(source.rows for source in self.sources)
        whole = np.concatenate([_order(sizes, seed, number) for number in range(block, last + 1)])
        before = [block * source.rows + int((whole[:first] == at).sum()) for at, source in enumerate(self.sources)]
        return whole[first : first + count], before


@functools.lru_cache(maxsize=16)
def _order(rows: tuple[int, ...], seed: int, block: int) -> npt.NDArray[np.int64]:
    """The source of each row of a block, by its number."""
    if len(rows) == 1:
        return np.zeros(BLOCK_ROWS, dtype=np.int64)
    places = permute(np.arange(BLOCK_ROWS, dtype=np.uint64), BLOCK_ROWS, f"trainledger mixture {seed} {block}".encode())
    return np.repeat(np.arange(len(rows)), rows)[places.astype(np.int64)]


def alone(store: TokenStore) -> Mixture:
    """A corpus that is not mixed with others."""
    return Mixture((Source("", store, BLOCK_ROWS),))


def open_mixture(data: DataSpec, *, vocab_size: int | None, progress: bool, workers: int | None = None) -> Mixture:
    """The token stores of all sources with their shares, made where they do not exist yet.

    Arguments and errors are those of `prepare`. Other weights find the same stores.
    """
    stores = prepare_each(data, vocab_size=vocab_size, progress=progress, workers=workers)
    names, rows = (name for name, _ in data.sources), dealt(BLOCK_ROWS, data.weights)
    return Mixture(tuple(map(Source, names, stores, rows)))


def mixed_batch(
    mixture: Mixture, *, seed: int, step: int, global_batch: int, seq_len: int, rank: int = 0, ranks: int = 1
) -> Tokens:
    """The batch of a step, or the rows of it that belong to one of ``ranks`` ranks: [B / ranks, T + 1] tokens.

    Raises InvalidInput where a token is outside the vocabulary.
    """
    if global_batch % ranks:
        raise ValueError(f"a global batch of {global_batch} does not split over {ranks} ranks")
    count = global_batch // ranks
    begin = step * global_batch + rank * count
    dtype = mixture.sources[0].store.train.dtype  # one tokenizer made the tokens of all
    batch: Tokens = np.empty((count, seq_len + 1), dtype=dtype)
    for source, rows, sequences in mixture.sequences(seed=seed, begin=begin, count=count, seq_len=seq_len):
        found = read_sequences(source.store.train, sequences, seq_len)
        if len(rows) == count:
            return found
        batch[rows] = found
    return batch


def held_out_batches(mixture: Mixture, name: str, *, count: int, at_once: int, seq_len: int) -> Iterator[Tokens]:
    """The first ``count`` held-out sequences of a source in their fixed order, some at once: [B, T + 1]."""
    (source,) = (each for each in mixture.sources if each.name == name)
    for first in range(0, count, at_once):
        yield validation_batch(source.store, first=first, count=min(at_once, count - first), seq_len=seq_len)
