"""No text makes a calculator fail: it answers, or says in a sentence what is wrong."""

import json

import pytest

import hostile
from trainledger.answers.pages.plain_data import error_json
from trainledger.cli import main
from trainledger.spec.problem import InvalidInput
from trainledger.web import answers
from trainledger.web.calculators import CALCULATORS

pytestmark = pytest.mark.sweep
MOST = 150  # queries of a calculator; `make fuzz` asks all of them


class Stopped(KeyboardInterrupt):
    """Ends a search at its first report."""


def stop(what: str, done: int, of: int) -> None:
    raise Stopped


@pytest.mark.parametrize("name", sorted(CALCULATORS))
def test_hostile_queries_are_answered_or_refused_in_sentences(name: str) -> None:
    calculator = CALCULATORS[name]
    every = list(hostile.queries(calculator))
    for query in every[:: -(-len(every) // MOST)]:
        try:
            seen = answers.view(name, query, progress=stop if calculator.patient else lambda *each: None)
        except Stopped:
            continue
        except InvalidInput as error:
            seen = error_json(error)  # sentences
        json.dumps(seen, allow_nan=False)


VERBS = {"memory": ("plan",), "breaks": ("breaks", "--along", "sequence"), "serving": ("plan", "--phase", "decode")}


@pytest.mark.parametrize("name", VERBS)
def test_a_field_of_a_run_is_refused_with_the_sentence_of_the_command_line(name, capsys):
    fields = CALCULATORS[name].fields
    defaults = {each.name: each.default for each in fields if "." in each.name and each.default}
    paths = [each.name for each in fields if "." in each.name]
    texts = ("nan", "-3d", "../../etc/passwd", "1e-320", "0", "\t", "auto", "é" * 100)
    refused = 0
    for at, path in enumerate(paths * len(texts)):
        query = {path: texts[(at + at // len(paths)) % len(texts)]}
        try:
            answers.view(name, query, progress=stop)
        except Stopped:
            continue
        except InvalidInput as error:
            sentence = " ".join(str(error).split())
        else:
            continue
        settings = [word for each in {**defaults, **query}.items() for word in ("--set", "=".join(each))]
        assert main([VERBS[name][0], "llama-3.1-8b", *VERBS[name][1:], *settings]) == 2
        assert sentence in " ".join(capsys.readouterr().err.split()), query
        refused += 1
    assert refused > 2 * len(paths)
