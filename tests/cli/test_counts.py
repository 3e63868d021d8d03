"""Counts among the options of all verbs: read in one way, refused in one way."""

import argparse
from collections.abc import Iterator

import pytest

from trainledger.cli import main
from trainledger.cli.arguments import Parser, Quantity
from trainledger.cli.command_line import COMMANDS, verb_of
from trainledger.spec.problem import InvalidInput
from trainledger.spec.units import parse_count


def options() -> Iterator[tuple[str, argparse.Action]]:
    """Every option of every verb."""
    for verb in COMMANDS:
        yield from ((verb, action) for action in verb_of(verb).parser(verb)._actions)


COUNTS = [
    (verb, each) for verb, each in options() if isinstance(each, Quantity) and each.parse is parse_count
]  # fmt: skip


def read(action: argparse.Action, text: str) -> object:
    parser = Parser(prog="verb")
    parser._add_action(action)
    flag = action.option_strings[0]
    return getattr(parser.read([f"{flag}={text}"]), action.dest)


def test_no_option_reads_whole_numbers_by_itself() -> None:
    assert [(verb, each.dest) for verb, each in options() if each.type is int] == []
    verbs = {verb for verb, _ in COUNTS}
    assert {"sample", "trace", "annotate", "lock", "explain"} <= verbs


@pytest.mark.parametrize(("verb", "action"), COUNTS, ids=[f"{verb} {each.dest}" for verb, each in COUNTS])
def test_a_count_is_read_as_in_a_run_file(verb: str, action: Quantity) -> None:
    flag = action.option_strings[0]
    whole = 100 if action.most is None or action.most >= 100 else 10
    for text in (str(whole), f"{whole / 10:g}e1", f"{whole / 1000:g}k", f"{whole}.0"):
        value = read(action, text)
        assert value == whole
        assert type(value) is int
    for text, rule in (("1.5", "is not a whole number of things; nearest that works: 2"), ("ten", "is not a count")):
        with pytest.raises(InvalidInput) as caught:
            read(action, text)
        assert str(caught.value).startswith(f"{flag} = '{text}': {rule}")
    with pytest.raises(InvalidInput) as caught:
        read(action, str(action.least - 1))
    assert str(caught.value).endswith(f"; nearest that works: {action.least}")


@pytest.mark.parametrize("count", ["1e3", "1k", "1,000", "1000"])
def test_devices_are_counted_alike_by_all_verbs(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    on_all = ["plan", "gpt2", "--set", "layout.replicate=1000", "--set", "recipe.global_batch=1000"]
    for words in (on_all, ["napkin", "--params", "1B", "--tokens", "20x", "--mfu", "50%"]):
        assert main([*words, "--device", "h100-sxm", "--count", count]) == 0
        assert "1,000 " in capsys.readouterr().out
