"""Files that somebody made to break a reader end in a sentence: never a traceback, an endless read or a full memory."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")

from trainledger.engine.data import documents as documents_of
from trainledger.engine.data.documents import Segment, documents
from trainledger.engine.data.store import INDEX, open_store
from trainledger.engine.data.tokenizer import read_tokenizer
from trainledger.spec.problem import InvalidInput
from trainledger.spec.units import MIB

END = {"id": 0, "content": "</s>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
       "normalized": False}  # fmt: skip
WORDS = {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1}, "unk_token": "<unk>"}


def definition(**parts: Any) -> str:
    return json.dumps({"version": "1.0", "added_tokens": [END], "model": WORDS, **parts})


HOSTILE = {
    "nested deeply": "[" * 100_000 + "]" * 100_000,
    "nested deeply in an object": '{"model":' * 100_000 + "1" + "}" * 100_000,
    "a list": "[]",
    "a huge id": definition(model={**WORDS, "vocab": {"</s>": 0, "a": 2**32 - 1}}),
    "an id beyond 32 bits": definition(model={**WORDS, "vocab": {"</s>": 0, "a": 2**40}}),
    "no unknown token": definition(),
    "an empty unigram": definition(model={"type": "Unigram", "unk_id": None, "vocab": []}),
    "a unigram whose unknown token is not there": definition(
        model={"type": "Unigram", "unk_id": 7, "vocab": [["a", 0]]}
    ),
    "a charsmap that is none": definition(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "a charsmap of other bytes": definition(normalizer={"type": "Precompiled", "precompiled_charsmap": "//////8BAgME"}),
    "a regular expression that is none": definition(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}
    ),
    "a regular expression that backtracks": definition(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "(a|a)*\\1$"}, "behavior": "Isolated", "invert": False}
    ),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_tokenizer_is_refused_in_a_sentence(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InvalidInput) as found:
        read_tokenizer(str(path), None).encode(["a text with words and 12345 aaaaaaaaaaaaaaaaaaaaaaaab"])
    (problem,) = found.value.problems
    assert problem.field == "data.tokenizer"
    assert len(problem.rule) < 500


def test_a_nested_index_of_a_store_is_damage(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(InvalidInput, match="is nested too deeply"):
        open_store(tmp_path)


def segment_of(path: Path) -> Segment:
    return Segment(str(path), "jsonl", "gz", path.stat().st_size, 0, path.stat().st_size)


def test_a_gzip_bomb_is_left_off_early(tmp_path: Path) -> None:
    path = tmp_path / "bomb.jsonl.gz"
    line = json.dumps({"text": "a" * MIB}) + "\n"
    with gzip.open(path, "wb", compresslevel=9) as file:
        for _ in range(300):
            file.write(line.encode())
    found = documents(segment_of(path), "text")
    with pytest.raises(InvalidInput, match="expands more than 500 times"):
        list(found)


def test_a_line_without_an_end_is_not_read_on_and_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents_of, "LONGEST_LINE_NBYTES", MIB)
    path = tmp_path / "line.jsonl.gz"
    with gzip.open(path, "wb") as file:
        file.write(b'{"text": "' + b"a" * (3 * MIB))
    with pytest.raises(InvalidInput, match="has a line of more than 1048576 bytes"):
        list(documents(segment_of(path), "text"))


def test_lines_of_a_compressed_file_are_those_of_the_plain_one(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    plain.write_text("".join(json.dumps({"text": f"{n} " * 40_000}) + "\n" for n in range(20)), encoding="utf-8")
    with open(plain, "rb") as source, gzip.open(packed, "wb") as target:
        shutil.copyfileobj(source, target)
    whole = Segment(str(plain), "jsonl", "", plain.stat().st_size, 0, plain.stat().st_size)
    texts = [each.text for each in documents(whole, "text")]
    assert texts == [each.text for each in documents(segment_of(packed), "text")]
    assert len(texts) == 20
