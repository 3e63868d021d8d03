"""What every answer about a run says of it as JSON."""

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from planned_runs import ALONE

import trainledger as tl
from trainledger.answers.pages.plain_data import SECTIONS
from trainledger.cli import main
from trainledger.spec.setting import NONE

pytestmark = pytest.mark.sweep

ON = ["--device", "a100-sxm-80gb"]
ANSWERS = {
    "plan": (["plan"], []), "decode": (["plan"], ["--phase", "decode"]), "fit": (["fit"], ["--of", "sequence"]),
    "layouts": (["layouts"], ["--keep", "1"]), "advise": (["advise"], ["--together", "0"]),
    "breaks": (["breaks"], ["--along", "vocabulary"]), "explain flops": (["explain", "flops"], []),
    "explain time": (["explain", "time"], []), "explain B": (["explain", "memory"], ["--symbolic", "B"]),
    "rules": (["rules"], []),
}  # fmt: skip


def of(result: dict[str, Any]) -> tl.Run:
    """The run that a block of an answer says."""
    table = {name: {key: NONE if value is None else value for key, value in result[name].items()} for name in SECTIONS}
    return tl.load(table)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.long
def test_what_was_assumed_makes_the_same_run_when_it_is_given(capsys: pytest.CaptureFixture[str], name: str) -> None:
    verb, more = ANSWERS[name]
    words = [*verb, "gpt2", *ON, "--count", "2", "--set", "recipe.global_batch=4", *more]
    result = answer(capsys, *words)["run"]
    by_default = result.pop("assumed")
    given = {each.partition("=")[0] for each in by_default}
    assert {"recipe.seq_len", "recipe.precision"} < given
    assert ("recipe.steps" in given) is not ("recipe.tokens" in given)
    assert "recipe.global_batch" not in given
    again = answer(capsys, *words, *(word for each in by_default for word in ("--set", each)))["run"]
    assert again.pop("assumed") == []
    assert again == result
    assert (result["model"]["name"], result["cluster"]["device"], result["cluster"]["count"]) == ("gpt2", ON[1], 2)
    if name != "layouts":  # which says the run before it is spread
        assert of(result).recipe.global_batch == 4


def test_a_run_file_says_all_itself_and_its_run_can_be_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(tomli_w.dumps(ALONE))
    result = answer(capsys, "compare", str(file), "gpt2", "--set-a", "model.n_layers=6", "--set-b", "recipe.steps=9")
    assert result["run"]["a"]["assumed"] == []
    assert of(result["run"]["a"]) == tl.load(ALONE, {"model.n_layers": 6})
    assert set(result["run"]["b"]["assumed"]) == {
        "recipe.seq_len=1024", "recipe.global_batch=1", "recipe.precision=bf16-mixed",
    }  # fmt: skip
    assert of(result["run"]["b"]).recipe.total_steps == 9


def test_a_device_is_named_as_the_catalog_has_it_and_its_title_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    title = tl.device(ON[1]).title
    served = answer(capsys, "plan", "gpt2", *ON, "--phase", "decode")
    planned = answer(capsys, "plan", "gpt2", *ON)
    spread = answer(capsys, "layouts", "gpt2", *ON, "--keep", "1")
    assert served["device_title"] == planned["forecast"]["device_title"] == spread["device_title"] == title
    assert "device" not in {**served, **planned["forecast"], **spread}
    lines = [each["name"] for each in planned["device_memory"]["lines"]]
    assert [each["name"] for each in served["device_memory"]["lines"]] == lines
    assert planned["device_memory"].keys() == served["device_memory"].keys()
