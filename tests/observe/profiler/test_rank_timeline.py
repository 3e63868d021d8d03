"""Several ranks on one time axis: clocks set by shared collectives, pieces that sum to parts, a straggler in sight."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from test_ranks import LATE_US, written

from drawn import marks
from trainledger.answers.pages.profile_figures import rank_charts
from trainledger.observe.profiler.ranks import WAITS, Ranks, ranks_of
from trainledger.observe.profiler.step_time import EXPOSED
from trainledger.report.chart import Area
from trainledger.report.draw.chart import drawing

AHEAD_US = 5e6


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Ranks:
    """Three ranks of which rank 1 is late, and the clock of rank 2 is five seconds ahead."""
    folder = tmp_path_factory.mktemp("ranks")
    for rank in range(3):
        written(folder, rank, early_us=0.0 if rank == 1 else LATE_US)
    path = folder / "rank2.json"
    trace = json.loads(path.read_text())
    for each in trace["traceEvents"]:
        each["ts"] += AHEAD_US
    path.write_text(json.dumps(trace))
    return ranks_of(folder)


@pytest.mark.long
def test_clocks_are_set_by_the_ends_of_collectives(found):
    assert found.timeline.is_aligned
    begins = {row.rank: row.begin_ns for row in found.timeline.rows}
    steps = {each.rank: each.profile for each in found.ranks}
    name = found.timeline.step
    (first, last) = (
        next(step.step.device_ns[0] for step in steps[rank].steps if step.step.name == name) for rank in (0, 2)
    )
    assert last - first == AHEAD_US * 1000
    assert begins[2] == begins[0]


def test_the_pieces_of_a_rank_sum_to_its_step_with_waits_apart(found):
    for row, each in zip(found.timeline.rows, found.ranks, strict=True):
        assert row.rank == each.rank
        (step,) = (step for step in each.profile.steps if step.step.name == found.timeline.step)
        sums = {part: sum(pieces) for part, pieces in row.pieces_ns.items()}
        assert sum(sums.values()) == row.nanoseconds == step.nanoseconds
        assert sums[WAITS] == sum(each.waited_ns[found.timeline.step].values())
        assert sums[EXPOSED] + sums[WAITS] == step.parts_ns[EXPOSED]
        assert {part: sums[part] for part in step.parts_ns if part != EXPOSED} == {
            part: nanoseconds for part, nanoseconds in step.parts_ns.items() if part != EXPOSED
        }


def test_the_late_rank_is_named_and_the_others_wait(found):
    (chart,) = rank_charts(found)
    assert found.timeline.step in chart.title
    assert chart.y.names == ("rank 0", "rank 1, late", "rank 2")
    rows = marks(chart, Area)
    assert [WAITS in each.layers for each in rows] == [True, False, True]
    for area, row in zip(rows, found.timeline.rows, strict=True):
        heights = [area.floor - top for top in list(area.sums())[-1]]
        drawn_ms = sum(
            height / 0.78 * (after - before)
            for height, (before, after) in zip(heights, pairwise(area.xs), strict=False)
        )
        assert drawn_ms == pytest.approx(row.nanoseconds / 1e6, rel=0.01)
    shown = drawing(chart)
    assert shown.count("<svg") == 2
    assert "rank 1, late" in shown


def test_without_a_shared_collective_rows_begin_together(found):
    rows = tuple(replace(row, begin_ns=0) for row in found.timeline.rows)
    apart = replace(found, timeline=replace(found.timeline, rows=rows, is_aligned=False))
    assert "each from when its step begins" in rank_charts(apart)[0].x.title
    assert rank_charts(replace(found, timeline=None)) == []


def test_of_many_ranks_the_late_one_is_drawn(found):
    rows = tuple(replace(found.timeline.rows[each % 3], rank=each) for each in range(40))
    ranks = tuple(replace(found.ranks[each % 3], rank=each) for each in range(40))
    late = replace(found.ranks[1], rank=37, caused_ns=10**12)
    many = replace(found, ranks=(*ranks[:37], late, *ranks[38:]), timeline=replace(found.timeline, rows=rows))
    (chart,) = rank_charts(many)
    assert "16 of 40 ranks" in chart.title
    assert "rank 37, late" in chart.y.names
    assert len(chart.y.names) == 16
