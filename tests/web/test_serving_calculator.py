"""Serving on the page and on the command line."""

import json

import pytest

from trainledger.cli import main
from trainledger.spec.problem import InvalidInput
from trainledger.web import answers
from trainledger.web.calculators.serving import SERVING


@pytest.mark.parametrize("title", SERVING.presets)
def test_the_command_to_paste_gives_the_same_account(title: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answers.answer("serving", SERVING.presets[title])
    assert main([*found["paste"]["command"].split()[1:], "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(found["data"]))
    headlines = {each["name"]: each["value"] for each in found["headlines"]}
    assert headlines["cache_nbytes"] == printed["cache_nbytes"]
    assert headlines["tokens_per_second"] == printed["expected_tokens_per_second"]


def test_a_batch_that_does_not_fit_is_an_answer() -> None:
    seen = answers.view("serving", {"run": "llama-3-70b", "batch": "4"})
    assert seen["tone"] == "bad"
    assert seen["verdict"].startswith("Does not fit: ")
    assert "Not even one sequence fits." in seen["verdict"]


def test_the_cache_grows_with_batch_and_context_alike() -> None:
    def cache(**query: str) -> int:
        found = answers.answer("serving", query)
        return next(each["value"] for each in found["headlines"] if each["name"] == "cache_nbytes")

    assert cache(batch="32") == 2 * cache(batch="16")
    assert cache(context="4096") * 2 == cache(context="8192")


def test_wrong_formats_get_the_sentence_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    query = {"weights": "int5", "cache": "bf61"}
    with pytest.raises(InvalidInput) as error:
        answers.view("serving", query)
    assert main(["plan", "llama-3-8b", "--phase", "decode", "--weights", "int5", "--cache", "bf61"]) == 2
    assert str(error.value) in capsys.readouterr().err
