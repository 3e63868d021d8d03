"""The index of the lecture and the page on fine-tuning run: every line that they show of a command is printed by it."""

import re
import shlex
from pathlib import Path

import pytest

from trainledger.cli import main

pytestmark = pytest.mark.sweep

DOCS = Path(__file__).parent.parent / "docs"
INDEX = (DOCS / "learn.md").read_text(encoding="utf-8")
TUNING = (DOCS / "fine-tuning.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"    \$ trainledger (.*)\n((?:    .*\n)+)", INDEX.replace("\\\n", " "))


@pytest.mark.parametrize(("command", "said"), SHOWN, ids=[" ".join(command.split()[:2]) for command, _ in SHOWN])
def test_every_line_of_the_index_is_printed(command: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)) == 0
    printed = iter(capsys.readouterr().out.splitlines())
    lines = [line.removeprefix("    ") for line in said.splitlines() if line.strip() != "..."]
    assert lines
    for line in lines:  # in their order
        assert line in printed, line


def test_the_index_has_a_command_for_each_chapter() -> None:
    assert len(SHOWN) == INDEX.count("    $ ") == 18


@pytest.mark.parametrize(("command", "said"), re.findall(r"^\| \[.*\| `(.*?)` \| `(.*?)` \|", TUNING, re.MULTILINE))
def test_questions_about_fine_tuning_have_the_answers_shown(
    command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(command)) == (2 if re.search("(Likely d|D|memory d)oes NOT", said) else 0)
    assert said in [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
