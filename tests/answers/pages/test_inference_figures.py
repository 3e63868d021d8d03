"""The figures of a served model: what the table of batches says, drawn, and nothing that does not fit as if it did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import trainledger as tl
from trainledger.answers.pages.serving import about, figures
from trainledger.answers.questions import inference
from trainledger.cli import main
from trainledger.forecast.plan.serving import Inference


def _served(device: str = "h100-sxm", **given: Any) -> Inference:
    recipe = {"seq_len": 8192, "global_batch": 1, "steps": 1}
    run = tl.load({"model": {"preset": "llama-3-8b"}, "recipe": recipe, "cluster": {"device": device}})
    return inference(run, **{"phase": "decode", **given})


def test_times_and_rates_are_those_of_the_batches_that_fit() -> None:
    found = _served()
    latency, throughput, memory = figures(found).values()
    fit = [each for each in found.batches if each.fits]
    assert fit[-1].batch == found.largest_batch
    for bound, expected in (latency["data"], throughput["data"]):
        assert [bound["name"], expected["name"]] == ["at least, by the data sheet", "expected"]
    bound, expected = latency["data"]
    assert bound["x"] == [each.batch for each in fit]
    assert bound["y"] == pytest.approx([1e3 * each.time.bound_seconds for each in fit if each.time])
    assert all(least < most for least, most in zip(bound["y"], expected["y"], strict=True))
    for milliseconds, rate, batch in zip(*(throughput["data"][1][name] for name in "xy"), bound["x"], strict=True):
        assert rate == pytest.approx(1e3 * batch / milliseconds)
    assert memory["data"][0]["x"] == [f"{each.batch:,}" for each in found.batches]


@pytest.mark.parametrize("given", [{}, {"weights": "int4", "batch": 3}, {"phase": "prefill", "context": 2048}])
def test_bars_add_up_to_what_each_batch_holds(given: dict[str, Any]) -> None:
    found = _served(**given)
    figure = figures(found)["Batch and memory"]
    held = [sum(parts) for parts in zip(*(each["y"] for each in figure["data"]), strict=True)]
    assert held == pytest.approx([each.device_nbytes / 1e9 for each in found.batches])
    assert min(min(each["y"]) for each in figure["data"]) > 0
    over = [each > figure["layout"]["shapes"][0]["y0"] for each in held]
    assert over == [not each.fits for each in found.batches]


def test_a_device_that_holds_no_sequence_has_a_figure_of_its_memory_alone() -> None:
    found = _served("rtx-4090", context=8192, weights="fp32", compute="fp32")
    assert found.largest_batch == 0
    assert list(figures(found)) == ["Batch and memory"]
    assert about(found)[-1] == "Not even one sequence fits."


def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "served.html"
    words = ["plan", "llama-3-8b", "--phase", "decode", "--device", "h100-sxm", "--plot", str(page)]
    assert main([*words, "--json"]) == 0
    captured = capsys.readouterr()
    assert str(page) in captured.err.replace("\n", "")
    written = page.read_text(encoding="utf-8")
    largest = json.loads(captured.out)["largest_batch"]
    assert f"The largest batch that fits is {largest:,}." in written
    for title in ("one token of each sequence", "each point a batch", "memory"):
        assert f"llama-3-8b: {title}" in written
