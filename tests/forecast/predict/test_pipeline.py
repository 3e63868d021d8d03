"""Pipelines: the simulation against closed forms, and long ones against short ones."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainledger.forecast.predict.pipeline import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Chunk,
    Stage,
    order,
    pipeline_ends,
    pipeline_spans,
)
from trainledger.ledger.parallel.schedule import in_flight
from trainledger.spec.layout import SCHEDULES, Layout

seconds = st.floats(0.5, 2.0)


def even(stages: int, chunks: int, forward: float, backward: float, weights: float) -> list[Stage]:
    each = Chunk(forward / chunks, backward / chunks, weights / chunks)
    return [Stage((each,) * chunks)] * stages


def bubble_seconds(schedule: str, stages: int, chunks: int, forward: float, backward: float, weights: float) -> float:
    """The closed form for equal stages without sends (`predict.pipeline`); ``backward`` without the weights' part."""
    if schedule == "zero-bubble":
        return (stages - 1) * (forward + backward - weights)
    return (stages - 1) * (forward + backward + weights) / chunks


@given(st.sampled_from(SCHEDULES), st.integers(2, 6), st.integers(1, 4), st.sampled_from([2, 3]), seconds)
def test_even_stages_have_the_bubble_of_the_papers(schedule, stages, rounds, chunks, forward):
    chunks = chunks if schedule == "interleaved" else 1
    weights = forward if schedule == "zero-bubble" else 0.0
    backward = 2 * forward - weights
    micro_batches = rounds * stages
    ends = pipeline_ends(even(stages, chunks, forward, backward, weights), micro_batches, schedule, 0.0)
    work = micro_batches * (forward + backward + weights)
    bubble = bubble_seconds(schedule, stages, chunks, forward, backward, weights)
    assert max(ends) == pytest.approx(work + bubble)


def test_the_bubble_as_a_share_is_that_of_narayanan() -> None:
    """(P - 1) / M of the work, and (P - 1) / (V M) interleaved (Narayanan et al. 2021, section 2.2)."""
    for schedule, chunks, share in (("1f1b", 1, 3 / 8), ("interleaved", 2, 3 / 16)):
        work = 8 * 3.0
        ends = pipeline_ends(even(4, chunks, 1.0, 2.0, 0.0), 8, schedule, 0.0)
        assert (max(ends) - work) / work == pytest.approx(share)


@given(st.sampled_from(SCHEDULES), st.integers(2, 5), st.integers(1, 6), st.integers(1, 3), st.data())
def test_every_task_is_done_once_after_what_it_reads(schedule, stages, rounds, chunks, data):
    chunks = chunks if schedule == "interleaved" else 1
    micro_batches = rounds * stages if schedule == "interleaved" else rounds
    send = data.draw(st.sampled_from([0.0, 0.3]))
    uneven = [
        Stage(tuple(Chunk(data.draw(seconds), data.draw(seconds), 0.4) for _ in range(chunks))) for _ in range(stages)
    ]
    spans = pipeline_spans(uneven, micro_batches, schedule, send)
    end = {(each.task[0], each.task[1] * stages + each.stage, each.task[2]): each.end for row in spans for each in row}
    kinds = 3 if schedule == "zero-bubble" else 2
    assert len(end) == sum(map(len, spans)) == kinds * stages * chunks * micro_batches
    for row in spans:
        assert all(b.start >= a.end - 1e-9 for a, b in pairwise(row))
        for each in row:
            what, chunk, batch = each.task
            place, last = chunk * stages + each.stage, stages * chunks - 1
            if what == FORWARD and place:
                assert each.start >= end[FORWARD, place - 1, batch] + send - 1e-9
            elif what == BACKWARD:
                assert each.start >= end[FORWARD, place, batch] - 1e-9
                if place < last:
                    assert each.start >= end[BACKWARD, place + 1, batch] + send - 1e-9
            elif what == WEIGHTS:
                assert each.start >= end[BACKWARD, place, batch] - 1e-9


@given(st.sampled_from(["gpipe", "1f1b", "interleaved"]), st.integers(2, 6), st.integers(1, 4), st.integers(1, 3))
def test_stages_hold_as_many_micro_batches_as_the_ledger_says(schedule, stages, rounds, chunks):
    chunks = chunks if schedule == "interleaved" else 1
    layout = Layout(pipeline=stages, schedule=schedule, virtual_stages=chunks)
    for stage in range(stages):
        held = most = 0
        for what, _, _ in order(schedule, stage, stages, chunks, rounds * stages):
            held += 1 if what == FORWARD else -1
            most = max(most, held)
        assert most == in_flight(layout, stage, rounds * stages)


@given(st.integers(2, 5), st.integers(1, 12), st.data())
def test_zero_bubble_holds_no_more_than_the_ledger_says(stages: int, micro_batches: int, data: st.DataObject) -> None:
    uneven = [Stage((Chunk(data.draw(seconds), data.draw(seconds), data.draw(seconds)),)) for _ in range(stages)]
    for row in pipeline_spans(uneven, micro_batches, "zero-bubble", 0.1):
        held = 0
        for each in row:
            held += {FORWARD: 1, BACKWARD: 0, WEIGHTS: -1}[each.task[0]]
            assert held <= min(stages, micro_batches)


@settings(max_examples=30)
@given(st.sampled_from(SCHEDULES), st.integers(2, 4), st.integers(150, 600), st.data())
def test_long_pipelines_go_on_as_they_began(schedule, stages, micro_batches, data):
    """Folding against following every micro-batch."""
    chunks = 2 if schedule == "interleaved" else 1
    micro_batches -= micro_batches % stages if schedule == "interleaved" else 0
    send = data.draw(st.sampled_from([0.0, 0.2, 3.0]))
    weights = 0.5 if schedule == "zero-bubble" else 0.0
    uneven = [
        Stage(tuple(Chunk(data.draw(seconds), data.draw(seconds), weights) for _ in range(chunks)))
        for _ in range(stages)
    ]
    folded = pipeline_ends(uneven, micro_batches, schedule, send)
    whole = [row[-1].end for row in pipeline_spans(uneven, micro_batches, schedule, send)]
    assert folded == pytest.approx(whole, rel=2e-3)  # chunks unlike each other may take turns of several rounds


def test_zero_bubble_is_no_slower_than_1f1b_and_interleaving_no_slower_than_either_chunk_alone() -> None:
    slow = max(pipeline_ends(even(8, 1, 1.0, 2.0, 0.0), 16, "1f1b", 0.0))
    assert max(pipeline_ends(even(8, 1, 1.0, 1.0, 1.0), 16, "zero-bubble", 0.0)) < slow
    assert max(pipeline_ends(even(8, 2, 1.0, 2.0, 0.0), 16, "interleaved", 0.0)) < slow


def test_the_slowest_stage_sets_the_pace() -> None:
    stages = [Stage((Chunk(1.0, 2.0),)), Stage((Chunk(2.0, 3.0),))]
    more, less = (max(pipeline_ends(stages, count, "1f1b", 0.0)) for count in (1001, 1000))
    assert more - less == pytest.approx(5.0)
