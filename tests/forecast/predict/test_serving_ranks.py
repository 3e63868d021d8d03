"""A served model whose layout is to be found: the fewest tensor ranks that hold it, against each of them alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import trainledger as tl
from trainledger.answers.load import load
from trainledger.cli import main
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run


def run_of(name: str, count: int, device: str = "h100-sxm", **layout: Any) -> Run:
    recipe = {"seq_len": 4096 if name != "gpt2" else 1024, "global_batch": 1, "steps": 1}
    table = {"model": {"preset": name}, "recipe": recipe, "layout": {"auto": True, **layout}}
    return load({**table, "cluster": {"device": device, "count": count}}, search=False)


def alone(run: Run, ranks: int, **serving: Any) -> tl.Inference:
    layout = replace(run.layout, auto=False, tensor=ranks)
    return tl.inference(replace(run, layout=layout, cluster=replace(run.cluster, count=ranks)), **serving)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("name", "count", "batch"), [("llama-3-70b", 8, 1), ("llama-3-70b", 8, 100), ("llama-3-70b", 6, 4), ("gpt2", 4, 2)]
)
def test_the_fewest_ranks_that_hold_it_are_chosen(name: str, count: int, batch: int, phase: str) -> None:
    run = run_of(name, count)
    serving = {"phase": phase, "batch": batch}
    answer = tl.inference(run, **serving)
    ranks = answer.run.layout.tensor
    assert answer.fits
    assert ranks <= count
    for fewer in (each for each in (1, 2, 4, 8) if each < ranks):
        assert alone(run, fewer, **serving).fits is False
    same = alone(run, ranks, **serving)
    assert (answer.run, answer.memory, answer.time) == (same.run, same.memory, same.time)
    note = f"served on {ranks} of the {count} devices, the fewest that hold weights and cache"
    assert answer.notes[0].startswith(note)
    assert answer.notes[1:] == same.notes


def test_ranks_that_the_run_says_itself_are_kept() -> None:
    assert tl.inference(run_of("llama-3-70b", 8, tensor=8)).run.layout.tensor == 8
    assert tl.inference(run_of("gpt2", 4)).run.layout.tensor == 1
    assert not any("layout=auto" in each for each in tl.inference(run_of("gpt2", 1)).notes)


def test_what_no_ranks_hold_is_refused_with_what_they_hold() -> None:
    run = run_of("llama-3-70b", 4)
    with pytest.raises(InvalidInput) as answer:
        tl.inference(run, batch=1000)
    (problem,) = answer.value.problems
    assert (problem.field, problem.value) == ("layout", "auto")
    assert problem.rule.startswith("finds no tensor ranks on 4 devices that hold weights and cache: ")
    batch = int(str(problem.nearest).removeprefix("batch "))
    assert alone(run, 4, batch=batch).fits
    assert alone(run, 4, batch=batch + 1).fits is False
    with pytest.raises(InvalidInput, match=r"in each of 1, the most .*; nearest that works: cluster\.count=2$"):
        tl.inference(run_of("llama-3-70b", 1))


def test_the_command_line_searches_no_layout_to_train_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a search")

    monkeypatch.setattr("trainledger.answers.layout.spread", refuse)
    words = ["plan", "llama-3-70b", "--phase", "decode", "--batch", "16", "--context", "8192", "--device", "h100-sxm"]
    assert main([*words, "--full", "--count", "8", "--set", "layout=auto"]) == 0
    out, err = capsys.readouterr()
    assert "Served on 4 of the 8 devices, the fewest that hold weights and cache" in out
    assert "On 4 tensor ranks; what follows is one of them" in out
    assert err == ""
    plain = [*words, "--count", "8", "--set", "layout.tensor=8"]
    assert main(plain) == 0
    eight = capsys.readouterr().out
    assert "On 8 tensor ranks" in eight
    assert main([*plain, "--set", "layout=auto"]) == 0
    assert capsys.readouterr().out == eight


def test_a_length_that_nobody_gave_is_the_same_with_a_layout_to_be_found(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama-3.2-1b", "--phase", "decode", "--device", "h100-sxm"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "the last of 131,072" in out
    assert main([*words, "--set", "layout=auto"]) == 0
    assert capsys.readouterr().out == out
