"""Questions: options declared once, in a signature, and read from it by Python, command line and forms."""

from __future__ import annotations

from typing import Annotated

import pytest

import reference
import trainledger as tl
from trainledger.answers.question import choice, count, question, question_of, share, silent, text
from trainledger.cli.arguments import flag_of, parser_of
from trainledger.cli.asking import ask
from trainledger.cli.command_line import COMMANDS, question_named
from trainledger.web.field import of_question


@question()
def toy(
    *,
    size: Annotated[int, count("how large", least=2, most=100)] = 4,
    part: Annotated[float, share("how much of it", flag="--of-it")] = 0.25,
    colour: Annotated[str | None, choice("which colour", ["red", "blue"])] = None,
    quiet: Annotated[bool, text("say nothing")] = False,
    progress: object = silent,
) -> tuple[object, ...]:
    """A toy question."""
    return size, part, colour, quiet


def test_numbers_may_be_text_and_are_read_within_their_bounds() -> None:
    assert toy() == (4, 0.25, None, False)
    assert toy(size="1e1", part="50%", colour="red") == (10, 0.5, "red", False)  # type: ignore[arg-type]


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(tl.InvalidInput) as caught:
        toy(size=1, part="much", colour="blu")  # type: ignore[arg-type]
    assert [(problem.field, problem.nearest) for problem in caught.value.problems][::2] == [
        ("size", 2),
        ("colour", "blue"),
    ]
    assert len(caught.value.problems) == 3


def test_the_command_line_is_made_from_the_signature() -> None:
    about = question_of(toy)
    parser = parser_of("toy", about)
    words = ["--size", "7", "--of-it", "10%", "--quiet"]
    assert ask(about, parser.read(words)).document == (7, 0.1, None, True)  # type: ignore[comparison-overlap]
    assert "how much of it (25%)" in parser.format_help()
    with pytest.raises(tl.InvalidInput, match="--of-it = '3': must be between 0 and 1"):
        ask(about, parser.read(["--of-it", "3"]))


def test_a_form_has_the_default_the_help_and_the_choices() -> None:
    field = of_question(toy, "part", "a part")
    assert (field.default, field.about) == ("25%", "how much of it")
    assert of_question(toy, "colour", "colour").choices == (("red", "red"), ("blue", "blue"))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_verb_has_the_options_of_its_question_and_no_other(name: str) -> None:
    flags = {flag_of(option) for option in question_named(name).options.values()}
    actions = parser_of(name, question_named(name))._actions
    given = {(action.option_strings or [action.dest])[-1] for action in actions}
    assert flags <= given
    assert given - flags <= {"run", "--set", "--device", "--count", "--plot", "--full", "--json", "--help"}


def test_the_reference_is_that_of_the_signatures() -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page()
