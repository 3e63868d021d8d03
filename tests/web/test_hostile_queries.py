"""No text makes a calculator fail: it answers, or says in a sentence what is wrong."""

import json

import pytest

import hostile
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
        except (InvalidInput, Stopped):
            continue  # a sentence, or a search that was stopped
        json.dumps(seen, allow_nan=False)
