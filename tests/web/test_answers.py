"""Every way to ask a calculator, without a server."""

import json
import subprocess
import sys
from collections.abc import Iterator
from math import isclose

import pytest

import trainledger as tl
from trainledger.spec.problem import InvalidInput
from trainledger.web import answers
from trainledger.web.calculators import CALCULATORS

EACH = sorted(CALCULATORS)


@pytest.mark.parametrize("name", EACH)
def test_the_default_query_and_each_preset_are_answered_with_formulas_and_tables(name: str) -> None:
    calculator = CALCULATORS[name]
    presets = () if calculator.patient else calculator.presets.values()  # those have tests of their own
    for query in ({}, *presets):
        seen = answers.view(name, query)
        assert seen["verdict"]
        for each in seen["headlines"]:
            assert each["formula"], each
            assert each["basis"], each
            assert each["source"], each
        for each in seen["drawings"]:
            assert each["svg"].startswith("<svg")
            assert "<table" in each["table"]
        json.dumps(seen, allow_nan=False)


def numbers(data: object) -> Iterator[float]:
    if isinstance(data, dict | list):
        for each in data.values() if isinstance(data, dict) else data:
            yield from numbers(each)
    elif isinstance(data, int | float) and not isinstance(data, bool):
        yield float(data)


@pytest.mark.parametrize("name", [name for name in EACH if not CALCULATORS[name].patient])
def test_each_number_of_a_card_is_in_the_json(name: str) -> None:
    for query in ({}, *CALCULATORS[name].presets.values()):
        found = answers.answer(name, query)
        known = list(numbers(found["data"]))
        for card in found["headlines"]:
            assert card["value"] is None or any(isclose(card["value"], each, rel_tol=1e-12) for each in known), card


@pytest.mark.parametrize("name", EACH)
def test_an_unknown_field_and_a_long_text_are_refused_in_sentences(name: str) -> None:
    with pytest.raises(InvalidInput, match="is no field of this calculator"):
        answers.view(name, {"nonsense": "1"})
    field = next(each for each in CALCULATORS[name].fields if not each.long)
    with pytest.raises(InvalidInput, match="at most 300 characters"):
        answers.view(name, {field.name: "9" * 301})


def test_the_answer_is_that_of_the_question_in_python() -> None:
    found = answers.answer("time", {"params": "70B", "tokens": "15T", "mfu": "50%", "count": "1024"})
    napkin = tl.napkin(params="70B", tokens="15T", device="h100-sxm", count=1024, mfu=0.5)
    assert found["data"]["days"] == napkin.days


def test_an_unknown_calculator_is_answered_with_the_nearest() -> None:
    with pytest.raises(InvalidInput, match="nearest that works: time"):
        answers.view("tim", {})


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, trainledger.web.answers; print(*{each.split('.')[0] for each in sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "fastapi", "rich", "plotly"} & set(found)


def test_an_exercise_says_right_close_and_wrong() -> None:
    query = {"params": "70B", "tokens": "15T", "mfu": "50%", "count": "1024"}  # 143.9 days
    assert answers.check("time", query, "days", "144")["said"] == "Right: it is 143.9."
    assert answers.check("time", query, "days", "100")["said"] == "Close: it is 143.9, and 100 is -30.5 % off."
    assert not answers.check("time", query, "days", "5")["near"]
    with pytest.raises(InvalidInput, match="is not an amount"):
        answers.check("time", query, "days", "soon")


def test_a_field_follows_where_the_answer_decides_it() -> None:
    fields = answers.view("time", {"days": "45"})["fields"]
    assert fields["days"]["follows"]  # it is solved for
    assert not fields["params"]["follows"]


def test_the_listing_names_the_other_fields_of_a_run() -> None:
    of = {each["name"]: each for each in answers.listing()}
    assert "recipe.dropout" in of["breaks"]["others"]
    assert "recipe.seq_len" not in of["breaks"]["others"]  # which has a slider
    assert of["tensor"]["others"] == []


@pytest.mark.parametrize("name", [name for name in EACH if not CALCULATORS[name].patient])
def test_each_exercise_has_an_answer_to_ask_for(name: str) -> None:
    for seed in range(6):
        query = answers.exercise(name, seed)["query"]
        asked = [each for each in answers.answer(name, query)["headlines"] if each["asked"] and each["value"]]
        assert asked, query
        assert answers.check(name, query, asked[0]["name"], "1e30")["right"] is False


def test_an_exercise_that_takes_seconds_is_a_run_that_can_be_planned() -> None:
    calculator = CALCULATORS["breaks"]
    for seed in range(12):
        query = answers.exercise("breaks", seed)["query"]
        tl.plan(query.get("run", "llama-3.1-8b"), [
            f"{each.name}={query.get(each.name, each.default)}" for each in calculator.fields
            if "." in each.name and query.get(each.name, each.default)
        ])  # fmt: skip


@pytest.mark.parametrize(("of", "guess"), [("days", "20.6 days"), ("flops", "7.2e23 FLOP"), ("flops", "7.2e23")])
def test_a_guess_may_have_its_unit(of: str, guess: str) -> None:
    assert answers.check("time", {}, of, guess)["right"]
