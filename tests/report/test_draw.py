"""Drawings are true: read back by their ticks, bars, lines and points have the values of the chart."""

from itertools import pairwise
from math import log10
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trainledger as tl
from drawn import Drawn, corners, number
from trainledger.answers.pages.memory import memory_chart
from trainledger.answers.pages.plan_figures import figures as figures_of_a_plan
from trainledger.report.chart import COLOURS, Area, Axis, Band, Bars, Chart, Line, Mark, bar_chart, beside, stacked
from trainledger.report.draw.chart import standalone, svg
from trainledger.report.draw.elements import STYLE, paint
from trainledger.report.draw.marks import thinned
from trainledger.report.draw.scale import Scale, linear_ticks, log_ticks

RUN: dict[str, Any] = {
    "model": {"preset": "gpt2"}, "cluster": {"device": "h100-sxm"},
    "recipe": {"seq_len": 512, "global_batch": 4, "steps": 1, "precision": "bf16-mixed"},
}  # fmt: skip
EVIL = """</svg><script>alert("1")</script> & 'x' <img src="http://elsewhere.test/">"""


def _chart(*marks: Mark, x: Axis = Axis("x"), y: Axis = Axis("y"), **more: Any) -> Chart:  # noqa: B008
    return Chart("Dots", marks, x, y, **more)


def _dots(xs: Any, ys: Any, **more: Any) -> Line:
    return Line(xs, ys, "dots", width=0, symbol="circle", **more)


# Bars


@pytest.mark.parametrize("width", [960, 380])
def test_the_bars_of_a_waterfall_begin_where_the_one_before_ended(width: int) -> None:
    plan = tl.plan(RUN)
    drawn = Drawn(svg(figures_of_a_plan(plan)[0], width))
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


def test_stacked_bars_touch_and_bars_beside_each_other_do_not_reach_another_row() -> None:
    parts = {"one": [3, 1], "two": [2, 4]}
    drawn = Drawn(svg(bar_chart("Sums", "GB", ["a", "b"], stacked(parts, {}, lambda name, row: f"{name} {row}"))))
    scale = drawn.scale("x")
    ends = {each.said: (round(scale.value(each.x), 1), round(scale.value(each.right), 1)) for each in drawn.boxes}
    assert ends == {"one 0": (0, 3), "one 1": (0, 1), "two 0": (3, 5), "two 1": (1, 5)}
    pairs = Drawn(svg(bar_chart("Pairs", "GB", ["a", "b"], beside(parts, lambda name, row: f"{name} {row}"))))
    in_order = sorted(pairs.boxes, key=lambda each: each.y)
    assert [round(pairs.scale("x").value(each.right), 1) for each in in_order] == [3, 2, 1, 4]
    assert all(above.bottom <= below.y + 0.2 for above, below in pairwise(in_order))


def test_upright_bars_are_stacked_from_zero_up() -> None:
    parts = {"weights": [3, 3], "cache": [1, 5]}
    bars = stacked(parts, {}, lambda name, row: name, upright=True)
    drawn = Drawn(svg(_chart(*bars, x=Axis(names=("1", "64")), y=Axis("GB"))))
    scale = drawn.scale("y")
    assert [(round(scale.value(each.y), 1), round(scale.value(each.bottom), 1)) for each in drawn.boxes] == [
        (3, 0), (3, 0), (4, 3), (8, 3),
    ]  # fmt: skip
    assert [words for words, _ in drawn.ticks("x")] == ["1", "64"]


def test_many_narrow_bars_are_one_where_no_eye_tells_them_apart() -> None:
    many = 20_000
    bars = Bars([0] * many, range(many), range(1, many + 1))
    drawn = Drawn(svg(_chart(bars, x=Axis("s"), y=Axis(names=("compute",)))))
    assert len(drawn.boxes) < 2000
    scale = drawn.scale("x")
    assert scale.value(min(each.x for each in drawn.boxes)) == pytest.approx(0, abs=scale.pixel)
    assert scale.value(max(each.right for each in drawn.boxes)) == pytest.approx(many, abs=scale.pixel)
    assert sum(each.width for each in drawn.boxes) * scale.pixel == pytest.approx(many, rel=0.05)
    assert "more that are as narrow" in drawn.boxes[0].said


def test_names_of_lanes_and_columns_begin_at_the_top_and_at_the_left() -> None:
    names = ("first", "second", "third")
    places = dict(Drawn(svg(_chart(_dots([1, 2, 3], [0, 1, 2]), y=Axis(names=names)))).ticks("y"))
    assert places["first"] < places["second"] < places["third"]
    across = dict(Drawn(svg(_chart(_dots([0, 1, 2], [1, 2, 3]), x=Axis(names=names)))).ticks("x"))
    assert across["first"] < across["second"] < across["third"]


def test_long_names_of_rows_take_several_lines_and_keep_off_the_bars() -> None:
    long = "an operation with a very long name, " * 4 + "that a telephone cannot show in one line"
    chart = bar_chart("Rows", "GB", [long, long + "."], [Bars([0, 1], [0, 0], [1, 2])])
    broad, narrow = Drawn(svg(chart, 960)), Drawn(svg(chart, 380))
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


# Lines, areas, points


def test_areas_of_memory_reach_the_peak() -> None:
    ledger = tl.account(tl.load(RUN))
    drawn = Drawn(svg(memory_chart(ledger)))
    scale = drawn.scale("y")
    (line,) = drawn.paths(stroke="#222222")[:1]
    peak = ledger.peak().nbytes
    unit = 1e9 if peak >= 1e9 else 1e6
    assert scale.value(min(y for _, y in line)) == pytest.approx(peak / unit, abs=scale.pixel)
    assert [x for x, _ in line] == sorted(x for x, _ in line)
    # Parameters, states and activations.
    areas = [drawn.paths(fill=colour)[0] for colour in (COLOURS[0], COLOURS[3], COLOURS[4])]
    tops = [scale.value(min(y for _, y in found)) for found in areas]
    assert tops == sorted(tops)
    assert tops[0] == pytest.approx(ledger.parameters * 4 / unit, abs=2 * scale.pixel)
    for found in areas:
        assert scale.value(max(y for _, y in found)) == pytest.approx(0, abs=scale.pixel)


def test_points_are_at_their_values_and_say_them() -> None:
    xs, ys = [1.0, 2.5, 4.0, 9.0], [10.0, -5.0, 0.0, 7.5]
    drawn = Drawn(svg(_chart(_dots(xs, ys))))
    across, up = drawn.scale("x"), drawn.scale("y")
    assert [across.value(each[0]) for each in drawn.symbols] == pytest.approx(xs, abs=across.pixel)
    assert [up.value(each[1]) for each in drawn.symbols] == pytest.approx(ys, abs=up.pixel)
    assert drawn.symbols[1][2] == "dots\nx: 2.5\ny: -5"
    assert [each[2] for each in Drawn(svg(_chart(_dots([1], [2], said=["one"])))).symbols] == ["one"]
    assert Drawn(svg(_chart(_dots([1], [2], said=())))).symbols == []


def test_ticks_of_a_logarithmic_axis_are_as_far_apart_as_their_powers() -> None:
    xs = [0, 1e6, 3e7, 1e9, 1e12]  # what is zero has no place there
    drawn = Drawn(svg(_chart(_dots(xs, [1, 1, 2, 3, 4]), x=Axis("n", log=True))))
    ticks = [(log10(number(words)), pixel) for words, pixel in drawn.ticks("x")]
    (low, start), (high, end) = ticks[0], ticks[-1]
    for power, pixel in ticks:
        assert pixel == pytest.approx(start + (power - low) / (high - low) * (end - start), abs=0.2)
    found = [low + (pixel - start) / (end - start) * (high - low) for pixel, _, _ in drawn.symbols]
    assert found == pytest.approx([log10(each) for each in xs[1:]], abs=0.01)


def test_a_line_of_many_points_keeps_its_extremes() -> None:
    steps = list(range(20_000))
    losses = [3.0 + 0.1 * (at % 7) for at in steps]
    losses[7777], losses[12_345] = 9.0, 1.0
    text = svg(_chart(Line(steps, losses)))
    assert len(text) < 100_000
    drawn = Drawn(text)
    (line,) = drawn.paths(stroke=COLOURS[0])
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
    assert len(Drawn(svg(_chart(_dots(places, places)))).symbols) == 50


def test_a_missing_value_or_one_beyond_the_plot_breaks_a_line() -> None:
    for ys, ends in (([1.0, 2.0, None, 3.0, 2.0], None), ([1.0, 2.0, 99.0, 3.0, 2.0], (0.0, 5.0))):
        drawn = Drawn(svg(_chart(Line([0, 1, 2, 3, 4], ys), y=Axis(ends=ends))))
        (path,) = (style["d"] for _, style in drawn.of("path"))
        assert [len(corners(f"M{part}")) for part in path.split("M")[1:]] == [2, 2]


def test_an_area_that_is_higher_than_its_plot_fills_it() -> None:
    area = Area([0, 1, 2, 3], {"area": [1.0, 9.0, 9.0, 1.0]})
    drawn = Drawn(svg(_chart(area, y=Axis(ends=(0, 2)))))
    ((*top, _, _),) = drawn.paths(fill=COLOURS[0])
    assert [drawn.scale("y").value(y) for _, y in top] == pytest.approx([1, 2, 2, 1], abs=0.02)


def test_a_band_between_two_curves_has_both_edges() -> None:
    band = Area([0, 1, 2], {"error": [1.0, 2.0, 1.0]}, floor=[4.0, 3.0, 4.0], opacity=0.18)
    drawn = Drawn(svg(_chart(band)))
    scale, (edges,) = drawn.scale("y"), drawn.paths(fill=COLOURS[0])
    assert [round(scale.value(y), 1) for _, y in edges] == [5, 5, 5, 4, 3, 4]


def test_a_chart_of_nothing_is_a_frame() -> None:
    drawn = Drawn(svg(_chart()))
    assert drawn.root.get("aria-label") == "Dots"
    assert {"x", "y"} <= set(drawn.words)


# Words


def test_text_of_a_chart_cannot_become_markup() -> None:
    chart = Chart(
        EVIL,
        (
            Line([1], [2], EVIL, symbol="circle", texts=[EVIL], said=[EVIL]),
            Line([1], [3], "other", colour='"/><script>'),
            Band("x", 1, text=EVIL),
        ),
        Axis(EVIL),
        Axis(EVIL),
        key=(EVIL,),
    )
    for each in (chart, bar_chart(EVIL, EVIL, [EVIL], [Bars([0], [0], [1], EVIL, said=[EVIL])])):
        for text in (svg(each), standalone(each)):
            drawn = Drawn(text)
            assert {child.tag.rpartition("}")[2] for child in drawn.root.iter()}.isdisjoint({"script", "img"})
            assert "<script" not in text
            assert drawn.root.get("aria-label") == EVIL
            assert any("alert" in words for words in drawn.words)
        assert "<script" not in each._repr_html_()


def test_a_notebook_shows_a_chart_with_its_title_and_what_its_points_say() -> None:
    chart = _chart(_dots([1], [2]), key=("first",))
    assert chart._repr_svg_() == standalone(chart)
    shown = chart._repr_html_()
    for part in ("<h4>Dots</h4>", "<title>dots\nx: 1\ny: 2</title>", "<ol><li>first</li></ol>", "light-dark"):
        assert part in shown


def test_words_at_one_place_give_way_to_each_other() -> None:
    names = ["first", "second", "third", "far"]
    drawn = Drawn(svg(_chart(_dots([1, 1.001, 1.002, 5], [1, 1.001, 1, 5], texts=names))))
    places = {
        each.text: (float(style["x"]), float(style["y"])) for each, style in drawn.of("text") if each.text in names[:3]
    }  # fmt: skip
    assert len(places) == 3
    for name, (x, y) in places.items():
        for other, (a, b) in places.items():
            assert name == other or abs(y - b) >= 11 or abs(x - a) > 25


def test_a_mark_says_its_value_where_there_is_room() -> None:
    for at in (1.0, 99.0):
        drawn = Drawn(
            svg(_chart(_dots([0, 100], [0, 1]), Band("x", at, text="85 GB usable"), x=Axis(ends=(0, 100))), 380)
        )
        (words,) = [style for each, style in drawn.of("text") if each.text == "85 GB usable"]
        line = next(style for _, style in drawn.of("line") if "stroke-dasharray" in style)
        assert drawn.scale("x").value(float(line["x1"])) == pytest.approx(at, abs=1)
        assert 0 < float(words["x"]) < 300
        assert (float(words["x"]) > float(line["x1"])) == (at < 50)


def test_a_legend_takes_the_lines_it_needs_and_one_name_needs_none() -> None:
    lines = [Line([1, 2], [1, at], f"one long name, number {at}") for at in range(9)]
    broad, narrow = (Drawn(svg(_chart(*lines), width)) for width in (960, 380))
    heights = [each.ticks("y")[0][1] - each.ticks("y")[-1][1] for each in (broad, narrow)]
    assert heights[0] == pytest.approx(heights[1])  # the plot is as high
    assert narrow.height > broad.height
    for drawn in (broad, narrow):
        rows = {style["y"] for each, style in drawn.of("text") if (each.text or "").startswith("one long")}
        assert len(rows) == (2 if drawn is broad else 5)
    assert not any("one long" in each for each in Drawn(svg(_chart(lines[0]))).words)


def test_dark_pages_have_a_colour_for_every_class() -> None:
    for colour in ("#222222", "#555555", "#e4e4e4", *COLOURS, "#ffffff"):
        for name in str(paint(colour, colour)["class_"]).split():
            assert f".{name}{{" in STYLE
    assert len(set(COLOURS)) == len(COLOURS)


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
    scale = Scale(low, low + decades, 0, 100, log=True)
    assert all(-0.01 <= (scale.at(each) or 0) <= 100.01 for each in ticks)


def test_ticks_end_where_floats_do() -> None:
    assert log_ticks(0, 309.3)[-1] == 1e306
    assert log_ticks(307.5, 309.3)[-1] == 1e308


def test_a_chart_in_a_notebook_leaves_the_variables_of_its_page_alone() -> None:
    """marimo's --muted is the colour of a background: words in it could not be read."""
    shown = bar_chart("Time", "seconds", ["a"], [])._repr_html_()
    assert "var(--" not in shown
    assert ".muted{fill:light-dark(#555555,#aaa8a4)}" in shown
    assert ".muted{fill:var(--muted,light-dark(#555555,#aaa8a4))}" in STYLE
