"""The figures of a served model: what the table of batches says, drawn, and nothing that does not fit as if it did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import trainledger as tl
from trainledger.answers.inference import about, figures, inference
from trainledger.cli import main
from trainledger.forecast.plan.serving import Inference
from trainledger.report.chart import Band, Bars, Line


def _served(device: str = "h100-sxm", **given: Any) -> Inference:
    recipe = {"seq_len": 8192, "global_batch": 1, "steps": 1}
    run = tl.load({"model": {"preset": "llama-3-8b"}, "recipe": recipe, "cluster": {"device": device}})
    return inference(run, **{"phase": "decode", **given})


def test_times_and_rates_are_those_of_the_batches_that_fit() -> None:
    found = _served()
    latency, throughput, memory = figures(found)
    fit = [each for each in found.batches if each.fits]
    assert fit[-1].batch == found.largest_batch
    bound, expected = (each for each in latency.marks if isinstance(each, Line))
    assert [bound.name, expected.name] == ["at least, by the data sheet", "expected"]
    assert bound.xs == [each.batch for each in fit]
    assert bound.ys == pytest.approx([1e3 * each.time.bound_seconds for each in fit if each.time])
    assert all((least or 0) < (most or 0) for least, most in zip(bound.ys, expected.ys, strict=True))
    (_, curve) = (each for each in throughput.marks if isinstance(each, Line))
    for milliseconds, rate, batch in zip(curve.xs, curve.ys, bound.xs, strict=True):
        assert rate == pytest.approx(1e3 * (batch or 0) / (milliseconds or 1))
    assert memory.x.names == tuple(f"{each.batch:,}" for each in found.batches)


@pytest.mark.parametrize("given", [{}, {"weights": "int4", "batch": 3}, {"phase": "prefill", "context": 2048}])
def test_bars_add_up_to_what_each_batch_holds(given: dict[str, Any]) -> None:
    found = _served(**given)
    marks = figures(found)[-1].marks
    bars = [each for each in marks if isinstance(each, Bars)]
    assert bars[-1].ends == pytest.approx([each.device_nbytes / 1e9 for each in found.batches])
    assert all(start < end for each in bars for start, end in zip(each.starts, each.ends, strict=True))
    (line,) = (each for each in marks if isinstance(each, Band))
    assert [each > line.start for each in bars[-1].ends] == [not each.fits for each in found.batches]


def test_a_device_that_holds_no_sequence_has_a_figure_of_its_memory_alone() -> None:
    found = _served("rtx-4090", context=8192, weights="fp32", compute="fp32")
    assert found.largest_batch == 0
    assert [each.title for each in figures(found)] == ["Batch and memory: llama-3-8b"]
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
    for title in ("Batch and latency", "Latency and tokens per second", "Batch and memory"):
        assert f"{title}: llama-3-8b" in written
