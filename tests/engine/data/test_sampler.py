"""Batches are a pure function of data, seed and step: every sequence once an epoch, however the batch is split."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainledger.engine.data.mixture import permute, sequences_of_step, train_batch, validation_batch
from trainledger.engine.data.prepare import prepare
from trainledger.engine.data.store import TokenStore
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import DataSpec


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    directory = tmp_path_factory.mktemp("sampler")
    (directory / "text.txt").write_text("".join(f"Paragraph number {n}.\n\n" for n in range(6000)))
    data = DataSpec(path=(str(directory / "text.txt"),), cache=str(directory / "cache"), validation_fraction=0.1)
    return prepare(data, vocab_size=None, progress=False)


@settings(max_examples=300, deadline=None)
@given(n=st.integers(1, 5000), key=st.binary(max_size=16))
@example(n=1, key=b"")
@example(n=2, key=b"")
@example(n=4096, key=b"a square")
@example(n=4097, key=b"one more than a square")
def test_permute_is_a_permutation(n: int, key: bytes) -> None:
    moved = permute(np.arange(n, dtype=np.uint64), n, key)
    assert np.array_equal(np.sort(moved), np.arange(n))


@given(n=st.integers(1, 2**62), places=st.lists(st.integers(0, 2**62), min_size=1, max_size=20, unique=True))
def test_permute_stays_within_any_size_and_parts_what_is_apart(n: int, places: list[int]) -> None:
    distinct = sorted({each % n for each in places})
    moved = permute(np.array(distinct, dtype=np.uint64), n, b"key")
    assert len(set(moved.tolist())) == len(distinct)
    assert max(moved.tolist()) < n


def test_permute_moves_places_independently_of_each_other() -> None:
    whole = permute(np.arange(1000, dtype=np.uint64), 1000, b"key")
    for place in (0, 1, 500, 999):
        assert permute(np.array([place], dtype=np.uint64), 1000, b"key")[0] == whole[place]


def test_permutations_look_shuffled() -> None:
    n = 10_000
    orders = [permute(np.arange(n, dtype=np.uint64), n, str(key).encode()).astype(float) for key in range(20)]
    # Standard error of a correlation of n independent pairs is 0.01.
    for order in orders:
        assert abs(np.corrcoef(order, np.arange(n))[0, 1]) < 0.06
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.06
    for one, other in itertools.pairwise(orders):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.06
    # A place goes anywhere: over many keys the places it goes to fill every tenth about equally.
    first = [int(permute(np.zeros(1, dtype=np.uint64), 10, str(key).encode())[0]) for key in range(2000)]
    assert np.bincount(first, minlength=10).min() > 140
    assert np.bincount(first, minlength=10).max() < 260


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 200), global_batch=st.integers(1, 64), seed=st.integers(0, 2**40), data=st.data())
def test_an_epoch_takes_every_sequence_once(n: int, global_batch: int, seed: int, data: st.DataObject) -> None:
    steps = -(-3 * n // global_batch)
    drawn = [
        sequences_of_step(n, seed=seed, step=step, global_batch=global_batch, first=0, count=global_batch)
        for step in range(steps)
    ]
    stream = np.concatenate(drawn)
    for epoch in range(3):
        assert np.array_equal(np.sort(stream[epoch * n : (epoch + 1) * n]), np.arange(n))
    # Any rows of any step are the same rows alone.
    step = data.draw(st.integers(0, steps - 1))
    first = data.draw(st.integers(0, global_batch - 1))
    count = data.draw(st.integers(0, global_batch - first))
    part = sequences_of_step(n, seed=seed, step=step, global_batch=global_batch, first=first, count=count)
    assert np.array_equal(part, drawn[step][first : first + count])


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {
        sequences_of_step(100, seed=seed, step=epoch, global_batch=100, first=0, count=100).tobytes()
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


def test_a_batch_is_windows_of_the_stream(store: TokenStore) -> None:
    stream = store.train.read(0, store.train.tokens)
    batch = train_batch(store, seed=1, step=0, global_batch=16, seq_len=32)
    assert batch.shape == (16, 33)
    assert batch.dtype == np.uint16 == np.dtype(store.index["dtype"])  # as stored: the loader widens them
    chosen = sequences_of_step(store.train.sequences(32), seed=1, step=0, global_batch=16, first=0, count=16)
    for row, sequence in zip(batch, chosen.tolist(), strict=True):
        assert np.array_equal(row, stream[sequence * 32 : sequence * 32 + 33])


def test_an_epoch_predicts_every_token_of_the_stream_once(store: TokenStore) -> None:
    seq_len = 100
    n = store.train.sequences(seq_len)
    assert (n + 1) * seq_len + 1 > store.train.tokens >= n * seq_len + 1
    batch = train_batch(store, seed=0, step=0, global_batch=n, seq_len=seq_len)
    stream = store.train.read(1, n * seq_len).reshape(n, seq_len)
    assert sorted(map(bytes, batch[:, 1:])) == sorted(map(bytes, stream))


def test_ranks_share_the_batch(store: TokenStore) -> None:
    sizes = {"seed": 3, "step": 7, "global_batch": 12, "seq_len": 16}
    whole = train_batch(store, **sizes)
    for ranks in (1, 2, 3, 4, 6, 12):
        parts = [train_batch(store, **sizes, rank=rank, ranks=ranks) for rank in range(ranks)]
        assert np.array_equal(np.concatenate(parts), whole)
    with pytest.raises(ValueError, match="does not split over 5 ranks"):
        train_batch(store, **sizes, rank=0, ranks=5)


def test_the_order_is_a_known_one() -> None:
    # A change of these numbers changes every run: it belongs in the changelog.
    chosen = sequences_of_step(1000, seed=0, step=3, global_batch=8, first=0, count=8)
    assert chosen.tolist() == [772, 624, 42, 122, 56, 386, 689, 170]


def test_validation_is_a_fixed_order_spread_over_the_split(store: TokenStore) -> None:
    n = store.validation.sequences(64)
    whole = validation_batch(store, first=0, count=n + 100, seq_len=64)
    assert whole.shape == (n, 65)
    assert len({row.tobytes() for row in whole}) == n
    assert np.array_equal(validation_batch(store, first=5, count=6, seq_len=64), whole[5:11])
    assert validation_batch(store, first=n, count=4, seq_len=64).shape == (0, 65)
    stream = store.validation.read(0, n * 64).reshape(n, 64)
    starts = [int(np.flatnonzero((stream == row[:-1]).all(axis=1))[0]) for row in whole[: n // 4]]
    assert min(starts) < n // 4
    assert max(starts) > 3 * n // 4


def test_a_split_shorter_than_a_sequence_is_reported(store: TokenStore) -> None:
    with pytest.raises(InvalidInput, match="the train split of the corpus in"):
        train_batch(store, seed=0, step=0, global_batch=1, seq_len=store.train.tokens)
    with pytest.raises(InvalidInput, match="the validation split of the corpus in"):
        validation_batch(store, first=0, count=1, seq_len=store.validation.tokens)


def test_batches_do_not_depend_on_where_the_corpus_lies(
    store: TokenStore, tmp_path: Path, library: Path, spec_of: Callable[..., DataSpec]
) -> None:
    one = prepare(spec_of(library), vocab_size=None, progress=False)
    moved = library.rename(tmp_path / "elsewhere")
    other = prepare(spec_of(moved, cache=str(tmp_path / "other")), vocab_size=None, progress=False)
    assert one.fingerprint == other.fingerprint
    sizes = {"seed": 3, "step": 7, "global_batch": 12, "seq_len": 16}
    assert np.array_equal(train_batch(one, **sizes), train_batch(other, **sizes))
