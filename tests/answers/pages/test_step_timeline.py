"""The drawing of a step: a lane for each stream or stage, nothing beyond its end."""

from __future__ import annotations

import pytest

from trainledger.answers.pages.plan_figures import step_timeline
from trainledger.forecast.predict.streams import Span

SPANS = [
    Span("layers.*", "compute", 0.0, 2e-3, "forward"),
    Span("30 more rounds of layers 1", "compute", 2e-3, 6e-2, "more"),
    Span("all_gather over shard", "communication", 0.0, 1e-3, "communication"),
    Span("layers.*", "compute", 6e-2, 8e-2, "backward"),
]


def test_every_span_is_a_bar_in_its_lane() -> None:
    figure = step_timeline(SPANS, 8e-2)
    assert figure is not None
    assert figure["layout"]["yaxis"]["categoryarray"] == ["communication", "compute"]
    bars = [
        (lane, round(base, 6), round(base + length, 6), trace["name"])
        for trace in figure["data"]
        if "base" in trace
        for lane, base, length in zip(trace["y"], trace["base"], trace["x"], strict=True)
    ]
    assert sorted(bars) == [
        ("communication", 0.0, 1.0, "communication"), ("compute", 0.0, 2.0, "forward"),
        ("compute", 2.0, 60.0, "more rounds, of several kinds"), ("compute", 60.0, 80.0, "backward"),
    ]  # fmt: skip
    assert figure["layout"]["xaxis"]["range"] == [0, 80.0]
    assert figure["layout"]["xaxis"]["title"]["text"] == "time (ms)"
    assert "layers.*, 20 ms" in next(each for each in figure["data"] if each["name"] == "backward")["text"]


def test_many_rounds_of_one_kind_are_paler_bars_of_that_kind() -> None:
    folded = [*SPANS, Span("30 more rounds of layers", "compute", 8e-2, 9e-2, "more backward")]
    figure = step_timeline(folded, 9e-2)
    assert figure is not None
    (backward,) = (each for each in figure["data"] if each["name"] == "backward")
    assert backward["marker"]["opacity"] == [1.0, 0.5]
    assert backward["base"] == [60.0, 80.0]


def test_nothing_known_is_nothing_drawn() -> None:
    assert step_timeline([], 1.0) is None


def test_what_paler_bars_are_stands_in_the_legend() -> None:
    def named(spans: list[Span]) -> list[str]:
        figure = step_timeline(spans, 9e-2)
        assert figure is not None
        return [each["name"] for each in figure["data"]]

    assert "paler: many rounds, alike" not in named(SPANS)
    assert "paler: many rounds, alike" in named([*SPANS, Span("30 more", "compute", 8e-2, 9e-2, "more backward")])


def test_time_that_no_span_has_is_drawn_up_to_the_end_of_the_step() -> None:
    figure = step_timeline(SPANS, 0.1)
    assert figure is not None
    assert figure["layout"]["xaxis"]["range"] == [0, 100.0]
    assert figure["layout"]["title"]["text"] == "One optimizer step: 100 ms"
    waiting = figure["data"][-1]
    assert waiting["base"] == [80.0, 80.0]  # in each lane
    assert waiting["x"] == pytest.approx([20.0, 20.0])
    assert "20 ms of waiting" in waiting["hovertemplate"]
    whole = step_timeline(SPANS, 8e-2)
    assert whole is not None
    assert "waiting" not in str([each["name"] for each in whole["data"]])
