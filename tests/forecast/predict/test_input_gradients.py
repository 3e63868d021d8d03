"""Sums of inputs' gradients over tensor ranks beside the matmuls of weights' gradients (layout.overlap)."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parallel_step import H100, MODEL, linked, run_of

from trainledger.forecast.explain import account as explain
from trainledger.forecast.predict.overlap import matmuls_overlapping_sum, with_overlap
from trainledger.forecast.predict.parallel_step import layout_time
from trainledger.forecast.predict.step import StepTime
from trainledger.forecast.predict.stream_ops import StreamOp, Timed, schedule_of, without_links
from trainledger.forecast.predict.streams import Span, Streams, rank_seconds
from trainledger.ledger.entry import Entry
from trainledger.ledger.ranks import accounts
from trainledger.spec.run import Run

pytestmark = pytest.mark.sweep

BESIDE = ["gradients", "input-gradients"]
LAYOUTS: list[dict[str, Any]] = [
    {"tensor": 4},
    {"tensor": 4, "shard": 2},
    {"tensor": 4, "shard": 2, "zero": 1},
    {"tensor": 2, "sequence_parallel": True, "context": 2},
    {"tensor": 4, "sequence_parallel": True, "sequence_gather": "again"},
    {"tensor": 2, "pipeline": 2, "replicate": 2},
    {"tensor": 2, "pipeline": 2, "schedule": "interleaved", "virtual_stages": 2},
]
EXPERTS = {
    **MODEL,
    "feed_forward": "experts",
    "feed_forward.n_experts": 8,
    "feed_forward.per_token": 2,
    "feed_forward.expert_d_ff": 512,
}


def step_of(run: Run, rate: float, **device: Any) -> StepTime:
    return layout_time(accounts(run, backend="cuda"), replace(H100, fabric=linked(rate, rate), **device))


def both(layout: dict[str, Any], recipe: dict[str, Any] | None = None) -> list[Run]:
    """The run without, and with."""
    answer = [{**layout, "overlap": each} for each in (layout.get("overlap", BESIDE[:1]), BESIDE)]
    return [run_of(each, dict(recipe or {})) for each in answer]


def matmuls(path: str, seconds: float) -> list[Timed]:
    """The gradients of a weight and of its input, each of so many seconds."""
    said: dict[str, Any] = {"path": path, "phase": "backward", "kind": "matmul", "dtype": "bf16"}
    shapes = ((1, 6, 8, 4), (1, 4, 8, 6))
    return [Timed(Entry(name="mm", shape=each, **said), seconds) for each in shapes]


def work(path: str, kind: str = "elementwise") -> Timed:
    return Timed(Entry(name="some", path=path, phase="backward", kind=kind), 1.0)


def summed(seconds: float) -> Timed:
    said: dict[str, Any] = {"path": "mlp", "phase": "backward", "kind": "collective", "group": "tensor", "ranks": 2}
    return Timed(Entry(name="all_reduce", payload=8, **said), seconds)


@pytest.mark.parametrize(("sent", "shows"), [(3.0, 0.0), (5.0, 0.0), (7.0, 2.0)])
def test_a_branch_by_hand(sent: float, shows: float) -> None:
    """Matmuls of 10 s read one input: 5 s of them are the gradients of its weights, and hide as much of the sum.

    Compute beside it loses its share; what leads to the branch's second matmul hides nothing.
    """
    up, gate = matmuls("mlp.up", 2.0), matmuls("mlp.gate", 3.0)
    rows = [*matmuls("mlp.down", 9.0), work("mlp"), *up, work("mlp.up"), *gate, work("mlp.gate"), summed(sent)]
    answer = with_overlap(both({"tensor": 2})[1], rows)
    assert answer[-1].overlapped == sent - shows
    computing = 18.0 + 10.0 + 3.0
    ops = schedule_of(answer, buckets=True)
    assert rank_seconds(ops) == pytest.approx(computing + shows)
    assert rank_seconds(ops, contention=0.3) == pytest.approx(computing + shows + 0.3 * (sent - shows))
    assert rank_seconds(without_links(ops), contention=0.3) == pytest.approx(computing)
    waited = schedule_of(with_overlap(both({"tensor": 2})[0], rows), buckets=True)
    assert rank_seconds(waited, contention=0.3) == pytest.approx(computing + sent)


def test_a_frozen_weight_has_no_gradient_to_hide_behind() -> None:
    rows = [work("mlp"), matmuls("mlp.up", 2.0)[1], *matmuls("mlp.up.lora", 1.0), summed(7.0)]
    assert with_overlap(both({"tensor": 2})[1], rows)[-1].overlapped == 1.0


def test_what_is_hidden_is_drawn_where_it_runs() -> None:
    """A sum began before the matmuls behind it were over; what is gathered ahead of them goes on beside them."""
    for op, begins, ends in (
        (StreamOp("exposed", 1.0, "sum", backward=True, before=2.0), 3.0, 6.0),
        (StreamOp("exposed", 1.0, "gather", backward=True, after=2.0), 5.0, 8.0),
        (StreamOp("exposed", 0.0, "sum", backward=True, before=2.0), 3.0, 5.0),
    ):
        drawn: list[Span] = []
        streams = Streams(record=drawn.append)
        streams.run((StreamOp("work", 5.0, backward=True), op, StreamOp("work", 5.0, backward=True)))
        (sent,) = (each for each in drawn if each.stream == "communication")
        assert (sent.start, sent.end) == (begins, ends)
        assert streams.busy == op.seconds + 2.0
        assert streams.compute == 10.0 + op.seconds


@settings(max_examples=25)
@given(st.sampled_from(LAYOUTS), st.floats(1e9, 1e13), st.sampled_from(["none", "full"]), st.booleans())
def test_never_slower_than_without_and_never_faster_than_free_links(layout, rate, again, experts):
    recipe = {"activation_checkpointing": again, "global_batch": 8, "model": EXPERTS if experts else MODEL}
    without, beside = (step_of(each, rate) for each in both(layout, recipe))
    assert without.seconds is not None
    assert beside.seconds is not None
    assert beside.seconds <= without.seconds * (1 + 1e-9)
    assert beside.causes["exposed communication"] >= -1e-12
    assert sum(beside.causes.values()) == pytest.approx(beside.seconds)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("rate", [4e12, 2e10])
def test_a_step_is_shorter_by_what_half_the_matmuls_of_each_input_hide(rate: float, parallel: bool, batch: int) -> None:
    wide = {"model": {**MODEL, "d_model": 2048, "feed_forward.d_ff": 8192}, "seq_len": 4096, "micro_batch": batch}
    layout = {"tensor": 4, "sequence_parallel": parallel, "sequence_gather": "again" if parallel else "kept"}
    without, beside = (step_of(each, rate, efficiency=None) for each in both(layout, wide))
    read = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj"), "lm_head": ("lm_head",)}
    hidden = 0.0
    for module, names in read.items():
        took = sum(
            each.seconds for each in beside.entries
            if each.entry.phase == "backward" and each.entry.kind == "matmul"
            and each.entry.path.rpartition(".")[2] in names
        )  # fmt: skip
        sent = sum(
            each.seconds for each in beside.messages
            if each.entry.overlap and each.entry.name in ("all_reduce", "reduce_scatter")
            and each.entry.path.endswith(module)
        )  # fmt: skip
        assert sent > 0
        hidden += min(sent, took / 2)
    assert without.seconds is not None
    assert beside.seconds == pytest.approx(without.seconds - hidden)


SAID: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tensor": 2, "pipeline": 2, "schedule": "zero-bubble"}, {}),  # weights' gradients come later there
    ({"tensor": 4}, {"launch_blocking": True}),
]


@pytest.mark.parametrize(("layout", "recipe"), SAID, ids=str)
def test_where_nothing_can_overlap_a_sum_nothing_does(layout: dict[str, Any], recipe: dict[str, Any]) -> None:
    without, beside = (step_of(each, 1e11).seconds for each in both(layout, recipe))
    assert beside == without


def test_matmuls_split_matmuls_overlapped_hide_their_sums_already() -> None:
    layout = {"tensor": 4, "sequence_parallel": True}
    parts, more = (
        step_of(run_of({**layout, "overlap": each}), 1e11).seconds
        for each in (["gradients", "tensor"], [*BESIDE, "tensor"])
    )
    assert more == parts


@pytest.mark.parametrize(
    ("model", "recipe", "expected"),
    [
        ({"preset": "qwen3-8b"}, {}, {("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")}),
        ({"preset": "qwen3-8b"}, {"activation_checkpointing": "full", "compile": True},
         {("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")}),
        ({"preset": "qwen3-8b"}, {"attention": "math"}, {("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")}),
        ({"preset": "gpt-j-6b"}, {}, {("q_proj", "k_proj", "v_proj"), ("up_proj",)}),
        # Experts give their tokens back before the sum; latent keys turn first.
        ({"preset": "mixtral-8x7b"}, {}, {("q_proj", "k_proj", "v_proj"), ("router",)}),
        ({"preset": "deepseek-v2-lite"}, {"attention": "math"}, {("q_proj",), ("gate_proj", "up_proj"), ("router",)}),
    ],
    ids=lambda answer: None if isinstance(answer, set) else str(answer),  # a set has no order to be named by
)  # fmt: skip
def test_matmuls_that_read_the_input_hide_the_sum_of_its_gradient(model, recipe, expected):
    run = run_of({"tensor": 4}, {"model": model, "seq_len": 2048, "global_batch": 1, **recipe})
    (rank, *_) = accounts(run, backend="cuda")
    entries = list(rank.ledger)
    found = set()
    for at, entry in enumerate(entries):
        hides = matmuls_overlapping_sum(entries, at)
        names = {entries[each].path.rpartition(".")[2] for each in hides}
        assert len(hides) == 2 * len(names)
        if entry.group == "tensor" and entry.phase == "backward" and entry.path:
            found.add(tuple(sorted(names, key=lambda each: ("qkvgu".find(each[0]), each))))
        else:
            assert not hides
    assert found == {*expected, ("lm_head",)}


def test_time_is_explained_with_sums_that_overlap_compute() -> None:
    for run, beside in zip(both({"tensor": 8}), (False, True), strict=True):
        lines = [each for part in explain.time(step_of(run, 1e11)) for each in part.lines]
        sums = [each for each in lines if each.what == "backward all_reduce, tensor, 8 ranks"]
        assert sums
        assert all(each.numbers.endswith("can overlap with compute") is beside for each in sums)
