"""Training time: the numbers of the command line, given and predicted MFU, and the waterfall from the napkin down."""

import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawn import Drawn
from trainledger.cli import main
from trainledger.spec.problem import InvalidInput
from trainledger.web import answers
from trainledger.web.calculators.time import TIME

PREDICTED = {"mfu_from": "predicted", "run": "gpt2-xl", "tokens": "30B", "device": "a100-sxm-80gb", "count": "8"}
QUERIES = [
    *TIME.presets.values(),
    {"solve": "mfu", "days": "2w", "price": "2.5"},
    {"solve": "count", "params": "70B", "days": "90"},
    {"solve": "tokens", "params": "1e9", "days": "12h", "dtype": "fp8"},
    PREDICTED | {"price": "1.8"},
    PREDICTED | {"solve": "tokens", "days": "3"},
    PREDICTED | {"layout.replicate": "2", "recipe.micro_batch": "4", "recipe.global_batch": "64"},
]


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_it_is_what_the_command_line_says(query: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = answers.answer("time", query)
    words = shlex.split(found["paste"]["command"])
    assert main([*words[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found["data"]))
    values = {each["name"]: each["value"] for each in found["headlines"]}
    same = set(values) & set(found["data"])
    assert {"days", "mfu", "flops"} & same or words[1] == "plan"
    assert {name: found["data"][name] for name in same} == {name: values[name] for name in same}


def test_the_bars_of_a_predicted_run_lead_from_the_napkin_to_its_days() -> None:
    view = answers.view("time", PREDICTED)
    assert "6 N D at the peak" in view["drawings"][0]["table"]
    assert "exposed communication" in view["drawings"][0]["table"]
    assert "sharded over 8" in view["notes"][0]
    assert view["fields"]["mfu"]["text"].endswith("%")
    found = answers.answer("time", PREDICTED)
    drawn = Drawn(found["figures"]["Where the time goes"])
    boxes, scale = sorted(drawn.boxes, key=lambda each: each.y), drawn.scale("x")
    assert boxes[-1].right == max(each.right for each in boxes)
    days = next(each["value"] for each in found["headlines"] if each["name"] == "days")
    assert scale.value(boxes[-1].right) == pytest.approx(days, abs=scale.pixel)


def test_tokens_at_a_predicted_mfu_lead_back_to_the_days() -> None:
    query = {"mfu_from": "predicted", "run": "llama-3-8b", "count": "64", "device": "h100-sxm"}
    solved = answers.view("time", query | {"solve": "tokens", "days": "30"})
    assert "MFU (6 N D) is predicted" in solved["notes"][1]
    assert solved["fields"]["params"]["text"] == "8.03B"
    found = answers.answer("time", query | {"tokens": solved["fields"]["tokens"]["text"]})["data"]["forecast"]
    assert found["days"] == pytest.approx(30, rel=0.02)  # checkpoints and failures are in the plan alone
    fp8 = answers.view("time", query | {"solve": "tokens", "recipe.precision": "fp8-tensorwise"})
    assert "--dtype fp8" in fp8["paste"]["command"]


def test_a_predicted_mfu_is_by_the_definition_of_a_given_one_and_has_the_other_beside_it() -> None:
    query = {"mfu_from": "predicted", "run": "llama-3-8b", "count": "64", "recipe.seq_len": "8192", "tokens": "15T"}
    found = answers.answer("time", query)
    by_name = {each["name"]: each for each in found["headlines"]}
    titles = [by_name[name]["title"] for name in ("mfu", "mfu_with_attention")]
    assert titles == ["MFU (6 N D)", "MFU with attention"]
    assert answers.answer("time", {"solve": "mfu"})["headlines"][0]["title"] == titles[0]
    assert next(each.title for each in TIME.fields if each.name == "mfu") == titles[0]
    assert titles[0] in found["verdict"]
    # The napkin at the predicted MFU leads to the time of the steps alone: the same definition.
    napkin = {"params": "8030261248", "count": "64", "tokens": "15T", "mfu": repr(by_name["mfu"]["value"])}
    steps = found["data"]["run"]["recipe"], found["data"]["forecast"]
    seconds = steps[1]["step_seconds"] * 15e12 / (steps[0]["global_batch"] * steps[0]["seq_len"])
    assert answers.answer("time", napkin)["data"]["days"] == pytest.approx(seconds / 86400, rel=1e-3)
    # Attention counted dense adds 12 L d T to the 6 N of a token, to within what parameters without matmuls weigh.
    more = by_name["mfu_with_attention"]["value"] / by_name["mfu"]["value"]
    assert more == pytest.approx(1 + 12 * 32 * 4096 * 8192 / (6 * 8030261248), rel=0.08)


@given(days=st.floats(0.1, 1000), mfu=st.floats(0.01, 1))
def test_what_follows_from_four_numbers_leads_back_to_the_fifth(days: float, mfu: float) -> None:
    query = {"params": "7B", "days": repr(days), "mfu": repr(mfu), "solve": "tokens"}
    tokens = str(answers.answer("time", query)["data"]["tokens"])
    back = answers.answer("time", {"params": "7B", "tokens": tokens, "mfu": repr(mfu)})["data"]["days"]
    assert back == pytest.approx(days, rel=1e-6)


def test_an_impossible_run_is_an_answer_and_not_an_error() -> None:
    view = answers.view("time", {"solve": "mfu", "days": "1"})
    assert view["tone"] == "bad"
    assert "of the peak of the devices" in view["verdict"]
    too_large = answers.view("time", {"mfu_from": "predicted", "run": "llama-3-70b", "count": "8"})
    assert too_large["tone"] == "bad"
    assert "Does not fit" in too_large["verdict"]


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ({"params": "many"}, "params = 'many': is not a count; write it like 4096"),
        ({"device": "h101"}, "device = 'h101': is not in the catalog"),
        ({"mfu": "140%"}, "mfu = '140%': is a share of the peak"),
        ({"recipe.micro_batch": "2"}, "is a field of a run, which only a predicted MFU has"),
        (PREDICTED | {"solve": "params"}, "solve = 'params': is of a given MFU"),
        (PREDICTED | {"dtype": "fp8"}, "dtype = 'fp8': is of a given MFU"),
        (PREDICTED | {"run": "gpt3000"}, "run = 'gpt3000'"),
        (
            PREDICTED | {"layout.tensor": "3"},
            "layout.tensor = 3: must divide model.attention.n_heads = 25; nearest that works: 1",
        ),
        (PREDICTED | {"data.path": "/etc/passwd"}, "is a path, and no file is read for a query"),
    ],
)
def test_wrong_input_is_a_sentence(query: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        answers.view("time", query)
    assert sentence in str(caught.value)
