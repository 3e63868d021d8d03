"""Matmul and roofline: the numbers of the command line, devices side by side, and matmuls that are no matmul."""

import json
import shlex

import pytest

from drawn import Drawn
from trainledger.cli import main
from trainledger.spec.problem import InvalidInput
from trainledger.web import answers
from trainledger.web.calculators.matmul import MATMUL

QUERIES = [
    {},
    *MATMUL.presets.values(),
    {"m": "1k", "dtype": "fp8", "device": "h100"},
    {"equation": "ij->ji", "shapes": "2,3", "device": ""},
    {"equation": "ij,jk->k", "shapes": "64,64 64,64"},
    {"dtype": "fp64", "device": "l4,h100-sxm"},
    {"equation": "batch seq d, d f -> batch seq f", "shapes": "2,8,4 4,16", "sweep": "k"},
]


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_it_is_what_the_command_line_says(query: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = answers.answer("matmul", query)
    words = shlex.split(found["paste"]["command"])
    assert main([*words[1:], "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads(json.dumps(found["data"]))
    values = {each["name"]: each["value"] for each in found["headlines"]}
    assert (values["flops"], values["nbytes"], values["intensity"]) == (
        said["flops"],
        said["nbytes"],
        said["intensity"],
    )
    if "seconds" in values:
        first = said["devices"][0]
        assert values["seconds"] == first["seconds"]
        assert (
            values["bound_seconds"] == first["bound_seconds"] == max(first["compute_seconds"], first["memory_seconds"])
        )
        assert values["waves"] == first["tilings"][0]["waves"]


def test_the_point_stands_under_the_roof() -> None:
    found = answers.answer("matmul", {"device": "h100-sxm", "m": "1"})["figures"]
    drawn = Drawn(found["The matmul under the roof of each device"])
    (bound_x, bound_y, _), (predicted_x, predicted_y, _) = drawn.symbols
    assert bound_x == predicted_x
    assert predicted_y > bound_y  # pixels go down
    (roof,) = drawn.paths(stroke="#0072B2")
    (left, low), (right, high), _ = roof
    assert left <= bound_x <= right
    assert bound_y == pytest.approx(low + (bound_x - left) / (right - left) * (high - low), abs=0.2)  # memory-bound


def test_padding_to_a_multiple_of_eight_is_faster() -> None:
    odd, even = (answers.answer("matmul", MATMUL.presets[name])["data"]["devices"][0]["seconds"] for name in
                 ("A head of 50,257 columns, not aligned", "The same padded to 50,304"))  # fmt: skip
    assert even < 0.7 * odd


def test_a_sum_is_bound_and_not_predicted() -> None:
    view = answers.view("matmul", {"equation": "ij,jk->k", "shapes": "64,64 64,64", "device": "h100-sxm"})
    assert "predicted" not in view["verdict"]
    assert "nothing is predicted" in view["notes"][0]
    assert len(view["drawings"]) == 1


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ({"m": "wide"}, "m = 'wide': is not a count"),
        ({"n": "0"}, "n = '0': must be"),
        ({"dtype": "bfloat17"}, "dtype = 'bfloat17': is not a known number format"),
        ({"device": "h101"}, "device = 'h101': is not in the catalog"),
        ({"equation": "ij,jk->ik", "shapes": "4,8"}, "has 2 operands, but 1 shape given"),
        ({"equation": "ij,jk->ik", "shapes": "4,8 8,x"}, "shape 2 = '8,x': has dims that are no whole numbers"),
        ({"sweep": "z"}, "sweep = 'z': must be one of m, n, k"),
    ],
)
def test_wrong_input_is_a_sentence(query: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        answers.view("matmul", query)
    assert sentence in str(caught.value)
