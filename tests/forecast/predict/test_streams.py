"""The streams of a rank: what hides, what waits, and folded loops against unrolled ones."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainledger.forecast.predict.stream_ops import Loop, StreamOp, compute_seconds, without_links
from trainledger.forecast.predict.streams import Span, Streams, rank_seconds


def gathered(gather: float, work: float) -> tuple[StreamOp, ...]:
    """A block under FSDP2 in forward."""
    return StreamOp("gather", gather), StreamOp("unpack", 0.1), StreamOp("work", work)


def reduced(gather: float, work: float, reduce: float) -> tuple[StreamOp, ...]:
    """A block under FSDP2 in backward: the next one is gathered while it runs."""
    return (
        StreamOp("unpack", 0.1, backward=True),
        StreamOp("gather", gather, backward=True),
        StreamOp("work", work, backward=True),
        StreamOp("reduce", reduce, backward=True),
    )


def test_gathers_hide_behind_the_blocks_before() -> None:
    """All but the first one, where computing is slower; else the gathers set the pace."""
    blocks = 20
    assert rank_seconds((Loop("layers", blocks, gathered(1.0, 2.0)),)) == pytest.approx(1.0 + blocks * 2.1)
    assert rank_seconds((Loop("layers", blocks, gathered(3.0, 2.0)),)) == pytest.approx(blocks * 3.0 + 2.1)


def test_reductions_hide_behind_the_next_block_and_the_last_one_shows() -> None:
    blocks = 20
    hidden = (StreamOp("gather", 0.2, backward=True), Loop("layers", blocks, reduced(0.2, 2.0, 0.5)))
    assert rank_seconds(hidden) == pytest.approx(0.2 + blocks * 2.1 + 0.2 * 0 + 0.5)
    slow = (StreamOp("gather", 1.0, backward=True), Loop("layers", blocks, reduced(1.0, 2.0, 3.0)))
    period = (rank_seconds((slow[0], Loop("layers", 40, slow[1].body))) - rank_seconds(slow)) / 20
    assert period == pytest.approx(4.0)  # one stream gathers and reduces


def test_buckets_overlap_the_last_backward() -> None:
    """Ten buckets of 0.1 s fill over a backward of 10 s: only the last one shows; of 2 s each all but half a second."""
    work = (StreamOp("work", 5.0), StreamOp("work", 10.0, backward=True))
    assert rank_seconds((*work, StreamOp("bucket", 1.0, backward=True, pieces=10))) == pytest.approx(15.1)
    assert rank_seconds((*work, StreamOp("bucket", 20.0, backward=True, pieces=10))) == pytest.approx(5 + 1 + 20)
    assert rank_seconds((*work, StreamOp("bucket", 3.0, backward=True))) == pytest.approx(18.0)


def test_buckets_in_turn_are_those_of_one_message_each() -> None:
    work = StreamOp("work", 10.0, backward=True)
    whole = rank_seconds((work, StreamOp("bucket", 14.0, backward=True, pieces=10)))
    single = rank_seconds((work, *(StreamOp("bucket", 1.4, backward=True) for _ in range(10))))
    assert whole == pytest.approx(single)


def test_a_ring_hides_behind_the_attention_that_it_feeds() -> None:
    def ring(rounds: float, attention: float) -> float:
        return rank_seconds((StreamOp("ring", 3 * rounds, pieces=3), StreamOp("attention", attention)))

    assert ring(0.5, 8.0) == pytest.approx(8.0)  # four parts of 2 s
    assert ring(3.0, 8.0) == pytest.approx(3 * 3.0 + 2.0)  # three rounds, and the part that the last one brings


def test_gradients_of_keys_and_values_come_home_after_the_last_part() -> None:
    def backward(rounds: float, attention: float) -> float:
        ring = (StreamOp("ring", each * rounds, "", True, each) for each in (3, 4))
        return rank_seconds((*ring, StreamOp("attention", attention, "", True)))

    assert backward(0.5, 8.0) == pytest.approx(8.5)
    assert backward(3.0, 8.0) == pytest.approx(7 * 3.0)


def test_the_update_waits_for_all_reductions() -> None:
    ops = (StreamOp("work", 1.0, backward=True), StreamOp("reduce", 5.0, backward=True), StreamOp("update", 1.0))
    assert rank_seconds(ops) == pytest.approx(7.0)


def test_contention_costs_a_share_of_what_overlaps() -> None:
    ops = (Loop("layers", 10, gathered(1.0, 2.0)),)
    assert rank_seconds(ops, contention=0.1) == pytest.approx(rank_seconds(ops) + 10 * 0.1, rel=0.02)


kinds = st.sampled_from(["work", "exposed", "reduce", "sum", "gather", "ring"])
amounts = st.floats(0.01, 3.0)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[StreamOp, ...]:
    """Acts that leave no gather or ring open."""
    ops: list[StreamOp] = []
    for _ in range(draw(st.integers(1, 5))):
        kind, seconds, backward = draw(kinds), draw(amounts), draw(st.booleans())
        ops.append(StreamOp(kind, seconds, kind, backward, 3 if kind == "ring" else 1))
        if kind == "gather":
            ops.append(StreamOp("unpack", draw(amounts), "unpack", backward))
        if kind == "ring":
            ops.append(StreamOp("attention", draw(amounts), "attention", backward))
    return tuple(ops)


@given(bodies(), bodies(), st.integers(1, 60), st.integers(1, 5))
def test_folded_loops_take_what_unrolled_ones_do(before, body, count, outer):
    folded = (*before, Loop("outer", outer, (*before, Loop("inner", count, body))), StreamOp("update", 0.1))
    unrolled = (*before, *((*before, *body * count) * outer), StreamOp("update", 0.1))
    assert rank_seconds(folded) == pytest.approx(rank_seconds(unrolled), rel=1e-6)


def test_a_loop_is_not_folded_while_one_stream_runs_ahead_of_what_will_wait_for_it() -> None:
    """Two rounds may move alike, communication by 6 s and compute by 5, before compute has to wait."""
    body = (
        StreamOp("gather", 2.0),
        StreamOp("unpack", 2.0),
        StreamOp("sum", 2.0),
        StreamOp("work", 3.0),
        StreamOp("sum", 2.0),
    )
    before = (StreamOp("work", 6.5),)
    assert rank_seconds((*before, Loop("layers", 6, body))) == pytest.approx(rank_seconds((*before, *body * 6)))


@given(bodies(), st.integers(1, 60), st.floats(0.0, 1.0))
def test_time_is_between_computing_alone_and_everything_in_a_row(body, count, share):
    ops = (Loop("layers", count, body),)
    streams = Streams()
    streams.run(ops)
    streams.synchronize()
    computing = compute_seconds(ops)
    assert streams.waited <= streams.busy * (1 + 1e-9)
    assert streams.compute == pytest.approx(computing + streams.waited)
    assert rank_seconds(without_links(ops)) == pytest.approx(computing)
    less = tuple(
        StreamOp(each.kind, each.seconds * share, each.name, each.backward, each.pieces)
        if each.kind in ("exposed", "gather", "reduce", "sum", "ring")
        else each
        for each in body
    )
    assert rank_seconds((Loop("layers", count, less),)) <= streams.compute * (1 + 1e-9)


@given(bodies(), st.integers(1, 40))
def test_spans_lie_within_the_step_and_no_stream_does_two_things_at_once(body, count):
    spans: list[Span] = []
    streams = Streams(record=spans.append)
    streams.run((Loop("layers", count, body),))
    streams.synchronize()
    computing = sorted((each for each in spans if each.stream == "compute"), key=lambda each: each.start)
    assert all(b.start >= a.end - 1e-9 for a, b in pairwise(computing))
    assert max(each.end for each in spans) <= streams.compute * (1 + 1e-9)


def test_rounds_that_are_not_drawn_say_what_they_are_where_they_are_of_one_kind() -> None:
    layers = tuple(
        Loop(name, 8, (StreamOp("work", 1.0, backward=back),)) for name, back in (("up", False), ("down", True))
    )
    spans: list[Span] = []
    streams = Streams(record=spans.append)
    streams.run((Loop("micro-batches", 8, layers),))
    folded = {each.name.split(" of ")[1]: each.what for each in spans if each.what.startswith("more")}
    assert folded == {"up": "more forward", "down": "more backward", "micro-batches": "more"}
    assert sum(each.end - each.start for each in spans) == streams.compute == 8 * 16
