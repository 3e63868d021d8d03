"""A tensor and a chain: the numbers of the command line, each cell of the drawings, and chains that fail as answers."""

import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawn import Drawn, marks
from trainledger.answers.pages.storage import MOST, elements_table, storage_chart, storage_table, why_not_drawn
from trainledger.cli import main
from trainledger.report.chart import Bars
from trainledger.spec.problem import InvalidInput
from trainledger.tensors.chain import chain
from trainledger.tensors.einsum import Tensor
from trainledger.web import answers
from trainledger.web.calculators.tensor import TENSOR

QUERIES = [
    {},
    *TENSOR.presets.values(),
    {"operations": ""},
    {"shape": "", "operations": "", "dtype": "int64"},
    {"shape": "0,8", "operations": "t"},
    {"dtype": "bool", "shape": "2x3", "operations": "expand(4,2,3)", "at": "-1,0,2"},
]


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_it_is_what_the_command_line_says(query: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = answers.answer("tensor", query)
    words = shlex.split(found["paste"]["command"])
    code = main([*words[1:], "--json"])
    said = json.loads(capsys.readouterr().out)
    problems, _ = said.pop("error", []), said.pop("where", "")
    assert said == json.loads(json.dumps(found["data"]))
    assert (code, found["tone"]) == ((2, "bad") if problems else (0, "good"))
    assert not problems or problems[0]["sentence"] == found["verdict"]
    values = {each["name"]: each["value"] for each in found["headlines"]}
    last = found["data"]["steps"][-1] if found["data"].get("steps") else found["data"]
    assert values["nbytes"] == last["nbytes"]
    assert values["written_nbytes"] == found["data"].get("written_nbytes", 0)
    if "byte" in values:
        assert values["byte"] == (last.get("element") or found["data"]["start"]["element"])["byte"]


def test_a_chain_that_fails_says_what_works_instead() -> None:
    view = answers.view("tensor", {"operations": "transpose(0,1) view(32)"})
    assert view["tone"] == "bad"
    assert "nearest that works: reshape(32), a copy of 128 bytes" in view["verdict"]
    assert "fails" in view["sections"][0]["html"]


def test_each_cell_says_its_element_and_its_byte() -> None:
    drawings = answers.view("tensor", {"operations": "transpose(0,1)"})["drawings"]
    storage, tensor = (Drawn(each["svg"]).titles("rect") for each in drawings)
    assert "place 9, byte 36: [1, 1]" in storage
    assert "element [1, 1]: place 9, byte 36" in tensor


def test_the_step_that_is_drawn_can_be_chosen_and_is_the_last_interesting_one_by_default() -> None:
    view = answers.view("tensor", {"operations": "transpose(0,1) reshape(32)"})
    assert view["drawings"][0]["title"] == "The storage after transpose(0, 1): fp32[8, 4]"
    assert [title for _, title in view["choices"]["draw"]] == ["at first", "after transpose(0, 1)", "after reshape(32)"]
    assert "at first" in answers.view("tensor", {"draw": "0"})["drawings"][0]["title"]
    assert "reshape" in answers.view("tensor", {"draw": "99"})["drawings"][0]["title"]


@given(st.lists(st.integers(1, 5), max_size=4), st.sampled_from(["", "mT", "[..., ::2]", "[None]", "flatten", "T"]))
def test_the_two_drawings_agree(shape: list[int], operations: str) -> None:
    start = Tensor("bf16", tuple(shape))
    one = chain(start, operations).result
    if why_not_drawn(one):
        assert one.storage_nbytes // 2 > MOST or one.elements > MOST or one.elements // one.shape[-1] > 48
        return
    by_place = {place: element for place, _, element in storage_table(one).rows}
    for index, place, byte in elements_table(one).rows:
        assert by_place[place] == index
        assert byte == 2 * place  # type: ignore[operator]
    assert sum(len(each.rows) for each in marks(storage_chart(one, ""), Bars)) == one.storage_nbytes // 2


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ({"shape": "4,x"}, "shape = '4,x': has dims that are no whole numbers of elements"),
        ({"dtype": "bfloat17"}, "nearest that works: bfloat16"),
        ({"dtype": "mxfp4"}, "so that no element has an address"),
        ({"operations": "viiew"}, "operations = 'viiew': is no operation that is known here ("),
        ({"at": "9,9,9"}, "at = '9,9,9': fp32[4, 8] has 2 dims, and the index has 3"),
        ({"draw": "second"}, "draw = 'second': is no step of the chain: 0 is the tensor itself, 2 the last that works"),
    ],
)
def test_wrong_input_is_a_sentence(query: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        answers.view("tensor", query)
    assert sentence in str(caught.value)
