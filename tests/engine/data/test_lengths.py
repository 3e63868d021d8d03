"""Lengths of documents and the cost of padding, against every draw there is, and the texts themselves."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger.cli import main
from trainledger.engine.data.lengths import padding

pytestmark = pytest.mark.sweep


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(1, 30), st.integers(1, 10))
def test_padding_is_that_of_all_micro_batches_there_are(drawn: list[int], seq_len: int, micro_batch: int) -> None:
    cost = padding(np.sort(drawn), seq_len, micro_batch)
    cut = [min(length, seq_len) for length in drawn]
    longest = sorted(max(batch) for batch in combinations(cut, min(micro_batch, len(cut))))
    assert cost.shuffled == pytest.approx(len(cut) * mean(longest))
    assert cost.largest == longest[-1]
    assert sum(length <= cost.usual for length in longest) >= 0.9 * len(longest) - 1e-6
    assert sum(length < cost.usual for length in longest) <= 0.9 * len(longest) + 1e-6
    assert cost.tokens == sum(cut) <= cost.sorted <= cost.fixed == len(cut) * seq_len
    assert cost.tokens <= cost.shuffled + 1e-6


def test_data_says_how_long_conversations_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = ["a" * (7 * at % 50 + 1) for at in range(400)]
    turns = [[{"role": "user", "content": "b"}, {"from": "gpt", "value": text}] for text in said]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": of_one}) + "\n" for of_one in turns))
    assert main(["init", str(tmp_path / "run.toml")]) == 0
    sets = {
        "path": tmp_path / "chat.jsonl",
        "tokenizer": "bytes",
        "text_field": "messages",
        "cache": tmp_path / "cache",
    }
    capsys.readouterr()
    words = [word for name, value in sets.items() for word in ("--set", f"data.{name}={value}")]
    assert main(["data", str(tmp_path / "run.toml"), *words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    markers = len("<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n") + 1  # and the end token
    assert answer["lengths"]["shortest"] == markers + 1
    assert answer["lengths"]["longest"] == markers + 50
    assert answer["padding"]["rows"] == answer["splits"]["train"]["documents"]
    assert answer["padding"]["tokens"] == answer["splits"]["train"]["tokens"]
    assert main(["data", str(tmp_path / "run.toml"), *words]) == 0
    assert "packed, as train does" in capsys.readouterr().out


def test_a_list_that_is_no_conversation_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "odd.jsonl").write_text(json.dumps({"messages": [{"speaker": "x"}]}) + "\n")
    assert main(["init", str(tmp_path / "run.toml")]) == 0
    words = ["--set", f"data.path={tmp_path / 'odd.jsonl'}", "--set", "data.text_field=messages"]
    words += ["--set", f"data.cache={tmp_path / 'cache'}"]
    assert main(["data", str(tmp_path / "run.toml"), *words]) == 2
    assert "its field 'messages' is a JSON array, not text" in capsys.readouterr().err
