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


CHATS = {
    "text": lambda at: {"text": f"line {at} of a text"},
    "messages": lambda at: {
        "messages": [{"role": "user", "content": f"how is {at}"}, {"role": "assistant", "content": "so"}]
    },
    "conversations": lambda at: {"id": at, "conversations": [{"from": "human", "value": f"{at}?"}]},
    "content": lambda at: {"repo": "a/b", "content": f"x = {at}"},
}


@pytest.mark.parametrize("name", ["chat.jsonl", "chat.parquet", "folder", "*.jsonl"])
@pytest.mark.parametrize("field", CHATS)
def test_text_is_taken_in_place_of_a_run_file_and_what_is_assumed_is_said(
    field: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    records = [CHATS[field](at) for at in range(400)]
    if name == "chat.parquet":
        if field in ("messages", "conversations"):
            pytest.skip("of Parquet a list of turns is no text")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(records), name)
    else:
        (tmp_path / "folder").mkdir()
        file = tmp_path / "folder" / "chat.jsonl" if name == "folder" else tmp_path / "chat.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["data", name, "--json"]) == 0
    captured = capsys.readouterr()
    assert f"Assuming data.text_field={field}, recipe.seq_len=2048, data.tokenizer=bytes;" in " ".join(
        captured.err.split()
    )
    answer = json.loads(captured.out)
    assert sum(split["documents"] for split in answer["splits"].values()) == 400
    assert (answer["tokenizer"], answer["vocab_size"]) == ("bytes", 257)
    set_fields = ["--set", "data.tokenizer=bpe", "--set", "data.vocab_size=300", "--set", "recipe.seq_len=16"]
    assert main(["data", name, "--show", *set_fields]) == 0
    captured = capsys.readouterr()
    assert "tokenizer bpe, vocabulary 300" in captured.out
    assert "trains one" not in captured.err


@pytest.mark.parametrize("name", ["axolotl.yml", "mine.yaml", "mine.toml", "mine"])
def test_a_file_of_settings_is_no_text(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_text("base_model: a/b\n")
    assert main(["data", str(tmp_path / name)]) == 2
    assert "Assuming" not in capsys.readouterr().err


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
