"""Every way to ask a calculator, without a server."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from math import isclose
from string import Formatter

import pytest

import trainledger as tl
from trainledger.spec.problem import InvalidInput
from trainledger.web import answers
from trainledger.web.calculators import CALCULATORS
from trainledger.web.typography import typeset

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


def test_a_number_at_the_end_of_a_float_is_drawn() -> None:
    """Its ticks went to 10 to the 309th."""
    assert answers.view("formats", {"value": "9" * 300})["drawings"]


def test_an_unknown_calculator_is_answered_with_the_nearest() -> None:
    with pytest.raises(InvalidInput, match="nearest that works: time"):
        answers.view("tim", {})


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, trainledger.web.answers; print(*{each.split('.')[0] for each in sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "fastapi", "rich", "plotly"} & set(found)


SEEDS = [(name, seed) for name, kinds in answers.kinds_of_exercises().items() for seed in range(3 * len(kinds))]
# Of a number in the unit of an exercise, that of the card; other units are names of what is counted.
SCALES = {"GB": 1e9, "MB": 1e6, "GFLOP": 1e9, "s": 1, "µs": 1e-6, "%": 0.01}
# Numbers that a formula may have beside those of the question: rules, and units.
RULES = {"0", "0.5", "1", "2", "3", "4", "6", "8", "12", "100", "1000", "3600", "86400", "1e6", "1e9"}


@pytest.mark.parametrize(("name", "seed"), SEEDS)
def test_an_exercise_is_worked_out_by_hand_from_what_it_shows(name: str, seed: int) -> None:
    row = answers.kinds_of_exercises()[name][seed % len(answers.kinds_of_exercises()[name])]
    shown = {field for _, field, _, _ in Formatter().parse(row["question"]) if field}
    needed = set(re.findall(r"\b[a-z_]\w*", row["answer"])) - {"max", "round"}
    assert needed <= shown
    assert set(re.findall(r"(?<![\w.])\d[\w.]*", row["answer"])) <= RULES
    drawn = answers.drawn(name, {each.name for each in CALCULATORS[name].fields}, seed)
    cards = {each["name"]: each["value"] for each in answers.answer(name, drawn.query)["headlines"]}
    by_hand = drawn.exercise.answer * SCALES.get(drawn.exercise.unit, 1)
    assert isclose(by_hand, cards[drawn.asks], rel_tol=drawn.exercise.tolerance / 2), drawn


@pytest.mark.parametrize(("name", "seed"), SEEDS)
def test_a_miss_is_given_a_hint_and_the_next_the_derivation(name: str, seed: int) -> None:
    exercise = answers.drawn(name, (), seed).exercise
    for mistake in exercise.mistakes:
        if isclose(mistake, exercise.answer, rel_tol=exercise.tolerance):
            continue  # here nothing is left out
        assert typeset(exercise.mistakes[mistake]) in answers.check(name, seed, str(mistake), 0)["said"]
    wrong = str(3 * exercise.answer)
    first, second = (answers.check(name, seed, wrong, misses) for misses in (0, 1))
    assert not first["right"] | first["over"]
    assert first["said"].endswith(typeset(f"Hint: {exercise.hint}"))
    assert typeset(exercise.derivation) not in first["said"]
    assert second["over"]
    assert second["said"].endswith(typeset(f"The answer: {exercise.shown_answer}"))
    right = answers.check(name, seed, f"{exercise.answer} {exercise.unit}", 1)
    assert right["right"]
    assert typeset(exercise.derivation) in right["said"]
    with pytest.raises(InvalidInput, match="guess = 'soon': is no number"):
        answers.check(name, seed, "soon", 0)


def test_a_field_follows_where_the_answer_decides_it() -> None:
    fields = answers.view("time", {"days": "45"})["fields"]
    assert fields["days"]["follows"]  # it is solved for
    assert not fields["params"]["follows"]


def test_the_listing_names_the_other_fields_of_a_run() -> None:
    of = {each["name"]: each for each in answers.listing()}
    assert "recipe.dropout" in of["breaks"]["others"]
    assert "recipe.seq_len" not in of["breaks"]["others"]  # which has a slider
    assert of["tensor"]["others"] == []


@pytest.mark.parametrize("at", range(10))
def test_each_slider_of_the_lesson_moves_its_large_number_and_has_an_answer_at_both_ends(at: int) -> None:
    screen = answers.lesson()[at]
    name, given = screen["calculator"], screen["given"]
    fields = {field.name: field for field in CALCULATORS[name].fields if field.name in screen["fields"] and field.stops}
    ends = {
        each: screen.get("ranges", {}).get(each, (field.stops[0], field.stops[-1])) for each, field in fields.items()
    }
    for corner in product(*ends.values()):
        assert answers.answer(name, given | dict(zip(ends, corner, strict=True)))["headlines"]
    for each, field in fields.items():
        low, high = map(field.stops.index, ends[each])
        asked = [given | {each: field.stops[low + round(part * (high - low) / 3)]} for part in range(4)]
        cards = [answers.answer(name, query)["headlines"] for query in asked]
        large = [
            next((card for card in shown if card["name"] == screen.get("number")), shown[0])["text"] for shown in cards
        ]
        assert len(set(large)) >= 3, (each, large)
