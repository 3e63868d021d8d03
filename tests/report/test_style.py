"""What all figures have in common: where a title, a legend and a line's words stand."""

from __future__ import annotations

import pytest

from trainledger.report.style import around, arranged, bar_figure, by_turns, folded, mark, titled, untitled


def test_a_title_adds_its_own_room_and_takes_it_away_again() -> None:
    plain, named = arranged(height=300), arranged("Memory", height=300)
    assert untitled(named) == plain
    assert untitled(plain) == plain
    assert titled(plain, "Memory") == named == titled(named, "Memory")
    room = named["height"] - plain["height"]
    assert room == named["margin"]["t"] - plain["margin"]["t"] > 0
    # The legend begins where the room of the title ends, counted from the top of the whole drawing.
    assert named["legend"]["yref"] == "container"
    assert (1 - named["legend"]["y"]) * named["height"] == pytest.approx(room)


@pytest.mark.parametrize(("at", "side"), [(10.0, "left"), (90.0, "right")])
def test_the_words_of_a_line_stand_where_there_is_room(at: float, side: str) -> None:
    layout = arranged()
    layout["xaxis"]["range"] = [0.0, 100.0]
    mark(layout, "v", at, "the device gives 1 GB")
    (shape,), (words,) = layout["shapes"], layout["annotations"]
    assert (shape["x0"], shape["x1"], words["x"], words["xanchor"]) == (at, at, at, side)
    mark(layout, "h", 3.0, "unigram", "2")
    assert (layout["shapes"][1]["y0"], layout["annotations"][1]["yref"]) == (3.0, "y2")


def test_names_above_bars_keep_the_words_of_lines_and_rows_their_height() -> None:
    few, more = (bar_figure("", "GB", [f"row {each}" for each in range(rows)], [])["layout"] for rows in (2, 3))
    few["xaxis"]["range"] = [0.0, 1.0]
    mark(few, "v", 0.5, "a line")
    assert [each["text"] for each in few["annotations"]] == ["row 0", "row 1", "a line"]
    assert [each["y"] for each in few["annotations"][:2]] == [0, 1]
    inside = few["height"] - few["margin"]["t"] - few["margin"]["b"]
    assert inside == 2 * (more["height"] - few["height"])


def test_an_axis_has_room_on_both_sides_and_no_bytes_below_nothing() -> None:
    assert around([10.0]) == [9.5, 10.5]
    low, high = around([85.0, 160.0, 1270.0])
    assert 0 < low < 85.0
    assert high > 1270.0
    assert around([1.0, 1000.0])[0] == 0.0


def test_neighbours_have_their_numbers_on_different_sides() -> None:
    sides = by_turns(range(1, 9))
    assert all(len(set(sides[at : at + 4])) == 4 for at in range(5))


def test_long_words_are_not_torn() -> None:
    word = "_" * 60
    assert folded(f"peak: {word} &lt;of&gt; loss", 20) == f"peak:<br>{word}<br>&lt;of&gt; loss"
