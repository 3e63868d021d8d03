"""What long work shows meanwhile: a line in a terminal, nothing elsewhere."""

import io
import sys

import pytest

import trainledger as tl
from trainledger.cli.arguments import while_waiting

RUN = {
    "model": {"preset": "gpt2"},
    "recipe": {"seq_len": 256, "global_batch": 4, "tokens": "1B"},
    "cluster": {"device": "l4"},
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_line_that_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    say = while_waiting()
    say("x" * 200)
    say("")
    assert terminal.getvalue() == "\r\x1b[K" + "x" * 79 + "\r\x1b[K"


def test_elsewhere_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    while_waiting()("sequence")
    assert file.getvalue() == ""


def test_what_is_looked_at_is_heard() -> None:
    heard: list[str] = []
    run = tl.load(RUN)
    tl.breaks(run, along=["depth", "batch"], say=heard.append)
    assert heard == ["depth", "batch"]
    heard.clear()
    tl.advise(run, together=0, say=heard.append)
    assert "compile each block" in heard
