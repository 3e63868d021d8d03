"""What may mend a run that does not fit: every remedy is a question that is answered, and helps."""

import shlex

import pytest

from trainledger.cli import main
from trainledger.web import answers

TOO_LARGE = [
    ("memory", {}),
    ("memory", {"run": "llama-3-70b", "layout.tensor": "8", "layout.shard": "8"}),
    ("memory", {"run": "gpt2-xl", "recipe.seq_len": "1024", "recipe.micro_batch": "64", "recipe.lora.rank": "8"}),
    ("time", {"mfu_from": "predicted", "run": "llama-3-70b", "count": "8"}),
    ("data", {"run": "llama-3-70b", "cluster.count": "8", "cluster.device": "h100-sxm", "recipe.micro_batch": "1"}),
    ("serving", {"run": "llama-3-70b"}),
]


def changed(query: dict[str, str], remedy: dict) -> dict[str, str]:
    """The question with the fields of a remedy."""
    return {name: text for name, text in (query | remedy["fields"]).items() if text}


@pytest.mark.parametrize(("name", "query"), TOO_LARGE, ids=str)
def test_one_of_the_remedies_makes_it_fit(name: str, query: dict[str, str]) -> None:
    seen = answers.view(name, query)
    assert seen["tone"] == "bad"
    own = [each for each in seen["remedies"] if not each["calculator"]]
    assert {answers.view(name, changed(query, each))["tone"] for each in own} - {"bad"}


@pytest.mark.parametrize("query", [query for name, query in TOO_LARGE if name == "memory"], ids=str)
def test_no_remedy_takes_more_memory_and_most_take_less(query: dict[str, str]) -> None:
    def needed(asked: dict[str, str]) -> int:
        return int(answers.answer("memory", asked)["data"]["forecast"]["device_nbytes"])

    own = [each for each in answers.view("memory", query)["remedies"] if not each["calculator"]]
    after = [needed(changed(query, each)) for each in own]
    assert max(after) <= needed(query)
    assert sum(each < needed(query) for each in after) >= len(own) - 1  # a loss in chunks alone may save nothing


def test_what_fits_has_no_remedy() -> None:
    assert answers.view("memory", {"run": "gpt2", "recipe.seq_len": "1024"})["remedies"] == []


def test_the_search_of_layouts_is_asked_about_the_same_run() -> None:
    query = {"run": "gpt2-xl", "recipe.micro_batch": "64", "recipe.seq_len": "1024", "model.n_layers": "96"}
    found = next(each for each in answers.view("memory", query)["remedies"] if each["calculator"])
    assert found["calculator"] == "layouts"
    assert {"run", "model.n_layers", "recipe.seq_len", "cluster.count", "cluster.device"} == {*found["fields"]}
    assert shlex.split(found["command"])[:3] == ["trainledger", "layouts", "gpt2-xl"]
    assert "model.n_layers=96" in found["command"]


def test_limits_that_one_field_moves_have_a_button(capsys: pytest.CaptureFixture[str]) -> None:
    query = {"recipe.seq_len": "2048", "reach": "32"}
    found = {each["title"]: each for each in answers.view("breaks", query)["remedies"]}
    assert found["The loss in chunks"]["fields"] == {"recipe.loss": "chunked"}
    after = answers.view("breaks", changed(query, found["The loss in chunks"]))
    assert "The loss in chunks" not in {each["title"] for each in after["remedies"]}
    words = shlex.split(found["The loss in chunks"]["command"])
    assert main([*words[1:], "--json"]) == 0
    assert '"chunked"' in capsys.readouterr().out
    assert words == shlex.split(after["paste"]["command"])


def test_nothing_that_fits_leaves_nothing_fixed_and_more_devices() -> None:
    query = {"run": "llama-3-70b", "cluster.count": "8", "layout.tensor": "1", "layout.pipeline": "1"}
    query |= {"recipe.activation_checkpointing": "none"}
    found = answers.view("layouts", query)
    assert found["tone"] == "bad"
    titles = [each["title"] for each in found["remedies"]]
    assert titles == ["Fix nothing of the layout", "Take 16 devices", "Take 32 devices", "Take 64 devices"]
    assert not [name for name in changed(query, found["remedies"][0]) if name.startswith("layout.")]
