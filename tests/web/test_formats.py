"""Number formats: the values and bits of the command line, what the drawings show, and formats alone."""

import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawn import Drawn, marks
from trainledger.answers.pages.format_figures import bits_chart
from trainledger.cli import main
from trainledger.report.chart import Bars, Words
from trainledger.spec.dtypes import FORMATS as KNOWN
from trainledger.spec.problem import InvalidInput
from trainledger.web import answers
from trainledger.web.calculators.formats import FORMATS

QUERIES = [
    {},
    *FORMATS.presets.values(),
    {"value": "-3.7", "format": "int"},
    {"value": "200", "format": "fp8", "largest": ""},
    {"value": "", "format": ""},
    {"value": "0.02", "format": "nf4", "largest": "0.5"},
    {"value": "-0", "format": "nvfp4"},
]


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_it_is_what_the_command_line_says(query: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = answers.answer("formats", query)
    words = shlex.split(found["paste"]["command"])
    assert main([*words[1:], "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads(json.dumps(found["data"]))
    known = {
        each.get("format"): each["value"] for each in (*said["formats"], *said.get("blocks", [])) if "value" in each
    }
    for each in found["headlines"]:
        if each["name"] in known and each["value"] is not None:
            assert each["value"] == known[each["name"]]
            assert each["formula"].endswith(f"{each['value']:.9g}")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_the_bits_that_are_drawn_are_the_number(number: float) -> None:
    one = KNOWN["fp32"]
    chart = bits_chart(number, [one], [], [], "")
    drawn = {each.name: len(each.rows) for each in marks(chart, Bars)}
    assert drawn == {"sign": 1, "exponent": 8, "mantissa": 23}
    assert "".join(marks(chart, Words)[0].texts) == "".join(one.rounded(number).bits)


def test_a_bit_says_what_it_is_worth() -> None:
    drawing = answers.answer("formats", {"value": "-1.5", "format": "bf16"})["figures"]["The bits of -1.5"]
    said = Drawn(drawing).titles("rect")
    assert said[0] == "bf16, sign: minus"
    assert "bf16, exponent bit worth 128: 2^0 = 2^(127 - 127)" in said
    assert "bf16, mantissa bit worth 2^-1" in said


def test_a_number_without_an_end_in_binary_is_exact_nowhere() -> None:
    view = answers.view("formats", {"value": "0.1"})
    assert "exact" not in view["verdict"]
    assert "0.10000000000000000555" in "".join(each["html"] for each in view["sections"])
    assert "is exact in fp64, fp32" in answers.view("formats", {"value": "0.5"})["verdict"]


def test_what_is_lost_is_bad_where_one_format_is_asked_for() -> None:
    assert answers.view("formats", {"value": "1e-8", "format": "fp16"})["tone"] == "bad"
    assert answers.view("formats", {"value": "1e-8", "format": "bf16"})["tone"] == "good"
    assert "used for" in answers.view("formats", {})["drawings"][1]["table"]


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ({"value": "1e-8x"}, "value = '1e-8x': is neither a number (write it like 1e-8, 0.1 or 65504)"),
        ({"value": "1e999"}, "must be a finite number that fp64 holds"),
        ({"format": "bfloat17"}, "format = 'bfloat17': is not a known floating-point format"),
        ({"largest": "wide"}, "largest = 'wide': is neither a number"),
        ({"largest": "-1"}, "largest = -1.0: is a magnitude, so it must be at least 0; nearest that works: 1.0"),
    ],
)
def test_wrong_input_is_a_sentence(query: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        answers.view("formats", query)
    assert sentence in str(caught.value)
