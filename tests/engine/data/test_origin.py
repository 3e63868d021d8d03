"""The documents of a batch: read again at the places that are named, they hold the tokens of the batch."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest

from trainledger.engine.data.loader import Loader
from trainledger.engine.data.mixture import alone, train_batch
from trainledger.engine.data.prepare import prepare
from trainledger.engine.data.store import TokenStore

NAMED = re.compile(r"(\d+) \((.*) (?:byte (\d+)(?: of its text)?|row group (\d+) row (\d+))\)")
TEXTS = [f"Document {number}: " + "abcdefgh "[: number % 9 + 1] * (number % 37 + 1) for number in range(300)]


@pytest.fixture
def store(tmp_path: Path, library: Path, spec_of) -> TokenStore:  # type: ignore[no-untyped-def]
    """Text files, one of them cut into pieces, JSONL plain and compressed, Parquet with several row groups."""
    lines = "".join(json.dumps({"text": each}) + "\n" for each in TEXTS[:100])
    (tmp_path / "plain.jsonl").write_text(lines)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(lines.replace("Document", "Packed").encode()))
    (tmp_path / "large.txt").write_text("\n\n".join(TEXTS * 40))
    paths = [library, tmp_path / "plain.jsonl", tmp_path / "packed.jsonl.gz", tmp_path / "large.txt"]
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        pass
    else:
        table = arrow.table({"text": [each.replace("Document", "Row") for each in TEXTS]})
        parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=64)
        paths.append(tmp_path / "rows.parquet")
    return prepare(spec_of(*paths), vocab_size=None, progress=False, workers=0)


def text_at(path: str, byte: str | None, group: str | None, row: str | None) -> bytes:
    """The text of a file from a place on, found by other code than that which prepares it."""
    if path.endswith(".parquet"):
        import pyarrow.parquet as parquet

        assert group is not None
        assert row is not None
        return str(parquet.ParquetFile(path).read_row_group(int(group))["text"][int(row)]).encode()
    data = Path(path).read_bytes()
    data = gzip.decompress(data) if path.endswith(".gz") else data
    assert byte is not None
    rest = data[int(byte) :]
    return json.loads(rest.splitlines()[0])["text"].encode() if ".jsonl" in path else rest


def test_the_documents_of_a_batch_hold_its_tokens(store: TokenStore) -> None:
    seq_len, files = 900, set()
    loader = Loader(alone(store), seed=3, seq_len=seq_len, global_batch=1, micro_batch=1)
    for step in range(store.train.sequences(seq_len)):
        row = train_batch(store, seed=3, step=step, global_batch=1, seq_len=seq_len)[0]
        ended = np.flatnonzero(row == store.end_id)
        parts = np.split(row, ended + 1)
        if not len(parts[-1]):  # the batch ends where a document ends
            parts.pop()
        documents = loader.documents(step)
        assert len(documents) == len(parts), (step, documents)
        for number, (each, part) in enumerate(zip(documents, parts, strict=True)):
            found = NAMED.fullmatch(each)
            assert found is not None
            path, *place = found.groups()[1:]
            files.add(Path(path).name)
            text, tokens = text_at(path, *place), bytes(part[part != store.end_id].tolist())
            assert tokens in text
            if number:  # it begins in the batch
                assert text.startswith(tokens)
    assert {"plain.jsonl", "packed.jsonl.gz", "large.txt", "abc.py"} <= files
    assert store.train.documents > 400


def test_each_document_is_named_once_by_its_number(store: TokenStore) -> None:
    one, many = (Loader(alone(store), seed=3, seq_len=64, global_batch=n, micro_batch=1) for n in (1, 8))
    together = [each for step in range(8) for each in one.documents(step)]
    assert many.documents(0) == list(dict.fromkeys(together))
    numbers = [int(each.split()[0]) for each in many.documents(0)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= each < store.train.documents for each in numbers)
