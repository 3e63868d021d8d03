"""What long work shows meanwhile: a line in a terminal, nothing elsewhere."""

import io
import sys

import pytest

import trainledger as tl
from trainledger.cli import main
from trainledger.cli.asking import while_searching, while_waiting
from trainledger.spec.units import format_count

pytestmark = pytest.mark.sweep

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


def test_a_search_of_one_thing_shows_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    printed = while_searching()
    printed("groups of layouts estimated", 0, 1)
    printed("groups of layouts estimated", 1, 2)
    said = "[##########..........] groups of layouts estimated: 1 of 2"
    assert terminal.getvalue() == f"\r\x1b[K\r\x1b[K{said}"


def test_what_is_looked_at_is_heard() -> None:
    heard: list[str] = []
    run = tl.load(RUN)
    tl.breaks(run, along=["depth", "batch"], progress=lambda what, *_: heard.append(what))
    assert heard == ["depth", "batch"]
    heard.clear()
    tl.advise(run, together=0, progress=lambda what, *_: heard.append(what))
    assert heard[1].startswith("2 changes tried in ")
    assert any(what.endswith(": compile each block") for what in heard)


def test_the_budget_of_many_devices_says_how_far_it_is() -> None:
    heard: list[str] = []
    budget = {"device": "h100-sxm", "count": 128, "days": 1, "family": "gpt2"}
    paid = tl.optimal(**budget, progress=lambda what, *_: heard.append(what)).affordable
    assert [each for each in heard if ":" not in each] == [
        *(f"iteration {at}, {format_count(one.wanted)} parameters" for at, one in enumerate(paid.iterations, 1)),
        "the run with evaluation, checkpoints and failures",
    ]
    assert any(": groups of layouts estimated: 0 of " in each for each in heard)


def test_ctrl_c_ends_the_whole_question_of_a_budget() -> None:
    def stop(what: str, done: int, of: int) -> None:
        if "accounts" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tl.optimal(device="h100-sxm", count=128, days=1, family="gpt2", progress=stop)


def test_what_is_wrong_takes_the_place_of_the_waiting_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["layouts", "gpt2", "--device", "h100-sxm", "--count", "4", "--fix", "tensor=2"]) == 2
    after = terminal.getvalue().rpartition("\r\x1b[K")[2]
    assert after.startswith("Assuming ")
    assert "\nlayout: found no layout that fits 4 x h100-sxm: layout.tensor" in after
