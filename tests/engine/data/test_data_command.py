"""``trainledger data``: what it prints, and what it says of wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainledger.cli import main

pytestmark = pytest.mark.sweep

RUN = """
[model]
vocab_size = 512
d_model = 64
n_layers = 1
attention.n_heads = 4
feed_forward.d_ff = 128
max_seq_len = 64
[recipe]
seq_len = 64
global_batch = 4
steps = 10
[data]
path = "{path}"
tokenizer = "bpe"
cache = "{cache}"
validation_fraction = 0.1
"""


@pytest.fixture
def run(library: Path, tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(path=library, cache=tmp_path / "cache"))
    return str(path)


def test_it_tells_what_the_store_holds(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", run, "--verify", "--show"]) == 0
    printed = capsys.readouterr().out
    assert "tokenizer bpe, vocabulary 512" in printed
    assert "every file has its recorded SHA-256" in printed
    assert "--- step 0, sequence 1 ---" in printed
    assert max(map(len, printed.partition("\n---")[0].replace(str(tmp_path), "").splitlines())) <= 80


def test_json_holds_the_same(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", run, "--json", "--set", "data.tokenizer=bytes"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["vocab_size"] == 257
    assert answer["splits"]["train"]["tokens"] > 9 * answer["seq_len"] * 100
    assert answer["splits"]["validation"]["sequences"] == (answer["splits"]["validation"]["tokens"] - 1) // 64
    assert Path(answer["directory"]).is_dir()


def test_wrong_input_is_a_sentence_and_exit_code_2(
    run: str, library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", run, "--set", "data.tokenizer=bytes", "--set", "model.vocab_size=256"]) == 2
    assert "model.vocab_size = 256: is smaller than the 257 tokens" in capsys.readouterr().err
    assert main(["data", run, "--set", f"data.path={library}/*.rst"]) == 2
    assert "no file matches this pattern" in capsys.readouterr().err
    assert main(["data", run]) == 0
    for shard in (tmp_path / "cache").glob("tokens-*/00000.train.u16"):  # also of the bytes above
        data = bytearray(shard.read_bytes())
        data[1000] ^= 4
        shard.write_bytes(data)
    assert main(["data", run, "--verify"]) == 2
    assert "00000.train.u16 is corrupt" in capsys.readouterr().err
