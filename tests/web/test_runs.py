"""The runs of a directory, with files as training writes them."""

import json
import time
from pathlib import Path

import pytest

from trainledger.spec.problem import InvalidInput
from trainledger.web import answers
from trainledger.web.calculators.runs import runs_in


def written(folder: Path, name: str, *, steps: int, state: str = "finished") -> Path:
    run = folder / name
    run.mkdir(parents=True)
    lines = [
        {"step": at, "loss": 9.0 / at, "tokens": 1000 * at, "seconds": 0.5, "time": time.time()}
        for at in range(1, steps + 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    (run / "state.json").write_text(json.dumps({"state": state}))
    return run


def test_the_newest_run_is_shown_and_the_others_are_choices(tmp_path: Path) -> None:
    written(tmp_path, "first", steps=3)
    written(tmp_path, "second", steps=20)
    calculators = {"runs": runs_in(tmp_path)}
    seen = answers.view("runs", {}, calculators=calculators)
    assert seen["verdict"] == "second: finished, step 20, loss 0.450"
    assert [name for name, _ in seen["choices"]["name"]] == ["second", "first"]
    assert [each["title"] for each in seen["drawings"]][:2] == ["Loss", "Time of each step"]
    assert seen["again_seconds"] == 3
    first = answers.view("runs", {"name": "first"}, calculators=calculators)
    assert first["verdict"].startswith("first: finished, step 3")


def test_a_step_that_is_added_is_in_the_next_answer(tmp_path: Path) -> None:
    run = written(tmp_path, "grows", steps=3)
    calculators = {"runs": runs_in(tmp_path)}
    before = answers.answer("runs", {}, calculators=calculators)
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 4, "loss": 1.5, "tokens": 4000, "seconds": 0.5, "time": time.time()}) + "\n")
    after = answers.answer("runs", {}, calculators=calculators)
    assert "step 3" in before["verdict"]
    assert "step 4" in after["verdict"]


@pytest.mark.parametrize("name", ["../first", "/etc", "firts", "first/../first"])
def test_a_name_is_looked_up_in_the_listing_and_never_a_path(tmp_path: Path, name: str) -> None:
    written(tmp_path, "first", steps=1)
    with pytest.raises(InvalidInput, match="is no run of"):
        answers.view("runs", {"name": name}, calculators={"runs": runs_in(tmp_path)})


def test_no_runs_is_an_answer(tmp_path: Path) -> None:
    seen = answers.view("runs", {}, calculators={"runs": runs_in(tmp_path / "none")})
    assert seen["verdict"] == "No runs in none."


def test_runs_have_no_exercises(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="has no exercises; nearest that works: time"):
        answers.check("runs", 3, "1", 0, calculators={"runs": runs_in(tmp_path)})
