"""The token store: what is damaged is named, with file and byte."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from resealed import reseal

from trainledger.engine.data.documents import held_out
from trainledger.engine.data.files import BLOCK_NBYTES, Verified
from trainledger.engine.data.prepare import prepare
from trainledger.engine.data.store import FORMAT, TokenStore, check_lengths, check_vocabulary, open_store
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import DataSpec
from trainledger.spec.units import MIB

SpecOf = Callable[..., DataSpec]


@pytest.fixture
def data(library: Path, spec_of: SpecOf) -> DataSpec:
    return spec_of(library)


@pytest.fixture
def store(data: DataSpec) -> TokenStore:
    return prepare(data, vocab_size=None, progress=False)


def test_reading_goes_across_shards(store: TokenStore) -> None:
    files = sorted(store.directory.glob("*.train.u16"))
    assert len(files) > 1
    whole = np.concatenate([np.fromfile(each, dtype="<u2") for each in files])
    assert store.train.tokens == len(whole)
    border = files[0].stat().st_size // 2
    assert store.train.read(border - 5, 10).tolist() == whole[border - 5 : border + 5].tolist()
    assert store.train.read(0, len(whole)).tolist() == whole.tolist()
    with pytest.raises(IndexError, match=r"of a train split of"):
        store.train.read(len(whole) - 1, 2)


def test_reading_goes_across_a_shard_that_has_nothing_of_a_split(tmp_path: Path) -> None:
    texts = [f"{number:03} " * (MIB // 4) for number in range(20)]  # each fills a shard
    held = [each for each in texts if held_out(each.encode(), 0.5)]
    kept = next(each for each in texts if each not in held)
    for number, text in enumerate([held[0], kept, held[1]]):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    spec = DataSpec(path=(str(tmp_path / "*.jsonl"),), cache=str(tmp_path / "cache"), validation_fraction=0.5)
    store = prepare(spec, vocab_size=None, progress=False)
    sizes = [each.stat().st_size for each in sorted(store.directory.glob("*.validation.u16"))]
    assert 0 in sizes[1:-1], sizes
    whole = store.validation.read(0, store.validation.tokens)
    border = sizes[0] // 2
    assert store.validation.read(border - 3, 6).tolist() == whole[border - 3 : border + 3].tolist()


def test_a_truncated_shard_is_reported_and_made_anew(data: DataSpec, store: TokenStore) -> None:
    path = store.directory / "00001.train.u16"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    rule = f"data.cache: {path} is truncated: it ends at byte {len(whole) - 3}, not {len(whole)}; remove this file"
    for again in (lambda: open_store(store.directory), lambda: prepare(data, vocab_size=None, progress=False)):
        with pytest.raises(InvalidInput, match=re.escape(rule)):
            again()
    path.unlink()
    prepare(data, vocab_size=None, progress=False).verify()
    assert path.read_bytes() == whole


def test_a_shard_truncated_under_an_open_store_is_reported(store: TokenStore) -> None:
    path = store.directory / "00000.train.u16"
    with path.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(InvalidInput, match=re.escape(f"{path} is truncated: it ends at byte 100")):
        store.train.read(0, 10)


def test_a_flipped_bit_is_found_and_located(store: TokenStore) -> None:
    path = store.directory / "00000.train.u16"
    nbytes = path.stat().st_size
    assert nbytes > BLOCK_NBYTES
    for offset, block in ((100, 0), (nbytes - 1, BLOCK_NBYTES)):
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)
        with pytest.raises(InvalidInput) as caught:
            open_store(store.directory).verify()
        until = min(block + BLOCK_NBYTES, nbytes)
        rule = f"{path} is corrupt: its SHA-256 is not the recorded one, and it differs between byte {block} and byte "
        assert rule + str(until) in str(caught.value)
        data[offset] ^= 1
        path.write_bytes(data)
    open_store(store.directory).verify()


@pytest.mark.parametrize("name", ["00000.train.ends.u64", "00000.train.places.u64"])
def test_where_documents_come_from_is_compared_when_it_is_read(name: str, store: TokenStore) -> None:
    assert list(store.train.documents_in(0, 10))
    data = bytearray((store.directory / name).read_bytes())
    data[8] ^= 1
    (store.directory / name).write_bytes(data)
    with pytest.raises(InvalidInput, match=f"{name} is corrupt: its CRC-32"):
        list(open_store(store.directory).train.documents_in(0, 10))


def test_every_damaged_file_is_reported(store: TokenStore) -> None:
    paths = [store.directory / each for each in ("00000.train.ends.u64", "00001.validation.u16", "00001.counts.u64")]
    for path in paths:
        data = bytearray(path.read_bytes())
        data[-1] ^= 128
        path.write_bytes(data)
    with pytest.raises(InvalidInput) as caught:
        open_store(store.directory).verify()
    assert [str(each).split()[1] for each in caught.value.problems] == [str(each) for each in paths]


def test_a_token_outside_the_vocabulary_is_reported_with_its_byte(store: TokenStore) -> None:
    path = store.directory / "00001.train.u16"
    first = (store.directory / "00000.train.u16").stat().st_size // 2
    tokens = np.fromfile(path, dtype="<u2")
    tokens[40] = 257
    tokens.tofile(path)
    reseal(path)
    reopened = open_store(store.directory)
    reopened.train.read(first, 40)
    rule = f"data.cache: {path} the token at byte 80 is 257, outside the vocabulary of 257; remove this file"
    with pytest.raises(InvalidInput, match=re.escape(rule)):
        reopened.train.read(first - 7, 60)


def test_a_block_that_was_changed_is_refused_when_it_is_read(store: TokenStore) -> None:
    """Its size is kept, and every token is in the vocabulary."""
    path = store.directory / "00000.train.u16"
    nbytes = path.stat().st_size
    data = bytearray(path.read_bytes())
    data[nbytes - 2] ^= 1
    path.write_bytes(data)
    reopened = open_store(store.directory)
    first = BLOCK_NBYTES // 2
    reopened.train.read(0, first)
    rule = (
        f"data.cache: {path} is corrupt: its CRC-32 is not the recorded one between byte {BLOCK_NBYTES} and {nbytes};"
    )
    with pytest.raises(InvalidInput, match=re.escape(rule)):
        reopened.train.read(first - 5, 10)


def test_a_file_that_was_found_whole_is_compared_again_only_when_it_changes(store: TokenStore) -> None:
    path = store.directory / "00000.train.u16"
    memory = Verified(store.directory).path
    os.utime(path, (1, 1))
    store.train.read(0, 100)
    assert not memory.exists(), "one block of two is read"
    store.train.read(0, path.stat().st_size // 2)
    assert list(json.loads(memory.read_text())) == [path.name]
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, (1, 1))  # inode, size and time are those of before: what is remembered is believed
    open_store(store.directory).train.read(0, 10)
    for when in ((2, 2), (2**32, 2**32)):
        os.utime(path, when)
        with pytest.raises(InvalidInput, match="is corrupt"):
            open_store(store.directory).train.read(0, 10)


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000, '{"00000.train.u16": 3}', '{"00000.train.u16": [1, 2]}'])
def test_a_damaged_memory_vouches_for_nothing(store: TokenStore, content: str) -> None:
    path = store.directory / "00000.train.u16"
    path.write_bytes(bytes(path.stat().st_size))
    os.utime(path, (1, 1))
    Verified(store.directory).path.write_text(content)
    with pytest.raises(InvalidInput, match="is corrupt"):
        open_store(store.directory).train.read(0, 10)


def test_what_verify_has_read_is_remembered(store: TokenStore) -> None:
    for each in store.directory.iterdir():
        os.utime(each, (1, 1))
    store.verify()
    known = json.loads(Verified(store.directory).path.read_text())
    assert sorted(known) == sorted(each.name for each in store.directory.glob("0*.u*"))


def test_where_documents_end_is_compared_too(store: TokenStore) -> None:
    path = store.directory / "00000.train.ends.u64"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match=re.escape(f"{path} is corrupt")):
        open_store(store.directory).train.document_ends(0)


@pytest.mark.parametrize("file", ["index.json", "tokenizer.json"])
@pytest.mark.parametrize(
    "content", [None, b"", b"{half", b"[]", b"[" * 100_000, b"\xff\x00", b'{"format": %d}' % FORMAT, "flip"]
)
def test_a_damaged_index_is_made_anew_from_the_shards(
    data: DataSpec, store: TokenStore, file: str, content: bytes | str | None
) -> None:
    path = store.directory / file
    whole = path.read_bytes()
    shards = {each: each.stat().st_mtime_ns for each in store.directory.glob("0*")}
    path.unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        at = whole.index(b"vocab" if file == "index.json" else b"256") + 15 * (file == "index.json")
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    prepare(data, vocab_size=None, progress=False).verify()
    assert path.read_bytes() == whole
    assert {each: each.stat().st_mtime_ns for each in store.directory.glob("0*")} == shards


def test_a_shard_that_was_damaged_before_the_index_is_made_anew(data: DataSpec, store: TokenStore) -> None:
    (store.directory / "index.json").unlink()
    path = store.directory / "00000.counts.u64"
    whole = path.read_bytes()
    path.write_bytes(bytes(len(whole)))
    again = prepare(data, vocab_size=None, progress=False)
    assert path.read_bytes() == whole
    assert again.unigram_entropy_nats == store.unigram_entropy_nats


def test_a_damaged_index_is_reported(store: TokenStore) -> None:
    path = store.directory / "index.json"
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(InvalidInput, match=re.escape(f"{path} is damaged and does not say what the store holds")):
        open_store(store.directory)
    path.write_text(whole.replace('"vocab_size": 257', '"vocab_size": 256'))
    with pytest.raises(InvalidInput, match="its SHA-256 does not match its content"):
        open_store(store.directory)
    path.write_text(json.dumps(json.loads(whole) | {"format": 99}))
    with pytest.raises(InvalidInput, match=re.escape(f"{path} is of format 99, and this version reads format 2")):
        open_store(store.directory)
    path.unlink()
    with pytest.raises(InvalidInput, match=re.escape(f"{path} cannot be read: No such file")):
        open_store(store.directory)


def test_another_tokenizer_is_not_taken_for_the_stores(library: Path, spec_of: SpecOf) -> None:
    store = prepare(spec_of(library, tokenizer="bpe"), vocab_size=300, progress=False)
    other = prepare(spec_of(library, tokenizer="bpe"), vocab_size=301, progress=False)
    (store.directory / "tokenizer.json").write_bytes((other.directory / "tokenizer.json").read_bytes())
    with pytest.raises(InvalidInput, match="is not the tokenizer that these tokens were made with"):
        store.tokenizer()


def test_a_model_with_too_few_tokens_is_reported(store: TokenStore) -> None:
    check_vocabulary(store, 257)
    check_vocabulary(store, 300)
    with pytest.raises(InvalidInput) as caught:
        check_vocabulary(store, 256)
    assert str(caught.value) == (
        "model.vocab_size = 256: is smaller than the 257 tokens of the tokenizer bytes, end of document included; "
        "nearest that works: 257"
    )


def test_a_corpus_shorter_than_a_sequence_is_reported_for_both_splits(store: TokenStore) -> None:
    check_lengths(store, store.validation.tokens - 1)
    with pytest.raises(InvalidInput) as caught:
        check_lengths(store, store.train.tokens)
    train, validation = map(str, caught.value.problems)
    assert train.startswith(f"recipe.seq_len = {store.train.tokens}: needs {store.train.tokens + 1} consecutive tokens")
    assert f"the train split of the corpus in {store.directory} has {store.train.tokens}" in train
    assert validation.endswith(f"has {store.validation.tokens}; nearest that works: {store.validation.tokens - 1}")
