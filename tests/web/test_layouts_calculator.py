"""The search of layouts on the page, against the command line's."""

import json

import pytest

from trainledger.cli import main
from trainledger.spec.problem import InvalidInput
from trainledger.web import answers
from trainledger.web.calculators import layouts
from trainledger.web.calculators.layouts import LAYOUTS

pytestmark = pytest.mark.sweep
SMALL = {"run": "gpt2-xl", "cluster.device": "a100-sxm-80gb", "cluster.count": "8"}


@pytest.mark.slow
def test_the_command_to_paste_finds_the_same_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    few = {"recipe.global_batch": "64", "recipe.activation_checkpointing": "full", "layout.pipeline": "2"}
    query = SMALL | {"run": "gpt2", "cluster.count": "4"} | few
    found = answers.answer("layouts", query)
    command = found["paste"]["command"].split()[1:]
    assert "pipeline=2" in command
    assert main([*command, "--json"]) == 0
    ranked = json.loads(capsys.readouterr().out)["ranked"]
    assert [each["set"] for each in found["data"]["ranked"]] == [each["set"] for each in ranked]
    assert all(each["layout"]["pipeline"] == 2 for each in ranked)


@pytest.mark.long
def test_another_choice_asks_for_no_other_search(monkeypatch: pytest.MonkeyPatch) -> None:
    first = answers.view("layouts", SMALL | {"choose": "1"})
    monkeypatch.setattr(layouts.tl, "layouts", lambda *_, **__: pytest.fail("searched again"))
    second = answers.view("layouts", SMALL | {"choose": "2"})
    assert first["verdict"] != second["verdict"]
    with pytest.raises(InvalidInput, match="must be a number of 1 to"):
        answers.view("layouts", SMALL | {"choose": "99"})


def test_the_run_file_of_the_chosen_layout_is_planned_as_it_was_ranked(capsys, tmp_path):
    found = answers.answer("layouts", SMALL)
    file = tmp_path / "run.toml"
    file.write_text(found["paste"]["run_file"])
    assert main(["plan", str(file), "--json"]) == 0
    forecast = json.loads(capsys.readouterr().out)["forecast"]
    seconds = next(each["value"] for each in found["headlines"] if each["name"] == "seconds")
    assert forecast["step_seconds"] == pytest.approx(seconds, rel=1e-9)


@pytest.mark.long
def test_where_none_fits_the_verdict_says_so() -> None:
    seen = answers.view("layouts", {"run": "llama-3.1-405b", "cluster.count": "8"})
    assert seen["tone"] == "bad"
    assert seen["verdict"] == "No layout of Llama 3.1 405B fits 8 × H100 SXM."


FILE = """
[model]
preset = "gpt2"

[recipe]
seq_len = 512
global_batch = 131072
steps = 1

[cluster]
device = "h100-sxm"
count = 8
"""


def test_too_many_devices_are_refused_in_a_sentence() -> None:
    with pytest.raises(InvalidInput, match="must be at most 16,384 here"):
        answers.view("layouts", {"cluster.count": "131072"})
    with pytest.raises(InvalidInput, match="must be at most 16,384 here"):
        answers.view("layouts", {"file": FILE.replace("count = 8", "count = 131072")})
    with pytest.raises(InvalidInput, match=r"cluster\.count = '²'"):
        answers.view("layouts", {"cluster.count": "²"})


@pytest.mark.long
def test_progress_is_said() -> None:
    seen: list[tuple[str, int, int]] = []
    answers.view("layouts", SMALL | {"recipe.seq_len": "512"}, progress=lambda *each: seen.append(each))
    assert seen
    assert all(done <= of for _, done, of in seen)
    first = next(what for what, _, _ in seen)
    assert first == "kinds of layers accounted"  # the longest part of a search of many kinds can be stopped too


@pytest.mark.slow
@pytest.mark.parametrize("title", LAYOUTS.presets)
def test_each_preset_finds_a_layout(title: str) -> None:
    assert answers.view("layouts", LAYOUTS.presets[title])["tone"] == "good"
