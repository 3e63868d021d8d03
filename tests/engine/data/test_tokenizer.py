"""Tokenizers: the round trip, the same definition every time, and agreement with GPT-2's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger.engine.data.tokenizer import (
    ENCODED_AT_ONCE,
    ByteTokenizer,
    JsonTokenizer,
    json_tokenizer,
    read_tokenizer,
    train_bpe,
)
from trainledger.spec.problem import InvalidInput

TEXT = Path(json.__file__).read_text() * 3


@pytest.fixture(scope="module")
def bpe() -> JsonTokenizer:
    return json_tokenizer("bpe", train_bpe([TEXT], 400))


@given(st.text(st.characters(codec="utf-8")))
def test_bytes_come_back(text: str) -> None:
    (ids,) = ByteTokenizer().encode([text])
    assert ids.tolist() == list(text.encode())
    assert ByteTokenizer().decode(ids.tolist()) == text


@given(text=st.text(st.characters(codec="utf-8")))
def test_bpe_comes_back(bpe: JsonTokenizer, text: str) -> None:
    (ids,) = bpe.encode([text])
    assert bpe.decode(ids.tolist()) == text


def test_bpe_has_the_size_asked_for_and_an_end(bpe: JsonTokenizer) -> None:
    assert bpe.vocab_size == 400
    assert bpe.end_id == 0
    assert bpe.decode([bpe.end_id]) == "<|endoftext|>"
    assert len(bpe.encode([TEXT])[0]) < 0.6 * len(TEXT)


def test_training_gives_the_same_definition_in_another_process(bpe: JsonTokenizer) -> None:
    program = "import json, pathlib; from trainledger.engine.data.tokenizer import train_bpe; "
    program += "print(train_bpe([pathlib.Path(json.__file__).read_text() * 3], 400), end='')"
    found = {subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout for _ in range(2)}
    assert found == {bpe.definition.encode()}


def test_a_document_that_spells_the_end_does_not_end(bpe: JsonTokenizer) -> None:
    (ids,) = bpe.encode(["a<|endoftext|>b"])
    assert bpe.end_id not in ids.tolist()
    assert bpe.decode(ids.tolist()) == "a<|endoftext|>b"


def test_a_long_text_is_encoded_in_parts(bpe: JsonTokenizer) -> None:
    long = "word, and another\n" * (2 * ENCODED_AT_ONCE // 18)
    unbroken = "x" * (2 * ENCODED_AT_ONCE + 5)
    for text in (long, unbroken):
        assert len(text) > ENCODED_AT_ONCE
        first, whole, last = bpe.encode(["a", text, "b"])
        assert bpe.decode(whole.tolist()) == text
        assert bpe.decode(first.tolist()) + bpe.decode(last.tolist()) == "ab"


def test_truncation_and_padding_are_no_part_of_a_tokenizer(bpe: JsonTokenizer, tmp_path: Path) -> None:
    answer = json.loads(bpe.definition)
    answer["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(answer, indent=2))
    read = read_tokenizer(str(tmp_path), None)
    assert read.fingerprint == bpe.fingerprint
    assert len(read.encode([TEXT])[0]) > 100


def test_another_merge_is_another_fingerprint(bpe: JsonTokenizer) -> None:
    assert json_tokenizer("bpe", train_bpe([TEXT], 399)).fingerprint != bpe.fingerprint


def test_errors_of_tokenizers(bpe: JsonTokenizer, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    rule = f'is neither "bytes" nor "bpe" nor a tokenizer.json that can be read: {file} (No such file or directory)'
    with pytest.raises(InvalidInput, match=re.escape(rule)):
        read_tokenizer(str(file), None)
    file.write_text("{")
    with pytest.raises(InvalidInput, match=re.escape(f"{file} is not JSON")):
        read_tokenizer(str(file), None)
    file.write_text('{"model": {}}')
    with pytest.raises(InvalidInput, match="is not a tokenizer: "):
        read_tokenizer(str(file), None)
    file.write_text(bpe.definition)
    with pytest.raises(InvalidInput) as caught:
        read_tokenizer(str(file), "<|stop|>")
    assert str(caught.value).startswith("data.end_token = '<|stop|>': is not a token of ")
    assert str(caught.value).endswith("whose added tokens are <|endoftext|>; nearest that works: <|endoftext|>")


def test_gpt2_gives_the_tokens_of_transformers(shared_data: Path, tmp_path: Path) -> None:
    from tokenizers.implementations import ByteLevelBPETokenizer
    from transformers import GPT2TokenizerFast

    vocabulary, merges = (str(shared_data / "gpt2_tokenizer" / each) for each in ("vocab.json", "merges.txt"))
    ByteLevelBPETokenizer(vocabulary, merges).save(str(tmp_path / "tokenizer.json"))
    ours = read_tokenizer(str(tmp_path), None)
    theirs = GPT2TokenizerFast.from_pretrained(str(shared_data / "gpt2_tokenizer"))
    text = (shared_data / "corpus.en").read_text()[:100_000]
    assert (ours.vocab_size, ours.end_id) == (50257, 50256)
    assert ours.encode([text])[0].tolist() == theirs(text)["input_ids"]
