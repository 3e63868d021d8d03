"""The drawing of a step: a lane for each stream or stage, nothing beyond its end."""

from __future__ import annotations

from trainledger.predict.rank_time import Span
from trainledger.report.step_timeline import step_timeline

SPANS = [
    Span("layers.*", "compute", 0.0, 2e-3, "forward"),
    Span("30 more of layers 1", "compute", 2e-3, 6e-2, "more"),
    Span("all_gather over shard", "communication", 0.0, 1e-3, "communication"),
    Span("layers.*", "compute", 6e-2, 8e-2, "backward"),
]


def test_every_span_is_a_bar_in_its_lane() -> None:
    figure = step_timeline(SPANS)
    assert figure is not None
    assert figure["layout"]["yaxis"]["categoryarray"] == ["communication", "compute"]
    bars = [
        (lane, round(base, 6), round(base + length, 6), trace["name"])
        for trace in figure["data"]
        for lane, base, length in zip(trace["y"], trace["base"], trace["x"], strict=True)
    ]
    assert sorted(bars) == [
        ("communication", 0.0, 1.0, "communication"), ("compute", 0.0, 2.0, "forward"),
        ("compute", 2.0, 60.0, "more rounds, alike"), ("compute", 60.0, 80.0, "backward"),
    ]  # fmt: skip
    assert figure["layout"]["xaxis"]["range"] == [0, 80.0]
    assert figure["layout"]["xaxis"]["title"]["text"] == "time (ms)"
    assert "layers.*, 20 ms" in next(each for each in figure["data"] if each["name"] == "backward")["text"]


def test_many_rounds_of_one_kind_are_paler_bars_of_that_kind() -> None:
    folded = [*SPANS, Span("30 more of layers", "compute", 8e-2, 9e-2, "more backward")]
    figure = step_timeline(folded)
    assert figure is not None
    (backward,) = (each for each in figure["data"] if each["name"] == "backward")
    assert backward["marker"]["opacity"] == [1.0, 0.5]
    assert backward["base"] == [60.0, 80.0]


def test_nothing_known_is_nothing_drawn() -> None:
    assert step_timeline([]) is None
