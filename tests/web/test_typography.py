"""What a page prints: no names of code, no e+23 and no letter x for times; helps that say more than labels."""

import re
from html import unescape

import pytest

from trainledger.spec.problem import InvalidInput
from trainledger.spec.reading import paths
from trainledger.spec.runfile import SECTIONS
from trainledger.web import answers
from trainledger.web.calculators import CALCULATORS
from trainledger.web.field import table_of
from trainledger.web.typography import in_words, typeset

CODE = re.compile(r"\b[a-z]\w*\.[a-z_]\w+")
TYPED = re.compile(r"\d(?:e[+-]?\d)|\d x \d|\d us\b|\^\d+(?![\d.])")
EACH = [
    (name, title)
    for name, calculator in CALCULATORS.items()
    for title in ("", *calculator.presets)
    if not calculator.patient or not title
]


def said(view: dict) -> list[str]:
    """The sentences and numbers of a view that stand outside of its tables."""
    cards = [card[part] for card in view["headlines"] for part in ("title", "text", "formula", "source", "interval")]
    return [view["verdict"], *view["notes"], *cards, *(remedy["title"] for remedy in view["remedies"] or ())]


@pytest.mark.parametrize(("name", "title"), EACH)
def test_no_answer_has_names_of_code_or_numbers_as_they_are_typed(name: str, title: str) -> None:
    view = answers.view(name, dict(CALCULATORS[name].presets.get(title, {})))
    for sentence in said(view):
        assert not CODE.search(sentence), sentence
        assert not TYPED.search(sentence), sentence
    for drawing in view["drawings"]:
        words = [unescape(text) for text in re.findall(r">([^<>]+)<", drawing["svg"] + drawing["table"])]
        assert [text for text in words if TYPED.search(text)] == []


def test_a_refusal_that_is_a_verdict_has_labels_for_every_field_of_a_run() -> None:
    for path in paths(SECTIONS):
        assert not CODE.search(in_words(f"{path} = 3: must be even")), path
    view = answers.view("time", {"mfu_from": "predicted", "run": "llama-3-70b", "count": "8"})
    assert view["tone"] == "bad"
    assert not CODE.search(view["verdict"])


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("-3 GB, 2 - 1, h100-sxm, 1-3", "−3 GB, 2 − 1, H100 SXM, 1-3"),
        ("transpose(0,-1) view(32,-1) x.t() x[-1]", "transpose(0,-1) view(32,-1) x.t() x[-1]"),
        ("1.5e13 / 8e09, 8e9^0.5, 1 / 1e3", "1.5 × 10¹³ / (8 × 10⁹), (8 × 10⁹)^0.5, 1 / 10³"),
        ("1e-08, 1.50e22, 0x10, e4m3, 1,024 x 2x", "10⁻⁸, 1.5 × 10²², 0x10, e4m3, 1,024 × 2×"),
        ('"20x" is typed, T^2, 2^(1 - bias), D^0.35', '"20x" is typed, T², 2^(1 − bias), D^0.35'),
        ('<path d="M1e5 2-3 x 4"/><pre>2 x 3</pre>2 x 3', '<path d="M1e5 2-3 x 4"/><pre>2 x 3</pre>2 × 3'),
        ("the gradient of x is 2 m x n", "the gradient of x is 2 m × n"),
        ("--device h100-sxm=1 a/gpt2 mixtral-8x7b", "--device h100-sxm=1 a/gpt2 Mixtral 8x7B v0.1"),
    ],
)
def test_only_what_is_printed_is_typeset(printed: str, shown: str) -> None:
    assert typeset(printed).replace("\N{NO-BREAK SPACE}", " ") == shown


def test_the_api_keeps_what_the_command_line_prints() -> None:
    assert "1,024 x h100-sxm" in answers.answer("time", {})["verdict"]
    assert "1,024 × H100 SXM" in answers.view("time", {})["verdict"]


def test_each_field_has_a_help_that_says_more_than_its_label() -> None:
    for calculator in answers.listing():
        for field in calculator["fields"]:
            words = [set(re.findall(r"\w+", text.lower())) for text in (field["about"], field["title"])]
            assert len(words[0] - words[1]) > 3, (calculator["name"], field["name"], field["about"])


def test_lists_show_models_and_devices_by_title() -> None:
    shown = {field["name"]: dict(field["choices"]) for field in answers.listing()[5]["fields"]}
    assert shown["cluster.device"]["h100-sxm"] == "H100 SXM, 80 GB, 989.5 TFLOP/s"
    assert shown["run"]["llama-3.1-70b"] == "Llama 3.1 70B"


def test_labels_belong_to_fields() -> None:
    labels = table_of("labels.toml")
    names = {name for calculator in CALCULATORS.values() for field in calculator.fields for name in
             (field.name, f"{calculator.name}.{field.name}")}  # fmt: skip
    assert {*labels["unit"], *labels["help"]} <= names


def test_an_unknown_calculator_is_still_refused() -> None:
    with pytest.raises(InvalidInput, match="is none of"):
        answers.view("tims", {})
