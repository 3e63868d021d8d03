"""Drawings are true: read back by their ticks, bars and points have the values of the figure."""

from __future__ import annotations

from itertools import pairwise
from math import log10
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trainledger as tl
from drawn import Drawn, corners, number
from trainledger.answers.pages.fit import figures as figures_of_a_fit
from trainledger.answers.pages.memory import memory_figure, memory_lanes
from trainledger.answers.pages.plan_figures import figures as figures_of_a_plan
from trainledger.report.document import Figure
from trainledger.report.style import arranged, bar_figure, bars, mark, points
from trainledger.report.svg import STYLE, svg
from trainledger.report.svg.axes import Axis
from trainledger.report.svg.curves import thinned
from trainledger.report.svg.hovers import hover_of
from trainledger.report.svg.paint import paint
from trainledger.report.svg.ticks import linear_ticks, log_ticks

RUN: dict[str, Any] = {
    "model": {"preset": "gpt2"}, "cluster": {"device": "h100-sxm"},
    "recipe": {"seq_len": 512, "global_batch": 4, "steps": 1, "precision": "bf16-mixed"},
}  # fmt: skip
EVIL = """</svg><script>alert("1")</script> & 'x' <img src="http://elsewhere.test/">"""


def _scatter(x: list[Any], y: list[Any], mode: str = "markers", **axes: dict[str, Any]) -> Figure:
    layout = arranged("Dots", "x", "y")
    for name, own in axes.items():
        layout[name] |= own
    return {"data": [points("dots", x, y, mode)], "layout": layout}


# Bars


@pytest.mark.parametrize("width", [960, 380])
def test_the_bars_of_a_waterfall_begin_where_the_one_before_ended(width: int) -> None:
    plan = tl.plan(RUN)
    figure = next(iter(figures_of_a_plan(plan).values()))
    drawn = Drawn(svg(figure, width))
    seconds, boxes = drawn.scale("x"), sorted(drawn.boxes, key=lambda each: each.y)
    assert plan.forecast.waterfall is not None
    causes = [each for each in plan.forecast.waterfall if each.nanoseconds]
    assert [each.said.split(":")[0] for each in boxes] == [*(each.cause for each in causes), "in all"]
    unit = 1e-3 if "milliseconds" in drawn.words else 1.0
    end = 0.0
    for box, cause in zip(boxes, causes, strict=False):
        start, end = end, end + cause.seconds / unit
        assert seconds.value(box.x) == pytest.approx(min(start, end), abs=seconds.pixel)
        assert seconds.value(box.right) == pytest.approx(max(start, end), abs=seconds.pixel)
    assert seconds.value(boxes[-1].right) == pytest.approx(end, abs=seconds.pixel)
    for above, below in pairwise(boxes):
        assert above.bottom < below.y


def test_stacked_bars_add_up_to_what_is_needed() -> None:
    fit = tl.fit(RUN, of="memory")
    drawn = Drawn(svg(figures_of_a_fit(fit)["memory"]))
    scale = drawn.scale("x")
    rows: dict[float, list[Any]] = {}
    for each in drawn.boxes:
        rows.setdefault(each.y, []).append(each)
    needed = [row.answers["memory"].memory.nbytes / 1e9 for row in fit.rows]
    assert len(rows) == len(needed)
    for y, nbytes in zip(sorted(rows), needed, strict=True):
        assert scale.value(max(each.right for each in rows[y])) == pytest.approx(nbytes, abs=scale.pixel)
        in_order = sorted(rows[y], key=lambda each: each.right)
        assert all(before.right == pytest.approx(after.x, abs=0.6) for before, after in pairwise(in_order))


def test_bars_beside_each_other_do_not_touch_those_of_another_row() -> None:
    data = [bars(name, ["a", "b"], values, colour, "%{x}") for name, values, colour in
            (("one", [3, 1], "#0072B2"), ("two", [2, 4], "#E69F00"))]  # fmt: skip
    drawn = Drawn(svg(bar_figure("Pairs", "GB", ["a", "b"], data, barmode="group")))
    scale = drawn.scale("x")
    in_order = sorted(drawn.boxes, key=lambda each: each.y)
    assert [round(scale.value(each.right), 1) for each in in_order] == [3, 2, 1, 4]
    assert all(above.bottom <= below.y + 0.2 for above, below in pairwise(in_order))


def test_upright_bars_are_stacked_from_zero_up() -> None:
    data: list[dict[str, Any]] = [
        {"type": "bar", "name": name, "x": ["1", "64"], "y": values}
        for name, values in (("weights", [3, 3]), ("cache", [1, 5]))
    ]
    drawn = Drawn(svg({"data": data, "layout": arranged("", "batch", "GB", barmode="stack")}))
    scale = drawn.scale("y")
    assert [(round(scale.value(each.y), 1), round(scale.value(each.bottom), 1)) for each in drawn.boxes] == [
        (3, 0), (3, 0), (4, 3), (8, 3),
    ]  # fmt: skip
    assert [words for words, _ in drawn.ticks("x")] == ["1", "64"]
    below_zero = Drawn(svg({"data": [data[0] | {"y": [-2, 2]}], "layout": arranged()}))
    low, high = below_zero.boxes
    assert low.y == pytest.approx(high.bottom, abs=0.2)


def test_a_bar_has_the_place_and_the_paleness_it_is_given() -> None:
    span = {
        "type": "bar", "orientation": "h", "base": [0, 3], "x": [2, 1], "y": ["compute", "network"], "name": "spans",
        "marker": {"color": "#0072B2", "opacity": [1.0, 0.5]}, "text": ["first", "second"], "textposition": "none",
        "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip
    layout = arranged("", "s", barmode="overlay")
    layout["xaxis"]["range"] = [0, 4]
    drawn = Drawn(svg({"data": [span], "layout": layout}))
    scale = drawn.scale("x")
    assert [(round(scale.value(each.x), 2), round(scale.value(each.right), 2), each.said) for each in drawn.boxes] == [
        (0, 2, "first"), (3, 4, "second"),
    ]  # fmt: skip
    assert [style.get("fill-opacity") for each, style in drawn.of("rect") if len(each)] == [None, "0.5"]


def test_many_narrow_bars_are_one_where_no_eye_tells_them_apart() -> None:
    many = 20_000
    span = {"type": "bar", "orientation": "h", "base": list(range(many)), "x": [1] * many, "y": ["compute"] * many}
    drawn = Drawn(svg({"data": [span], "layout": arranged("", "s", barmode="overlay")}))
    assert len(drawn.boxes) < 2000
    scale = drawn.scale("x")
    assert scale.value(min(each.x for each in drawn.boxes)) == pytest.approx(0, abs=scale.pixel)
    assert scale.value(max(each.right for each in drawn.boxes)) == pytest.approx(many, abs=scale.pixel)
    assert sum(each.width for each in drawn.boxes) * scale.pixel == pytest.approx(many, rel=0.05)
    assert "more that are as narrow" in drawn.boxes[0].said


def test_a_histogram_counts_every_value_once() -> None:
    values = [0.5 + 0.001 * (at % 37) for at in range(1000)]
    figure = {"data": [{"type": "histogram", "x": values, "nbinsx": 60}], "layout": arranged("", "s", "steps")}
    drawn = Drawn(svg(figure))
    scale = drawn.scale("y")
    counted = sum(round(scale.value(each.y)) for each in drawn.boxes)
    assert counted == pytest.approx(len(values), rel=0.01)
    assert sum(int(each.said.rpartition(": ")[2]) for each in drawn.boxes) == len(values)


# Lines, areas, points


def test_areas_of_memory_reach_the_peak() -> None:
    ledger = tl.account(tl.load(RUN))
    drawn = Drawn(svg(memory_figure(ledger)))
    scale = drawn.scale("y")
    (line,) = drawn.paths(stroke="#222222")[:1]
    peak = ledger.peak().nbytes
    unit = 1e9 if peak >= 1e9 else 1e6
    assert scale.value(min(y for _, y in line)) == pytest.approx(peak / unit, abs=scale.pixel)
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    areas = [
        drawn.paths(fill=colour) for colour in ("#0072B2", "#CC79A7", "#56B4E9")
    ]  # parameters, states, activations
    tops = [scale.value(min(y for _, y in found[0])) for found in areas]
    assert tops == sorted(tops)
    parameters = ledger.parameters * 4 / unit
    assert tops[0] == pytest.approx(parameters, abs=2 * scale.pixel)
    every = [
        corners(style["d"]) for _, style in drawn.of("path") if style["fill"] != "none" and "transform" not in style
    ]  # fmt: skip
    assert scale.value(min(y for each in every for _, y in each)) == pytest.approx(peak / unit, abs=scale.pixel)
    for found in areas:
        assert scale.value(max(y for _, y in found[0])) == pytest.approx(0, abs=scale.pixel)


def test_plots_stand_above_each_other_on_one_scale() -> None:
    ledger = tl.account(tl.load(RUN))
    drawn = Drawn(svg(memory_lanes([("predicted", ledger), ("measured", ledger)])))
    first, second = drawn.scale("y", 0), drawn.scale("y", 1)
    assert first.pixel == pytest.approx(second.pixel)
    assert first.low < second.high
    peaks = [min(y for _, y in each) for each in drawn.paths(stroke="#222222") if len(each) > 50]
    assert first.value(peaks[0]) == pytest.approx(second.value(peaks[1]), abs=first.pixel)
    assert peaks[0] < first.low < peaks[1]


def test_points_are_at_their_values_and_in_order() -> None:
    x, y = [1.0, 2.5, 4.0, 9.0], [10.0, -5.0, 0.0, 7.5]
    drawn = Drawn(svg(_scatter(x, y)))
    across, up = drawn.scale("x"), drawn.scale("y")
    assert [across.value(each[0]) for each in drawn.symbols] == pytest.approx(x, abs=across.pixel)
    assert [up.value(each[1]) for each in drawn.symbols] == pytest.approx(y, abs=up.pixel)
    assert drawn.symbols[1][2] == "dots\nx: 2.5\ny: -5"


def test_ticks_of_a_logarithmic_axis_are_as_far_apart_as_their_powers() -> None:
    x = [1e6, 3e7, 1e9, 1e12]
    drawn = Drawn(svg(_scatter(x, [1, 2, 3, 4], xaxis={"type": "log", "dtick": 1})))
    ticks = [(log10(number(words)), pixel) for words, pixel in drawn.ticks("x")]
    assert [words for words, _ in drawn.ticks("x")][:2] == ["1M", "10M"]
    (low, start), (high, end) = ticks[0], ticks[-1]
    for power, pixel in ticks:
        assert pixel == pytest.approx(start + (power - low) / (high - low) * (end - start), abs=0.2)
    found = [low + (pixel - start) / (end - start) * (high - low) for pixel, _, _ in drawn.symbols]
    assert found == pytest.approx([log10(each) for each in x], abs=0.01)


def test_a_reversed_axis_of_names_begins_at_the_top() -> None:
    figure = _scatter([1, 2, 3], ["first", "second", "third"], yaxis={"autorange": "reversed", "type": "category"})
    places = dict(Drawn(svg(figure)).ticks("y"))
    assert places["first"] < places["second"] < places["third"]
    upwards = dict(Drawn(svg(_scatter([1, 2, 3], ["first", "second", "third"]))).ticks("y"))
    assert upwards["first"] > upwards["second"] > upwards["third"]


def test_a_line_of_many_points_keeps_its_extremes() -> None:
    steps = list(range(20_000))
    losses = [3.0 + 0.1 * (at % 7) for at in steps]
    losses[7777], losses[12_345] = 9.0, 1.0
    text = svg(_scatter(steps, losses, "lines"))
    assert len(text) < 100_000
    drawn = Drawn(text)
    (line,) = drawn.paths(stroke="#0072B2")
    across, up = drawn.scale("x"), drawn.scale("y")
    highest, lowest = min(line, key=lambda each: each[1]), max(line, key=lambda each: each[1])
    assert (up.value(highest[1]), up.value(lowest[1])) == pytest.approx((9.0, 1.0), abs=2 * up.pixel)
    assert across.value(highest[0]) == pytest.approx(7777, abs=2 * across.pixel)
    assert across.value(lowest[0]) == pytest.approx(12_345, abs=2 * across.pixel)
    assert any("9" in each for each in drawn.titles("rect"))  # a strip says the highest of its points


@settings(
    max_examples=25, suppress_health_check=[HealthCheck.large_base_example]
)  # what is thinned has hundreds of points
@given(st.lists(st.tuples(st.floats(0, 40), st.floats(-1e6, 1e6)), min_size=301, max_size=600))
def test_thinning_loses_no_extreme_of_a_column(drawn: list[tuple[float, float]]) -> None:
    many = sorted(drawn, key=lambda each: each[0])
    kept = thinned(many)
    assert set(kept) <= set(many)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    assert (kept[0], kept[-1]) == (many[0], many[-1])
    for column in {int(x) for x, _ in many}:
        all_of_it, of_it = ([y for x, y in some if int(x) == column] for some in (many, kept))
        assert (min(of_it), max(of_it)) == (min(all_of_it), max(all_of_it))
        assert len(of_it) <= 4


def test_many_points_on_one_pixel_are_one() -> None:
    places = [at // 100 for at in range(5000)]
    assert len(Drawn(svg(_scatter(places, places))).symbols) == 50


def test_a_missing_value_breaks_a_line_and_an_edge_cuts_it() -> None:
    (first, second) = _lines([0, 1, 2, 3, 4], [1.0, 2.0, None, 3.0, 2.0])
    assert (len(first), len(second)) == (2, 2)
    (line,) = _lines([0, 1, 2], [0.0, 10.0, 0.0], yaxis={"range": [0, 5]}, split=False)
    assert len(set(line)) == 4  # up to the edge, and down from it
    assert len({y for _, y in line}) == 2
    assert _lines([0, 1], [7.0, 8.0], yaxis={"range": [0, 5]}) == []


def test_an_area_that_is_higher_than_its_plot_fills_it() -> None:
    layout = arranged()
    layout["yaxis"]["range"] = [0, 2]
    area = points("area", [0, 1, 2, 3], [1.0, 9.0, 9.0, 1.0], "lines", stackgroup="one", line={"color": "#0072B2"})
    drawn = Drawn(svg({"data": [area], "layout": layout}))
    ((*top, _, _),) = drawn.paths(fill="#0072B2")
    assert [drawn.scale("y").value(y) for _, y in top] == pytest.approx([1, 2, 2, 1], abs=0.02)


def _lines(x: list[Any], y: list[Any], split: bool = True, **axes: dict[str, Any]) -> list[list[tuple[float, float]]]:
    drawn = Drawn(svg(_scatter(x, y, "lines", **axes)))
    found = []
    for _, style in drawn.of("path"):
        for part in style["d"].split("M")[1:] if split else [style["d"][1:]]:
            found.append(corners(f"M{part}"))
    return found


def test_what_is_zero_has_no_place_on_a_logarithmic_axis() -> None:
    drawn = Drawn(svg(_scatter([0, 10, 100], [1, 2, 3], xaxis={"type": "log"})))
    assert len(drawn.symbols) == 2


def test_a_figure_of_nothing_is_a_frame() -> None:
    drawn = Drawn(svg({"data": [], "layout": arranged("Nothing", "x", "y")}))
    assert drawn.root.get("aria-label") == "Nothing"
    assert {"x", "y"} <= set(drawn.words)


# Words


def test_text_of_a_figure_cannot_become_markup() -> None:
    data = [
        points(EVIL, [1], [2], "markers+text", text=[EVIL], hovertemplate=EVIL + "%{customdata}", customdata=[EVIL]),
        points("other", [1], [3], marker={"color": '"/><script>'}),
    ]
    layout = arranged(EVIL, EVIL, EVIL, annotations=[{"x": 1, "y": 2, "text": EVIL}])
    figures = [
        {"data": data, "layout": layout},
        bar_figure(EVIL, EVIL, [EVIL], [bars(EVIL, [EVIL], [1], "#fff", "%{y}")]),
    ]
    for figure in figures:
        text = svg(figure)
        drawn = Drawn(text)
        assert {each.tag.rpartition("}")[2] for each in drawn.root.iter()}.isdisjoint({"script", "img"})
        assert "<script" not in text
        assert drawn.root.get("aria-label") == EVIL
        assert any("alert" in each for each in drawn.words)


def test_words_at_one_place_give_way_to_each_other() -> None:
    figure = _scatter([1, 1.001, 1.002, 5], [1, 1.001, 1, 5], "markers+text")
    figure["data"][0] |= {"text": ["first", "second", "third", "far"], "textposition": "top center"}
    drawn = Drawn(svg(figure))
    places = {
        each.text: (float(style["x"]), float(style["y"])) for each, style in drawn.of("text")
        if each.text in ("first", "second", "third")
    }  # fmt: skip
    for name, (x, y) in places.items():
        for other, (a, b) in places.items():
            assert name == other or abs(y - b) >= 11 or abs(x - a) > 25


def test_a_mark_says_its_value_where_there_is_room() -> None:
    for at in (1.0, 99.0):
        figure = _scatter([0, 100], [0, 1], xaxis={"range": [0, 100]})
        mark(figure["layout"], "v", at, "85 GB usable")
        drawn = Drawn(svg(figure, 380))
        (words,) = [style for each, style in drawn.of("text") if each.text == "85 GB usable"]
        line = next(style for _, style in drawn.of("line") if "stroke-dasharray" in style)
        assert drawn.scale("x").value(float(line["x1"])) == pytest.approx(at, abs=1)
        assert 0 < float(words["x"]) < 300
        assert (float(words["x"]) > float(line["x1"])) == (at < 50)


def test_a_place_of_words_on_a_logarithmic_axis_is_a_power_and_that_of_a_line_a_value() -> None:
    figure = _scatter([1, 1000], [0, 1], xaxis={"type": "log"})
    figure["layout"]["annotations"] = [{"x": 2, "y": 0.5, "text": "here", "showarrow": False, "xanchor": "left"}]
    figure["layout"]["shapes"] = [{"type": "line", "x0": 100, "x1": 100, "y0": 0, "y1": 1, "line": {"dash": "dash"}}]
    drawn = Drawn(svg(figure))
    (words,) = [float(style["x"]) for each, style in drawn.of("text") if each.text == "here"]
    (line,) = [float(style["x1"]) for _, style in drawn.of("line") if "stroke-dasharray" in style]
    hundred = dict(drawn.ticks("x"))["100"]
    assert (words, line) == pytest.approx((hundred, hundred), abs=0.2)


def test_long_names_of_rows_take_several_lines_and_keep_off_the_bars() -> None:
    long = "an operation with a very long name, " * 4 + "that a telephone cannot show in one line"
    figure = bar_figure("Rows", "GB", [long, long + "."], [bars("", [long, long + "."], [1, 2], "#0072B2", "%{x}")])
    broad, narrow = Drawn(svg(figure, 960)), Drawn(svg(figure, 380))
    assert narrow.height > broad.height
    for drawn in (broad, narrow):
        assert long in drawn.words
        lines = [
            (float(style["y"]) + float(span.get("dy", 0)) * at)
            for each, style in drawn.of("text") if "telephone" in "".join(each.itertext())
            for at, span in enumerate(list(each) or [each])
        ]  # fmt: skip
        assert min(lines) > 10
        for y in lines:
            assert not any(box.y < y - 9 and y < box.bottom + 9 for box in drawn.boxes)


def test_a_legend_takes_the_lines_it_needs() -> None:
    data = [points(f"one long name, number {at}", [1, 2], [1, at]) for at in range(9)]
    broad, narrow = (Drawn(svg({"data": data, "layout": arranged("", "x", "y")}, width)) for width in (960, 380))
    heights = [each.ticks("y")[0][1] - each.ticks("y")[-1][1] for each in (broad, narrow)]
    assert heights[0] == pytest.approx(heights[1])  # the plot is as high
    assert narrow.height > broad.height
    for drawn in (broad, narrow):
        rows = {style["y"] for each, style in drawn.of("text") if (each.text or "").startswith("one long")}
        assert len(rows) == (2 if drawn is broad else 5)


def test_what_a_point_says_is_its_template() -> None:
    trace = {
        "x": [1235.7], "y": [2], "customdata": [["a", 7]], "text": ["t<b>x</b>"], "name": "n",
        "hovertemplate": "<b>%{customdata[0]}</b><br>%{customdata[1]}: %{x:,.4g} of %{y} %{text}",
    }  # fmt: skip
    assert hover_of(trace)(0) == "n: a\n7: 1,236 of 2 tx"
    assert hover_of(trace | {"hoverinfo": "skip"})(0) == ""
    assert hover_of({"x": [8_030_261_248], "y": [0.5], "name": "n"}, ("parameters", "loss"))(0) == (
        "n\nparameters: 8,030,261,248\nloss: 0.5"
    )


def test_dark_pages_have_a_colour_for_every_class() -> None:
    for colour in ("#222222", "#555", "#e4e4e4", "#0072B2", "#000000", "white", "rgba(0,114,178,0.18)"):
        for name in str(paint(colour, colour)["class_"]).split():
            assert f".{name}{{" in STYLE
    assert paint("rgba(0,114,178,0.18)") == {"fill": "#0072b2", "fill_opacity": "0.18", "class_": "c0"}


# Ticks


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 12))
def test_linear_ticks_are_round_and_even(low: float, length: float, most: int) -> None:
    high = low + length
    ticks = linear_ticks(low, high, most)
    assert len(ticks) <= most + 2
    steps = [after - before for before, after in pairwise(ticks)]
    room = 1e-6 * max(abs(low), abs(high), length)
    assert all(low - room <= each <= high + room for each in ticks)
    assert all(step == pytest.approx(steps[0], rel=1e-6, abs=room) for step in steps)


@given(st.floats(-12, 24), st.floats(0.1, 20))
def test_logarithmic_ticks_are_within_their_axis(low: float, decades: float) -> None:
    ticks = log_ticks(low, low + decades)
    assert ticks == sorted(set(ticks))
    assert len(ticks) >= (2 if decades > 0.8 else 0)
    axis = Axis("log", low, low + decades, start=0, end=100)
    assert all(-0.01 <= (axis.at(each) or 0) <= 100.01 for each in ticks)
