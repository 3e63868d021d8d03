"""Counts among the options of all verbs: read in one way, refused in one way."""

import pytest

from trainledger.answers.question import Option
from trainledger.cli import main
from trainledger.cli.arguments import flag_of
from trainledger.cli.command_line import COMMANDS, question_named
from trainledger.spec.problem import Problem
from trainledger.spec.units import parse_count

COUNTS = [
    (verb, option)
    for verb in COMMANDS
    for option in question_named(verb).options.values()
    if option.parse is parse_count
]


def read(option: Option, text: str) -> tuple[object, list[str]]:
    problems: list[Problem] = []
    value = option.read(text, problems, flag_of(option))
    return value, [str(problem) for problem in problems]


def test_verbs_have_counts() -> None:
    assert {"sample", "trace", "annotate", "lock", "explain"} <= {verb for verb, _ in COUNTS}


@pytest.mark.parametrize(("verb", "option"), COUNTS, ids=[f"{verb} {option.name}" for verb, option in COUNTS])
def test_a_count_is_read_as_in_a_run_file(verb: str, option: Option) -> None:
    flag, whole, near = flag_of(option), int(min(100, option.most)), int(min(max(2, option.least), option.most))
    for text in (str(whole), f"{whole / 10:g}e1", f"{whole / 1000:g}k", f"{whole}.0"):
        value, problems = read(option, text)
        assert (value, type(value), problems) == (whole, int, [])
    for text, rule in (
        ("1.5", f"is not a whole number of things; nearest that works: {near}"),
        ("ten", "is not a count"),
    ):
        assert read(option, text)[1][0].startswith(f"{flag} = '{text}': {rule}")
    (problem,) = read(option, str(option.least - 1))[1]
    assert problem.endswith(f"; nearest that works: {option.least}")


@pytest.mark.parametrize("count", ["1e3", "1k", "1,000", "1000"])
def test_devices_are_counted_alike_by_all_verbs(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    on_all = ["plan", "gpt2", "--set", "layout.replicate=1000", "--set", "recipe.global_batch=1000"]
    for words in (on_all, ["napkin", "--params", "1B", "--tokens", "20x", "--mfu", "50%"]):
        assert main([*words, "--device", "h100-sxm", "--count", count]) == 0
        assert "1,000 " in capsys.readouterr().out
