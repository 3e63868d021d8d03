"""Documents out of files: nothing lost, nothing doubled, and a sentence for what cannot be read."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from trainledger.engine.data.corpus import find_corpus, plan_shards
from trainledger.engine.data.documents import Document, documents
from trainledger.engine.data.workers import sample_texts
from trainledger.spec.problem import InvalidInput

TEXTS = ["one\nline\n", "zwei — Wörter", "三つ\r\nの文書\n\n", "", "x" * 70_000, "last"]


def read(*paths: Path | str, field: str = "text") -> list[Document]:
    """Every document of a corpus, through the plan that preparing uses."""
    corpus = find_corpus(tuple(map(str, paths)), Path("nowhere"))
    return [each for shard in plan_shards(corpus) for segment in shard for each in documents(segment, field)]


def write_records(directory: Path, suffix: str, texts: list[str]) -> Path:
    path = directory / f"records{suffix}"
    lines = "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)).encode()
    if suffix == ".jsonl":
        path.write_bytes(lines)
    elif suffix == ".jsonl.gz":
        # Two members, as `cat a.gz b.gz` makes them.
        path.write_bytes(gzip.compress(lines[:1000]) + gzip.compress(lines[1000:]))
    elif suffix == ".jsonl.zst":
        frame = zstandard.ZstdCompressor().compress
        path.write_bytes(frame(lines[:1000]) + frame(lines[1000:]))
    else:
        pq.write_table(pa.table({"id": list(range(len(texts))), "text": texts}), path, row_group_size=2)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_records_are_the_texts_of_plain_files(tmp_path: Path, suffix: str) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    for number, text in enumerate(TEXTS):
        (plain / f"{number}.txt").write_bytes(text.encode())
    records = write_records(tmp_path, suffix, TEXTS)
    from_records = [each.text for each in read(records)]
    assert from_records == [each for each in TEXTS if each]
    # The long text is a large file here, so it is cut; joined, the texts are the same.
    assert "".join(each.text for each in read(plain)) == "".join(from_records)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["a", "ü", "三", "😀", " ", "\n", "\n\n", "\r\n\r\n", "word " * 50]), max_size=2000))
def test_a_cut_file_is_its_documents_joined(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    text = "".join(parts) + "end"
    path = tmp_path_factory.mktemp("cut") / "large.txt"
    path.write_bytes(text.encode())
    found = read(path)
    assert "".join(each.text for each in found) == text
    assert not any(each.repaired for each in found)
    for document in found:
        offset = int(document.place.rpartition(" ")[2])
        assert text.encode()[offset:].startswith(document.text.encode())


def test_a_large_file_is_cut_at_paragraph_ends(tmp_path: Path) -> None:
    generator = random.Random(0)
    path = tmp_path / "large.txt"
    paragraphs = ["word " * generator.randint(5, 60) + "\n\n" for _ in range(2000)]
    path.write_text("".join(paragraphs))
    found = read(path)
    assert len(found) > 100
    assert all(each.text.endswith("\n\n") for each in found)


def test_segments_of_jsonl_lose_no_line(tmp_path: Path) -> None:
    generator = random.Random(1)
    texts = [f"{n} " + "x" * generator.randint(0, 30_000) for n in range(400)]
    path = write_records(tmp_path, ".jsonl", texts)
    corpus = find_corpus((str(path),), tmp_path / "cache")
    assert len(plan_shards(corpus)) > 4
    assert [each.text for each in read(path)] == texts


def test_a_line_that_begins_where_a_segment_does_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "even.jsonl"
    lines = [json.dumps({"text": f"{n:06d}"}).ljust(1023) + "\n" for n in range(3000)]
    path.write_text("".join(lines))
    shards = plan_shards(find_corpus((str(path),), tmp_path / "cache"))
    assert {each.start % 1024 for shard in shards for each in shard} == {0}
    assert [int(each.text) for each in read(path)] == list(range(3000))


def test_bytes_that_are_not_utf8_are_replaced_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 au lait")
    (found,) = read(path)
    assert found.text == "caf\ufffd au lait"
    assert found.repaired == f"{path} byte 3"


def test_half_a_surrogate_pair_is_replaced_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "halves.jsonl"
    path.write_text('{"text": "whole \\ud83d\\ude00"}\n{"text": "half \\ud83d"}\n')
    whole, half = read(path)
    assert whole.text == "whole 😀"
    assert not whole.repaired
    assert half.text == "half \ufffd"
    assert half.repaired == f"{path}:2"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"text": "a"', "data.path: {path}:3 is not JSON: Expecting ',' delimiter at column 1"),
        ('["a"]', "data.path: {path}:3 is a JSON array, not an object with a field 'text'"),
        ('{"body": "a", "id": 1}', "data.text_field: {path}:3 has no field 'text'; its fields are 'body', 'id'"),
        ('{"text": 7}', "data.text_field: {path}:3 its field 'text' is a JSON number, not text"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_bad_line_is_named(tmp_path: Path, line: str, sentence: str, suffix: str) -> None:
    path = tmp_path / f"bad{suffix}"
    lines = f'{{"text": "fine"}}\n\n{line}\n'.encode()
    path.write_bytes(lines if suffix == ".jsonl" else gzip.compress(lines))
    with pytest.raises(InvalidInput) as caught:
        read(path)
    assert str(caught.value).startswith(sentence.format(path=path))
    assert "(the line begins at byte 18)" in str(caught.value)


def test_a_bad_line_far_into_a_file_has_its_number(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    good = json.dumps({"text": "x" * 1000}) + "\n"
    path.write_text(good * 3000 + "oops\n" + good)
    with pytest.raises(InvalidInput, match=re.escape(f"{path}:3001 is not JSON")):
        read(path)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
def test_a_truncated_compressed_file_is_named(tmp_path: Path, suffix: str) -> None:
    path = write_records(tmp_path, suffix, TEXTS)
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    with pytest.raises(InvalidInput) as caught:
        read(path)
    assert f"{path} is truncated: its compressed stream ends" in str(caught.value)
    assert f"of {len(whole) - 7}" in str(caught.value)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
def test_a_flipped_bit_in_a_compressed_file_is_named(tmp_path: Path, suffix: str) -> None:
    generator = random.Random(2)
    path = tmp_path / f"noise{suffix}"
    lines = "".join(json.dumps({"text": generator.randbytes(50).hex()}) + "\n" for _ in range(200)).encode()
    frame = zstandard.ZstdCompressor(write_checksum=True).compress
    data = bytearray(gzip.compress(lines) if suffix == ".jsonl.gz" else frame(lines))
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match=re.escape(str(path))):
        read(path)


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    path = write_records(tmp_path, ".parquet", TEXTS)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InvalidInput, match=re.escape(f"data.path: {path} is not a whole Parquet file: ")):
        read(path)


def test_a_parquet_field_is_named(tmp_path: Path) -> None:
    path = write_records(tmp_path, ".parquet", TEXTS)
    with pytest.raises(InvalidInput, match=re.escape(f"{path} has no field 'body'; its fields are 'id', 'text'")):
        read(path, field="body")
    with pytest.raises(InvalidInput, match=re.escape(f"{path} its column 'id' holds int64, not text")):
        read(path, field="id")


def test_a_binary_file_is_refused_by_name_and_left_out_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    binary = tmp_path / "image.bin"
    binary.write_bytes(b"ab\0cd")
    rule = f"data.path: {binary} has a NUL byte at byte 2, so it is binary or UTF-16, not UTF-8 text"
    with pytest.raises(InvalidInput, match=re.escape(rule)):
        read(binary)
    assert [each.text for each in read(tmp_path)] == ["text"]
    assert find_corpus((str(tmp_path),), tmp_path / "cache").skipped == (str(binary),)


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("some text")
    ((segment,),) = plan_shards(find_corpus((str(path),), tmp_path / "cache"))
    path.write_text("some text and more")
    with pytest.raises(InvalidInput, match=re.escape(f"{path} has 18 bytes and had 9 when preparing began")):
        list(documents(segment, "text"))


def test_a_sample_is_bounded_and_comes_from_all_over(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    path.write_text("".join(f"paragraph {n:06d}\n\n" for n in range(500_000)))
    segments = [each for shard in plan_shards(find_corpus((str(path),), tmp_path / "cache")) for each in shard]
    texts = list(sample_texts(segments, ["text"] * len(segments), 0.1, characters=400_000))
    assert 300_000 < sum(map(len, texts)) <= 400_000
    seen = [int(number) // 50_000 for text in texts for number in re.findall(r"(?m)^paragraph (\d{6})$", text)]
    assert len(set(seen)) >= 5
