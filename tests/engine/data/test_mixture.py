"""Several sources as one: exact proportions, batches that depend on nothing but data, seed and step, epochs of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainledger.engine.data.loader import Loader
from trainledger.engine.data.mixture import (
    Mixture,
    Source,
    alone,
    held_out_batches,
    mixed_batch,
    open_mixture,
    sequences_of_step,
    train_batch,
    validation_batch,
)
from trainledger.engine.data.prepare import prepare
from trainledger.engine.data.store import TokenStore
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import BLOCK_ROWS, DataSpec, MixtureSource, dealt

LETTERS = {"a": "alpha", "b": "beta beta", "c": "gamma"}
PARAGRAPHS = {"a": 3000, "b": 900, "c": 300}


def source(directory: Path, name: str, weight: float, **more: object) -> tuple[str, MixtureSource]:
    path = directory / f"{name}.txt"
    if not path.exists():
        path.write_text("".join(f"{name} {LETTERS[name]} number {n}.\n\n" for n in range(PARAGRAPHS[name])))
    return name, MixtureSource(path=(str(path),), weight=weight, **more)  # type: ignore[arg-type]


def mixed(directory: Path, *sources: tuple[str, MixtureSource], **more: object) -> DataSpec:
    fields = {"validation_fraction": 0.1, "cache": str(directory / "cache"), "mixture": sources} | more
    return DataSpec(**fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixture")


@pytest.fixture(scope="module")
def mixture(directory: Path) -> Mixture:
    data = mixed(directory, source(directory, "a", 0.6), source(directory, "b", 0.37), source(directory, "c", 0.03))
    return open_mixture(data, vocab_size=None, progress=False)


@pytest.fixture(scope="module")
def stores(mixture: Mixture) -> tuple[TokenStore, ...]:
    return tuple(each.store for each in mixture.sources)


def of_weights(stores: tuple[TokenStore, ...], weights: list[float]) -> Mixture:
    rows = dealt(BLOCK_ROWS, weights)
    return Mixture(tuple(map(Source, "abc", stores, rows)))


def letters(batch: np.ndarray) -> list[str]:
    """The source of each row: no other letter of the sources' names stands before a number sign's word."""
    texts = [bytes(row[row < 256].astype(np.uint8)).decode() for row in batch]
    return [next(name for name, word in LETTERS.items() if word in text) for text in texts]


WEIGHTS = st.lists(st.floats(0.02, 50), min_size=3, max_size=3)


@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9), places=st.integers(1, 2000))
def test_places_are_dealt_out_whole_and_within_one_of_the_exact_share(weights: list[float], places: int) -> None:
    found = dealt(places, weights)
    assert sum(found) == places
    for each, weight in zip(found, weights, strict=True):
        assert abs(each - places * weight / sum(weights)) < 1 + 1e-6


def test_each_block_has_its_rows_of_each_source_in_an_order_of_its_own(mixture: Mixture) -> None:
    assert [each.rows for each in mixture.sources] == [600, 370, 30]
    # 200 rows of 5 steps are a block: what is read says itself which source it is of.
    read = [letters(mixed_batch(mixture, seed=7, step=step, global_batch=200, seq_len=40)) for step in range(10)]
    blocks = [[each for step in read[:5] for each in step], [each for step in read[5:] for each in step]]
    for block in blocks:
        assert [block.count(name) for name in "abc"] == [600, 370, 30]
    assert blocks[0] != blocks[1]
    other = letters(mixed_batch(mixture, seed=8, step=0, global_batch=BLOCK_ROWS, seq_len=40))
    assert other != blocks[0]
    assert [other.count(name) for name in "abc"] == [600, 370, 30]
    # Spread over the block: of each tenth about a tenth (hypergeometric; 8 standard deviations).
    tenths = [blocks[0][at : at + 100].count("a") for at in range(0, BLOCK_ROWS, 100)]
    assert all(abs(each - 60) < 38 for each in tenths)


@settings(max_examples=40, deadline=None)
@given(weights=WEIGHTS, seed=st.integers(0, 2**40), step=st.integers(0, 10**7), quarter=st.integers(1, 8))
def test_batches_are_equal_on_any_ranks_and_from_any_step(
    stores: tuple[TokenStore, ...], weights: list[float], seed: int, step: int, quarter: int
) -> None:
    found = of_weights(stores, weights)
    sizes = {"seed": seed, "seq_len": 24, "global_batch": 4 * quarter}
    whole = mixed_batch(found, step=step, **sizes)
    for ranks in (1, 2, 4):
        parts = [mixed_batch(found, step=step, rank=rank, ranks=ranks, **sizes) for rank in range(ranks)]
        assert np.array_equal(np.concatenate(parts), whole)
    # The same rows as rows of larger steps, as a run with another batch has them: rows are counted over the run.
    larger = mixed_batch(found, seed=seed, seq_len=24, global_batch=20 * quarter, step=step // 5)
    at = step % 5 * 4 * quarter
    assert np.array_equal(larger[at : at + 4 * quarter], whole)


@settings(max_examples=25, deadline=None)
@given(weights=WEIGHTS, seed=st.integers(0, 2**40), seq_len=st.integers(100, 300))
def test_an_epoch_of_a_source_visits_each_of_its_sequences_once(
    stores: tuple[TokenStore, ...], weights: list[float], seed: int, seq_len: int
) -> None:
    found = of_weights(stores, weights)
    rows = 3 * BLOCK_ROWS + 77
    visited: dict[str, list[int]] = {each.name: [] for each in found.sources}
    for begin in range(0, rows, 100):  # batches as a run takes them, across the edges of blocks
        count = min(100, rows - begin)
        for each, at, sequences in found.sequences(seed=seed, begin=begin, count=count, seq_len=seq_len):
            assert (np.diff(at) > 0).all()
            visited[each.name] += sequences.tolist()
    assert sum(map(len, visited.values())) == rows
    epochs = found.epochs(rows, seed=seed, seq_len=seq_len)
    for each in found.sources:
        n, order = each.store.train.sequences(seq_len), visited[each.name]
        assert epochs[each.name] == len(order) / n
        for epoch in range(len(order) // n):
            assert sorted(order[epoch * n : (epoch + 1) * n]) == list(range(n))
        rest = order[len(order) // n * n :]
        assert len(set(rest)) == len(rest)


def test_a_source_goes_through_its_epochs_in_orders_of_their_own(mixture: Mixture) -> None:
    small = mixture.sources[2]
    n = small.store.train.sequences(200)
    order: list[int] = []
    for block in range(3):
        for each, _, sequences in mixture.sequences(seed=1, begin=block * BLOCK_ROWS, count=BLOCK_ROWS, seq_len=200):
            order += sequences.tolist() if each is small else []
    assert len(order) > 2 * n
    assert order[:n] != order[n : 2 * n]
    assert order[:n] != sequences_of_step(n, seed=1, step=0, global_batch=n, first=0, count=n).tolist()


def test_one_source_gives_what_a_corpus_alone_gives(directory: Path, stores: tuple[TokenStore, ...]) -> None:
    store = stores[0]
    data = DataSpec(path=(str(directory / "a.txt"),), validation_fraction=0.1, cache=str(directory / "cache"))
    found = open_mixture(data, vocab_size=None, progress=False)
    assert found.fingerprint == prepare(data, vocab_size=None, progress=False).fingerprint == store.fingerprint
    for step in (0, 3, 77):
        sizes = {"seed": 5, "step": step, "global_batch": 12, "seq_len": 64}
        assert np.array_equal(mixed_batch(found, **sizes), train_batch(store, **sizes))
    loader = Loader(alone(store), seed=5, seq_len=64, global_batch=4, micro_batch=4, eval_sequences=8)
    held_out = torch.cat([inputs for inputs, _ in loader.validation()]).numpy()
    assert np.array_equal(held_out, validation_batch(store, first=0, count=8, seq_len=64)[:, :-1])


def test_the_fingerprint_says_sources_names_and_proportions(stores: tuple[TokenStore, ...]) -> None:
    usual = of_weights(stores, [5, 3, 2])
    assert of_weights(stores, [50, 30, 20]).fingerprint == usual.fingerprint
    others = [
        of_weights(stores, [5, 2, 3]),
        of_weights((stores[1], stores[0], stores[2]), [5, 3, 2]),
        Mixture(tuple(replace(each, name=f"{each.name}2") for each in usual.sources)),
        Mixture(usual.sources[:2]),
    ]
    assert len({usual.fingerprint, *(each.fingerprint for each in others)}) == 5


def test_other_weights_tokenize_nothing_again(directory: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    def stored(first: float) -> dict[Path, int]:
        data = mixed(
            directory, source(directory, "a", first), source(directory, "b", 1), tokenizer="bpe", cache=str(cache)
        )
        open_mixture(data, vocab_size=300, progress=False)
        return {
            path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.is_file() and "verified" not in path.name
        }

    before = stored(0.5)
    assert len(list(cache.glob("tokens-*"))) == 2
    assert len(list((cache / "tokenizers").glob("*.json"))) == 1
    after = stored(7)
    assert {name: each for name, each in after.items() if name.name != "corpus-hashes.json"} == {
        name: each for name, each in before.items() if name.name != "corpus-hashes.json"
    }


def test_bpe_learns_from_every_source(directory: Path, tmp_path: Path) -> None:
    data = mixed(
        directory, source(directory, "a", 1), source(directory, "c", 1), tokenizer="bpe", cache=str(tmp_path / "cache")
    )
    found = open_mixture(data, vocab_size=330, progress=False)
    tokenizer = found.tokenizer()
    for word in (" alpha", " gamma"):
        assert len(tokenizer.encode([word])[0]) == 1
    assert len({each.store.index["tokenizer"]["fingerprint"] for each in found.sources}) == 1


def test_each_source_may_have_a_field_of_its_own(tmp_path: Path) -> None:
    for name, field in (("one", "text"), ("two", "content")):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(f'{{"{field}": "{name} number {n} of many"}}\n' for n in range(400))
        )
    sources = [
        ("one", MixtureSource(path=(str(tmp_path / "one.jsonl"),), weight=1)),
        ("two", MixtureSource(path=(str(tmp_path / "two.jsonl"),), weight=1, text_field="content")),
    ]
    found = open_mixture(mixed(tmp_path, *sources, tokenizer="bpe"), vocab_size=300, progress=False)
    texts = [found.tokenizer().decode(each.store.train.read(0, 30).tolist()) for each in found.sources]
    assert texts[0].startswith("one number")
    assert texts[1].startswith("two number")
    wrong = mixed(tmp_path, sources[0], ("two", replace(sources[1][1], text_field=None)))
    with pytest.raises(InvalidInput, match=r"data\.mixture\.two\.text_field: .*two\.jsonl:1 has no field 'text'"):
        open_mixture(wrong, vocab_size=None, progress=False)


def test_held_out_sequences_are_of_each_source(mixture: Mixture) -> None:
    assert mixture.evaluated(20, 40) == {"a": 12, "b": 7, "c": 1}
    few = mixture.evaluated(10**6, 40)
    assert few == {each.name: each.store.validation.sequences(40) for each in mixture.sources}
    for name, count in mixture.evaluated(20, 40).items():
        rows = np.concatenate(list(held_out_batches(mixture, name, count=count, at_once=5, seq_len=40)))
        assert letters(rows) == [name] * count


def test_the_loader_gives_the_batches_and_what_is_said_of_them(directory: Path, mixture: Mixture) -> None:
    with Loader(mixture, seed=2, seq_len=40, global_batch=8, micro_batch=4, eval_sequences=20) as loader:
        assert loader.shares == {"a": 0.6, "b": 0.37, "c": 0.03}
        assert sum(loader.validation_sequences.values()) == 20
        assert loader.fingerprint == mixture.fingerprint
        batches = loader.batches(11)
        for step in (11, 12):
            inputs = torch.cat([each for each, _ in next(batches)]).numpy()
            assert np.array_equal(inputs, mixed_batch(mixture, seed=2, step=step, global_batch=8, seq_len=40)[:, :-1])
        found = loader.documents(11)
    assert {each.split()[0] for each in found} == set(
        letters(mixed_batch(mixture, seed=2, step=11, global_batch=8, seq_len=40))
    )
    name, number, place = found[0].split(maxsplit=2)
    assert number.isdigit()
    assert place.startswith(f"({directory / name}.txt byte ")


def test_documents_of_a_batch_stand_in_the_order_of_its_rows(mixture: Mixture) -> None:
    with Loader(mixture, seed=2, seq_len=40, global_batch=30, micro_batch=1) as loader:
        found = [each.split()[0] for each in loader.documents(0)]
    rows = letters(mixed_batch(mixture, seed=2, step=0, global_batch=30, seq_len=40))
    seen = iter(found)
    assert all(any(each == row for each in seen) for row in dict.fromkeys(rows))
    assert found[0] == rows[0]


def test_a_source_too_short_for_a_sequence_is_named(directory: Path, mixture: Mixture) -> None:
    length = mixture.sources[2].store.validation.tokens
    with pytest.raises(InvalidInput) as caught:
        Loader(mixture, seed=0, seq_len=length, global_batch=4, micro_batch=4)
    (problem,) = caught.value.problems
    assert problem.field == "recipe.seq_len"
    assert "the validation split of the source c of data.mixture in" in problem.rule


def test_a_source_that_is_not_there_is_named(directory: Path) -> None:
    data = mixed(directory, source(directory, "a", 1), ("x", MixtureSource(path=(str(directory / "x.txt"),), weight=1)))
    with pytest.raises(InvalidInput, match=r"data\.mixture\.x\.path = .*: no such file"):
        open_mixture(data, vocab_size=None, progress=False)
