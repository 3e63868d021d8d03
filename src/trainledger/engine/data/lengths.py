"""Lengths of documents, and what padding them in micro-batches costs where each document is a row of its own."""

from __future__ import annotations

from math import ceil

import numpy as np
import numpy.typing as npt

from trainledger.engine.data.store import Split
from trainledger.spec.frozen import frozen
from trainledger.spec.row_lengths import longest_of, usual_of

Lengths = npt.NDArray[np.int64]
_WITHIN = 0.05  # of a length, those of one bin


@frozen(kw_only=True)
class Padding:
    """Tokens of one pass over a split by how rows are made: the documents cut at ``seq_len``, their number ``rows``.

    ``tokens`` are those of the documents, which packed rows hold alone. ``shuffled`` is the expectation over
    micro-batches of ``micro_batch`` documents, each padded to its longest; ``sorted`` has documents of like lengths
    together; ``fixed`` pads all to ``seq_len``. ``usual`` and ``largest`` are the longest row of nine in ten
    micro-batches, and of any.
    """

    rows: int
    micro_batch: int
    tokens: int
    shuffled: float
    sorted: int
    fixed: int
    usual: int
    largest: int


def document_lengths(split: Split) -> Lengths:
    """Tokens of every document of a split with its end token, ascending."""
    ends = [split.document_ends(shard).astype(np.int64) for shard in range(split.shards)]
    return np.sort(np.concatenate([np.diff(of_shard, prepend=0) for of_shard in ends]))


def padding(lengths: Lengths, seq_len: int, micro_batch: int) -> Padding:
    """What padding costs, of ascending lengths.

    >>> some = padding(np.array([1, 2, 9]), 4, 2)
    >>> some.tokens, round(some.shuffled, 6), some.sorted, some.fixed, some.usual, some.largest
    (7, 10.0, 9, 12, 4, 4)
    """
    cut = np.minimum(lengths, seq_len)
    n, drawn = len(cut), min(micro_batch, len(cut))
    values, counts = np.unique(cut, return_counts=True)
    law = longest_of(list(zip(values.tolist(), counts.tolist(), strict=True)), drawn)
    groups = [cut[at : at + drawn] for at in range(n % drawn, n, drawn)]
    rest = cut[: n % drawn]
    return Padding(
        rows=n,
        micro_batch=drawn,
        tokens=int(cut.sum()),
        shuffled=n * sum(share * tokens for tokens, share in law),
        sorted=int(sum(len(group) * int(group[-1]) for group in [rest, *groups] if len(group))),
        fixed=n * seq_len,
        usual=usual_of(law),
        largest=int(cut[-1]),
    )


def binned(lengths: Lengths) -> list[list[int]]:
    """Pairs of tokens and rows, ascending, of at most about 150 lengths: the mean of those that lie within a
    twentieth of each other, and the longest by itself.

    >>> binned(np.array([1, 2, 2, 305, 309, 9000]))
    [[1, 1], [2, 2], [307, 2], [9000, 1]]
    """
    values, counts = np.unique(lengths, return_counts=True)
    bins = np.floor(np.log(values) / np.log1p(_WITHIN)).astype(np.int64)
    bins[-1] += 1
    _, starts = np.unique(bins, return_index=True)
    rows = np.add.reduceat(counts, starts)
    return [
        [round(mean), int(n)] for mean, n in zip(np.add.reduceat(values * counts, starts) / rows, rows, strict=True)
    ]


def quantile(lengths: Lengths, share: float) -> int:
    """The least length that so large a share of documents does not exceed."""
    return int(lengths[max(ceil(share * len(lengths)) - 1, 0)])
