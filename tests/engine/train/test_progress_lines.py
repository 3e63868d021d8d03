from __future__ import annotations

import io
from pathlib import Path

import pytest
from tiny_run import CountingFeed, tiny_run

from trainledger.engine.train import progress
from trainledger.engine.train.engine import train
from trainledger.engine.train.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_where_nobody_watches_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    stream = io.StringIO()
    train(tiny_run(), tmp_path, open_feed=CountingFeed, observers=[Progress(mfu=lambda seconds: 0.123, stream=stream)])
    lines = stream.getvalue().splitlines()
    assert lines[0] == "model on cpu: step 0 of 6"
    (third,) = [each for each in lines if each.startswith("step 3  loss")]
    for part in ("lr ", "tokens/s", "MFU 12.3 %", "left"):
        assert part in third
    assert "MB" in third or "GB" in third
    assert any("validation loss" in each and "unigram entropy 4.159" in each for each in lines)
    assert "\x1b" not in stream.getvalue()


def test_few_lines_on_a_short_run(tmp_path: Path) -> None:
    stream = io.StringIO()
    train(tiny_run(**{"evaluation.every": None}), tmp_path, open_feed=CountingFeed, observers=[Progress(stream=stream)])
    assert not [each for each in stream.getvalue().splitlines() if "MFU" in each]
    assert len([each for each in stream.getvalue().splitlines() if "tokens/s" in each]) <= 1


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    stream = Terminal()
    train(tiny_run(), tmp_path, open_feed=CountingFeed, observers=[Progress(stream=stream)])
    assert "6/6" in stream.getvalue()
    assert "tokens/s" in stream.getvalue()
