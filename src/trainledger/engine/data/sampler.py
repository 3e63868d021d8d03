"""Which sequences a step trains on: a pure function of data, seed and step, without a state.

The train split is cut into sequences of ``seq_len`` tokens that do not overlap, each read with the token after it.
An epoch visits every one once, in an order given by a keyed permutation that is computed for the places asked for,
not stored; the next epoch has another key and begins where the last one ended, in the middle of a batch if need be.

Shapes: B sequences, T = seq_len, so that a batch is [B, T + 1] tokens.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt

from trainledger.engine.data.store import Split, Tokens, TokenStore, check_lengths
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
