"""Questions: options declared once, in a signature, and read from it by Python, command line and forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
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
    assert given - flags <= {
        "run",
        "--set",
        "--device",
        "--count",
        "--price",
        "--method",
        "--teacher",
        "--plot",
        "--full",
        "--json",
        "--help",
    }


def of_a_run(name: str) -> Callable[..., object] | None:
    """The function of a verb that answers about a run with --device, --count and --set; what else it needs is given."""
    module = import_module(f"trainledger.{COMMANDS[name][2]}")
    if not module.__name__.startswith("trainledger.answers") or "overrides" not in question_named(name).takes:
        return None
    first = {"explain": ["memory", "gpt2"], "compare": ["gpt2", "gpt2"]}.get(name, ["gpt2"])
    return partial(getattr(module, name), *first)


OF_A_RUN = {name: asked for name in COMMANDS if (asked := of_a_run(name)) is not None}
OF_A_RUN |= {name: partial(getattr(tl, name), "gpt2") for name in ("load", "predict", "account")}


@pytest.mark.parametrize("name", OF_A_RUN)
def test_python_takes_the_words_of_the_cluster_that_the_command_line_takes(name: str) -> None:
    for field, wrong in (("device", "h100-sxn"), ("count", "many")):
        with pytest.raises(tl.InvalidInput) as caught:
            OF_A_RUN[name](**{field: wrong})
        assert [problem.field for problem in caught.value.problems] == [f"cluster.{field}"]


def test_the_words_of_the_cluster_are_overrides_and_a_device_stands_for_its_name() -> None:
    device = tl.device("h100-sxm")
    given = tl.plan("gpt2", {"cluster.device": "h100-sxm", "cluster.count": 2})
    assert tl.plan("gpt2", device=device, count="2").forecast == given.forecast
    assert tl.plan("gpt2", ["recipe.steps=1"], device="h100").run.cluster.device == "h100-sxm"
    with pytest.raises(tl.InvalidInput, match="device = 'h100-sxm': is not as in the catalog"):
        tl.plan("gpt2", device=replace(device, memory_nbytes=1))


@pytest.mark.parametrize("name", [name for name in COMMANDS if COMMANDS[name][2].startswith("answers")])
def test_python_names_its_keyword_for_a_flag_that_is_spelled_otherwise(name: str) -> None:
    about = question_named(name)
    asked = getattr(import_module(about.ask.__module__), about.ask.__name__)
    flags = {flag_of(option)[2:].replace("-", "_"): option.name for option in about.options.values() if option.flag}
    flags |= {"set": "overrides"} if "overrides" in about.takes else {}
    for flag, keyword in flags.items():
        if flag != keyword:
            with pytest.raises(tl.InvalidInput, match=f"^{flag}: is a word of the command line.*{keyword}"):
                asked(**{flag: True})


def test_the_reference_is_that_of_the_signatures() -> None:
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page()
