"""The figures of a plan: what a device gives is drawn where it matters, and a step ends when the step ends."""

from __future__ import annotations

from typing import Any

import pytest

import trainledger as tl
from trainledger.answers.pages.memory import memory_chart
from trainledger.answers.pages.plan_figures import figures
from trainledger.answers.plan import about, plan
from trainledger.forecast.plan.plan import Plan
from trainledger.report.chart import Band, Bars, Chart


def _made(model: str, **recipe: Any) -> tuple[Plan, list[Chart]]:
    steps = {"seq_len": 1024, "global_batch": 1, "steps": 1, "precision": "bf16-mixed", **recipe}
    made = plan(tl.load({"model": {"preset": model}, "recipe": steps, "cluster": {"device": "h100-sxm"}}))
    return made, figures(made)


def _lines(chart: Chart) -> list[Band]:
    return [each for each in chart.marks if isinstance(each, Band) and each.axis == "y"]


def test_a_run_that_does_not_fit_is_drawn_with_what_the_device_gives() -> None:
    made, charts = _made("llama-3-8b")
    assert made.forecast.fits is False
    assert made.forecast.usable_nbytes is not None
    (line,) = _lines(charts[1])
    assert (line.start, line.text) == (made.forecast.usable_nbytes / 1e9, "85.02 GB usable")
    assert len(charts) == 3
    assert all(each.title.endswith(" (it does NOT fit)") for each in charts)
    said = about(made)
    assert "llama-3-8b: 8,030,261,248 parameters" in said[0]
    assert "A step: 1 sequence of 1,024 tokens" in said
    assert "1 x h100-sxm" in said
    assert said[-1].startswith("Memory: does NOT fit: ")
    assert " on one device with the whole model, of 85.02 GB usable; chance that it fits: " in said[-1]


def test_a_run_far_below_what_the_device_gives_has_no_line() -> None:
    made, (waterfall, memory, _) = _made("gpt2")
    assert _lines(memory) == []
    assert "NOT" not in waterfall.title + memory.title
    assert about(made)[-1].startswith("Memory: fits (chance ")


def test_a_layout_is_said() -> None:
    run = tl.load(
        {
            "model": {"preset": "gpt2"}, "recipe": {"seq_len": 1024, "global_batch": 8, "steps": 1},
            "cluster": {"device": "h100-sxm", "count": 8}, "layout": {"shard": 8},
        }
    )  # fmt: skip
    assert {"8 x h100-sxm", "Layout: shard 8"} <= set(about(plan(run)))
    for keeps, words in ((False, "kept gathered between forward and backward"), (True, "gathered again in backward")):
        other = tl.load(
            run,
            {"layout.reshard_after_forward": keeps, "model.vocab_multiple": 64, "layout.tensor": 2, "layout.shard": 4},
        )
        other = tl.load(other, {"layout.sequence_parallel": True})
        assert f"Layout: shard 4, parameters {words}, tensor 2, sequence_parallel" in about(plan(other))


def test_a_step_is_drawn_as_long_as_the_waterfall_says() -> None:
    made, (_, _, step) = _made("gpt2")
    assert made.forecast.step_seconds is not None
    bars = [each for each in step.marks if isinstance(each, Bars)]
    last = max(end for each in bars for end in each.ends)
    assert last == pytest.approx(1e3 * made.forecast.step_seconds)
    assert step.x.ends == (0, pytest.approx(last))
    # Most of a small step is waiting for the program, which no span has.
    assert bars[-1].name == "waiting, anywhere in the step"


def test_the_line_is_drawn_on_the_scale_of_the_memory() -> None:
    ledger = tl.account(
        tl.load({"model": {"preset": "gpt2"}, "recipe": {"seq_len": 64, "global_batch": 1, "steps": 1}})
    )
    peak = ledger.peak().nbytes
    for usable, drawn in ((peak // 2, True), (2 * peak, True), (3 * peak, False), (None, False)):
        chart = memory_chart(ledger, usable_nbytes=usable)
        assert len(_lines(chart)) == drawn
        assert chart.y.ends is not None
        assert all(each.start < chart.y.ends[1] for each in _lines(chart))
