"""The drawing of a step: a lane for each stream or stage, nothing beyond its end."""

from __future__ import annotations

from trainledger.answers.pages.plan_figures import step_timeline
from trainledger.forecast.predict.streams import Span
from trainledger.report.chart import Bars, Chart

SPANS = [
    Span("layers.*", "compute", 0.0, 2e-3, "forward"),
    Span("30 more rounds of layers 1", "compute", 2e-3, 6e-2, "more"),
    Span("all_gather over shard", "communication", 0.0, 1e-3, "communication"),
    Span("layers.*", "compute", 6e-2, 8e-2, "backward"),
]


def _bars(chart: Chart | None) -> list[Bars]:
    assert chart is not None
    return [each for each in chart.marks if isinstance(each, Bars)]


def test_every_span_is_a_bar_in_its_lane() -> None:
    chart = step_timeline(SPANS, 8e-2)
    assert chart is not None
    assert (chart.y.names, chart.x.ends, chart.x.title) == (("compute", "communication"), (0, 80.0), "time (ms)")
    bars = [
        (chart.y.names[int(row)], round(start, 6), round(end, 6), mark.name)
        for mark in _bars(chart)
        for row, start, end in zip(mark.rows, mark.starts, mark.ends, strict=True)
    ]
    assert sorted(bars) == [
        ("communication", 0.0, 1.0, "communication"), ("compute", 0.0, 2.0, "forward"),
        ("compute", 2.0, 60.0, "more rounds, of several kinds"), ("compute", 60.0, 80.0, "backward"),
    ]  # fmt: skip
    (backward,) = (each for each in _bars(chart) if each.name == "backward")
    assert backward.said == ["layers.*, 20 ms"]


def test_many_rounds_of_one_kind_are_paler_bars_of_that_kind() -> None:
    folded = [*SPANS, Span("30 more rounds of layers", "compute", 8e-2, 9e-2, "more backward")]
    full, pale = (each for each in _bars(step_timeline(folded, 9e-2)) if each.name == "backward")
    assert (full.opacity, full.starts, pale.opacity, pale.starts) == (1.0, [60.0], 0.5, [80.0])
    assert "paler: many rounds, alike" in [each.name for each in _bars(step_timeline(folded, 9e-2))]
    assert "paler: many rounds, alike" not in [each.name for each in _bars(step_timeline(SPANS[:1], 9e-2))]


def test_nothing_known_is_nothing_drawn() -> None:
    assert step_timeline([], 1.0) is None


def test_time_that_no_span_has_is_drawn_up_to_the_end_of_the_step() -> None:
    chart = step_timeline(SPANS, 0.1)
    assert chart is not None
    assert (chart.x.ends, chart.title) == ((0, 100.0), "One optimizer step: 100 ms")
    waiting = _bars(chart)[-1]
    assert (waiting.starts, waiting.ends) == ([80.0, 80.0], [100.0, 100.0])  # in each lane
    assert waiting.said is not None
    assert "20 ms of waiting" in waiting.said[0]
    assert "waiting" not in str([each.name for each in _bars(step_timeline(SPANS, 8e-2))])
