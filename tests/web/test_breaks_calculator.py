"""What breaks first, on the page and on the command line."""

import json

import pytest

from trainledger.cli import main
from trainledger.web import answers
from trainledger.web.calculators.breaks import BREAKS

pytestmark = pytest.mark.sweep


_PASTED = [each for each in BREAKS.presets if BREAKS.presets[each].get("along") != ""]


@pytest.mark.parametrize("title", [pytest.param(_PASTED[0], marks=pytest.mark.slow), *_PASTED[1:]])
def test_the_command_to_paste_gives_the_same_limits(title: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answers.answer("breaks", BREAKS.presets[title])
    main([*found["paste"]["command"].split()[1:], "--json"])
    assert json.loads(capsys.readouterr().out)["along"] == found["data"]["along"]


def test_each_size_has_its_headline_and_its_rows() -> None:
    query = {"run": "gpt2", "recipe.seq_len": "512", "recipe.global_batch": "64", "along": "", "reach": "8"}
    seen = answers.view("breaks", query)
    broken = {each["name"] for each in seen["headlines"]}
    assert {"sequence"} <= broken
    table = seen["drawings"][0]["table"]
    assert all(f"<td>{name}</td>" in table for name in broken)


def test_a_warning_is_not_called_what_breaks_first() -> None:
    """GPT-2 with much text in a micro-batch: logits are more than half of the peak, and nothing is broken."""
    query = {"run": "gpt2", "recipe.seq_len": "1024", "recipe.micro_batch": "16", "recipe.global_batch": "16",
             "cluster.count": "1", "layout.shard": "1", "recipe.activation_checkpointing": "full",
             "along": "vocabulary", "reach": "8"}  # fmt: skip
    found = answers.answer("breaks", query)
    assert "vocabulary logits" in {each["limit"] for each in found["data"]["warnings"]}
    assert found["data"]["already"] == []
    assert "logits" not in found["verdict"]
    assert found["tone"] != "bad"
    assert all("logits" not in each["title"] for each in found["headlines"])
