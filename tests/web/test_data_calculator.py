"""Data and loop: the numbers of the command line, what decides the bytes of a token, and pasted run files."""

import json
import shlex

import pytest

from drawn import Drawn
from trainledger.cli import main
from trainledger.spec.problem import InvalidInput
from trainledger.web import answers
from trainledger.web.calculators.data import DATA

RUN_FILE = """
[model]
preset = "gpt2"
[recipe]
seq_len = 512
global_batch = 32
micro_batch = 8
steps = 1000
[cluster]
device = "l4"
"""
QUERIES = [
    {},
    *DATA.presets.values(),
    {"cluster.count": "1", "recipe.steps": "1k", "recipe.schedule": "constant", "corpus": "1e6"},
    {"recipe.checkpoints.every": "500", "recipe.checkpoints.asynchronous": "true", "recipe.tokens": "1B"},
]


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_it_is_what_the_command_line_says(query: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = answers.answer("data", query)
    words = shlex.split(found["paste"]["command"])
    assert main([*words[1:], "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    shown = json.loads(json.dumps(found["data"]))
    assert shown.pop("run") | {"assumed": []} == said.pop("run") | {"assumed": []}
    assert shown == said
    for each in found["headlines"]:
        value = said[each["name"]]
        assert each["value"] == (value[said["token_dtype"]] if isinstance(value, dict) else value)
    assert sorted(said["formulas"]) == sorted(each["name"] for each in found["headlines"])


def test_the_vocabulary_decides_the_bytes_of_a_token() -> None:
    few, many = (answers.answer("data", {"model.vocab_size": each})["data"] for each in ("65536", "65537"))
    assert (few["token_dtype"], many["token_dtype"]) == ("uint16", "uint32")
    assert many["loader_nbytes_per_second"] / many["loader_tokens_per_second"] == 4


def test_the_drawings_are_the_schedule_and_the_interval() -> None:
    view = answers.view("data", {"recipe.schedule": "linear", "recipe.schedule.final_ratio": "0"})
    assert [each["title"] for each in view["drawings"]] == [
        "The learning rate over the steps", "What the interval between checkpoints costs",
    ]  # fmt: skip
    drawn = Drawn(view["drawings"][0]["svg"])
    (curve,), scale = drawn.paths(stroke="#0072B2"), drawn.scale("y")
    rates = [scale.value(y) for _, y in curve]
    assert (rates[0], rates[-1]) == (pytest.approx(3e-4, abs=scale.pixel), pytest.approx(0, abs=scale.pixel))
    assert rates == sorted(rates, reverse=True)


def test_a_pasted_run_file_is_taken_as_it_is() -> None:
    found = answers.answer("data", {"file": RUN_FILE, "cluster.device": "l4", "cluster.count": "1"})
    assert found["data"]["tokens_per_step"] == 32 * 512
    assert found["data"]["micro_batches"] == 4
    with pytest.raises(InvalidInput, match="is searched for, which takes seconds"):
        answers.answer("data", {"file": RUN_FILE + "[layout]\nauto = true\n", "cluster.count": "8"})


def test_steps_that_wait_for_tokens_are_bad() -> None:
    waits = answers.view("data", {"cluster.loader_tokens_per_second": "10k"})
    assert (waits["tone"], waits["verdict"].endswith("; it waits for its tokens")) == ("bad", True)
    large = answers.view("data", {"run": "llama-3-70b"})
    assert (large["tone"], large["verdict"].endswith("; it does not fit in memory")) == ("bad", True)
    assert answers.view("data", {"corpus": "100B"})["tone"] == "good"
    repeated = answers.view("data", {})
    assert (repeated["tone"], "repeats its text" in repeated["verdict"]) == ("warn", True)


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ({"corpus": "much"}, "corpus = 'much': is not a count"),
        ({"recipe.steps": "10", "recipe.tokens": "1B"}, "recipe.steps"),
        ({"recipe.tokens": "0"}, "recipe.tokens = 0: must be at least 1"),
        ({"recipe.schedule": "constant", "recipe.schedule.final_ratio": "0.1"}, "recipe.schedule.final_ratio"),
        ({"recipe.micro_batch": "3", "recipe.global_batch": "8"}, "recipe.global_batch = 8"),
        ({"run": "gpt3000"}, "run = 'gpt3000'"),
        ({"data.path": "/etc/passwd"}, "is a path, and no file is read for a query"),
    ],
)
def test_wrong_input_is_a_sentence(query: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        answers.view("data", query)
    assert sentence in str(caught.value)


def test_a_count_is_shown_as_it_is_written() -> None:
    assert answers.view("data", {})["fields"]["recipe.tokens"]["text"] == "300B"
    assert answers.view("data", {"recipe.steps": "1k"})["fields"]["recipe.steps"]["text"] == "1k"
    shorter = answers.view("memory", {"run": "gpt2"})["fields"]["recipe.seq_len"]
    assert shorter["text"] == "1024"  # not the default, which this model is too short for
