"""What experts send: over how many nodes, how long, and what of it runs beside another micro-batch."""

import random
from dataclasses import replace
from itertools import combinations
from statistics import mean
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parallel_step import H100, MODEL, run_of, timed

from trainledger import catalog
from trainledger.forecast.predict.collective import Placement, collective_seconds, other_nodes, placement
from trainledger.forecast.predict.pipeline import Chunk, Stage, order, pipeline_ends, pipeline_spans
from trainledger.forecast.predict.roofline import Roofline
from trainledger.forecast.predict.stage import stages_of
from trainledger.forecast.predict.step import CAUSES
from trainledger.ledger.entry import Entry
from trainledger.ledger.ranks import accounts
from trainledger.spec.cluster import Fabric, Link
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields

pytestmark = pytest.mark.sweep

EXPERTS = {
    **MODEL,
    "feed_forward": "experts",
    "feed_forward.n_experts": 16,
    "feed_forward.per_token": 4,
    "feed_forward.expert_d_ff": 512,
}


def routed(experts: int, chosen: int, groups: int = 1, drawn: int = 1) -> ModelSpec:
    return from_fields(
        ModelSpec,
        {
            **MODEL,
            "feed_forward": "experts",
            "feed_forward.n_experts": experts,
            "feed_forward.per_token": chosen,
            "feed_forward.router.groups": groups,
            "feed_forward.router.top_groups": drawn,
        },
    )


def counted(spec: ModelSpec, nodes: int) -> float:
    """The mean number of nodes but one that a token goes to, by going through all its choices."""
    assert spec.experts is not None
    experts = range(spec.experts.n_experts)
    of_group = spec.experts.n_experts // spec.experts.router.groups
    found = []
    for groups in combinations(range(spec.experts.router.groups), spec.experts.router.top_groups):
        candidates = [each for each in experts if each // of_group in groups]
        for chosen in combinations(candidates, spec.experts.per_token):
            there = {each * nodes // spec.experts.n_experts for each in chosen}
            found.append(len(there) * (nodes - 1) / nodes)  # its own is any of them
    return mean(found)


@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
@pytest.mark.parametrize(("groups", "drawn"), [(1, 1), (4, 2), (4, 4), (8, 3), (2, 1)])
def test_the_nodes_of_a_token_are_those_of_all_its_choices(nodes: int, groups: int, drawn: int) -> None:
    spec = routed(8, 1 if drawn * 8 // groups < 3 else 3, groups, drawn)
    assert other_nodes(spec, nodes) == pytest.approx(counted(spec, nodes))


def test_deepseek_v3_goes_to_four_nodes_at_most() -> None:
    """Section 3.2.2: eight experts in four groups of one node each."""
    limited, free = routed(256, 8, 8, 4), routed(256, 8)
    assert other_nodes(limited, 8) == pytest.approx(7 / 8 * 3.63, rel=2e-3)
    assert other_nodes(free, 8) > other_nodes(limited, 8)
    assert list(other_nodes(limited, np.array([1, 2, 8]))) == [other_nodes(limited, each) for each in (1, 2, 8)]


@settings(max_examples=60)
@given(
    st.sampled_from((8, 16, 64)), st.sampled_from((1, 2, 4, 8)), st.sampled_from((2, 4, 8, 16, 64)),
    st.sampled_from((1, 4, 8)), st.floats(1e5, 1e10),
)  # fmt: skip
def test_over_the_network_goes_no_more_than_with_a_copy_to_each_expert(experts, chosen, ranks, per_node, nbytes):
    spec, layout = routed(max(experts, ranks), chosen), Layout(shard=64, expert=ranks, expert_send="nodes")
    nodes = placement(layout, "expert", ranks, per_node, spec)
    copies = placement(replace(layout, expert_send="copies"), "expert", ranks, per_node, spec)
    assert (copies.far, nodes.nodes) == (None, copies.nodes)
    assert nodes.far is not None
    assert 0 <= nodes.far <= (ranks - nodes.in_node) / ranks + 1e-12
    link = Link(name="x", title="x", bytes_per_second=100e9)  # as fast in a node as between nodes
    fabric = Fabric(devices_per_node=per_node, node=link, network=link)
    if nodes.nodes > 1 and nodes.far >= (nodes.in_node - 1) / nodes.in_node:  # the network is the slower
        assert collective_seconds("all_to_all", nbytes, nodes, fabric) <= collective_seconds(
            "all_to_all", nbytes, copies, fabric
        ) * (1 + 1e-9)


def test_links_and_network_work_at_the_same_time() -> None:
    near, far = (Link(name=str(rate), title="", bytes_per_second=rate) for rate in (160e9, 50e9))
    fabric = Fabric(devices_per_node=8, node=near, network=far)
    place = Placement(64, 8, 8, 0.4)
    assert collective_seconds("all_to_all", 1e9, place, fabric) == pytest.approx(0.4 * 1e9 / 50e9)
    quick = replace(fabric, network=replace(far, bytes_per_second=500e9))
    assert collective_seconds("all_to_all", 1e9, place, quick) == pytest.approx(7 / 8 * 1e9 / 160e9)


# Beside another micro-batch

SPREADS: list[dict[str, Any]] = [
    {"shard": 16, "expert": 16},
    {"shard": 16, "expert": 16, "zero": 1, "expert_send": "nodes"},
    {"shard": 16, "expert": 8, "pipeline": 4, "schedule": "zero-bubble"},
    {"shard": 16, "expert": 16, "pipeline": 2, "schedule": "interleaved", "virtual_stages": 2, "zero": 2},
]


@pytest.mark.parametrize("layout", SPREADS, ids=str)
@pytest.mark.parametrize("precision", ["bf16-sharded", "fp8-block"])
def test_with_experts_overlapped_micro_batch_it_is_no_slower_and_not_as_if_nothing_was_sent(layout, precision):
    recipe = {"model": EXPERTS, "global_batch": 512, "precision": precision}
    shown = timed(run_of(dict(layout), dict(recipe)))
    hidden = timed(run_of({**layout, "overlap": ["gradients", "experts"]}, dict(recipe)))
    assert hidden.seconds is not None
    assert shown.seconds is not None
    assert hidden.seconds < shown.seconds
    assert 0 < hidden.causes["exposed communication"] < shown.causes["exposed communication"]
    others = set(CAUSES) - {"exposed communication", "pipeline bubble", "stragglers"}
    for name in others:
        assert hidden.causes[name] == pytest.approx(shown.causes[name], rel=1e-3), name


def test_what_hides_is_what_the_same_block_computes_the_other_way() -> None:
    """Of each block: the forward's messages behind the backward's matmuls and the other way round, at 30 %."""
    run = run_of({"shard": 16, "expert": 16, "overlap": ["gradients", "experts"]},
                 {"model": EXPERTS, "global_batch": 64})  # fmt: skip
    alone = replace(run, layout=replace(run.layout, overlap=("gradients",)))
    machine = replace(H100, fabric=catalog.fabric(H100, run.cluster))
    assert machine.fabric is not None
    (hidden,), (shown,) = (
        stages_of(accounts(each, backend="cuda")[:1], machine, machine.fabric) for each in (run, alone)
    )
    sent: dict[tuple[Any, str], list[float]] = {}
    for one, other in zip(hidden.messages, shown.messages, strict=True):
        if one.entry.group == "expert":
            loop = one.entry.loop
            # The joint norm, after all of them; the first micro-batch: nothing goes the other way yet.
            if not loop or not loop[0][0].startswith("micro-batches"):
                assert one.seconds == other.seconds
                continue
            both = sent.setdefault((loop[:2], one.entry.phase), [0.0, 0.0])
            both[0] += one.seconds
            both[1] += other.seconds
    assert len(sent) >= 2
    assert H100.efficiency is not None
    for after, before in sent.values():
        assert H100.efficiency.contention_share * before <= after + 1e-12
        assert after < before


def test_one_forward_more_is_ahead_where_forwards_overlap_backwards() -> None:
    """So the last stage's backward has not to wait for the forward that it runs beside (Megatron Core)."""
    for stage in range(4):
        plain = order("interleaved", stage, 4, 2, 8)
        paired = order("interleaved", stage, 4, 2, 8, True)
        ahead = [next(at for at, task in enumerate(tasks) if task[0] == 1) for tasks in (plain, paired)]
        assert ahead[1] == ahead[0] + 1
        assert sorted(plain) == sorted(paired)
    before = [order("interleaved", 3, 4, 2, 8, each) for each in (False, True)]
    beside = [each[each.index((1, 1, 0)) - 1] for each in before]  # what stands before the first backward
    assert beside[0] == (0, 1, 0)  # the forward that it needs itself
    assert beside[1] == (0, 1, 1)


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
def test_what_is_alone_takes_longer_and_nothing_else(schedule: str) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    beside = [Stage((Chunk(1.0, 1.0, 1.0),) * chunks)] * 4
    longer = [Stage((Chunk(1.0, 1.0, 1.0, (0.5, 0.5)),) * chunks)] * 4
    for micro_batches in (8, 16, 64):
        quick, slow = (max(pipeline_ends(each, micro_batches, schedule, 0.0, paired=True)) for each in (beside, longer))
        assert quick < slow <= quick + 0.5 * 2 * 4 * chunks * 2
    spans = pipeline_spans(longer, 16, schedule, 0.0, paired=True)
    seconds = {round(each.end - each.start, 9) for row in spans for each in row if each.task[0] == 0}
    assert seconds == {1.0, 1.5}
    assert max(row[-1].end for row in spans) == pytest.approx(
        max(pipeline_ends(longer, 16, schedule, 0.0, paired=True))
    )


def test_all_stages_are_compared_with_one_peak() -> None:
    """The head is in 16 bits and most of the last stage, whose ideal time is of 8 bits all the same."""
    model = {**MODEL, "vocab_size": 65536}
    for precision in ("fp8-rowwise", "bf16-mixed"):
        run = run_of({"pipeline": 4}, {"model": model, "precision": precision})
        found = accounts(run, backend="cuda")
        model_flops = sum(each.count * each.ledger.model_flops for each in found)
        split: dict[str, int] = {}
        for each in found:
            for entry in each.ledger:
                if entry.kind in ("matmul", "attention"):
                    split[entry.dtype] = split.get(entry.dtype, 0) + entry.flops * entry.times
        most = max(split, key=lambda each: split[each])
        peak = H100.peak_flops_per_second["fp8" if most == "e4m3" else most]
        assert timed(run).causes["ideal"] == pytest.approx(model_flops / (4 * peak))


def test_arrays_of_ranks_are_placed_as_each_alone() -> None:
    draw = random.Random(3)
    spec, sizes = routed(64, 4), [draw.choice((2, 8, 16, 64)) for _ in range(8)]
    layout = Layout(shard=64, expert=2, expert_send="nodes")
    vars(layout).update(expert=np.array(sizes))
    found = placement(layout, "expert", np.array(sizes), 8, spec)
    assert found.far is not None
    for at, size in enumerate(sizes):
        alone = placement(replace(layout, expert=size), "expert", size, 8, spec)
        assert found.far[at] == pytest.approx(alone.far)


@pytest.mark.parametrize(("name", "dtype"), [("grouped_mm", "bf16"), ("_scaled_grouped_mm", "e4m3")])
def test_rows_of_experts_are_filled_up(name: str, dtype: str) -> None:
    """A router gives an expert any number of tokens; programs align them, as grouped matmuls ask for."""

    def seconds(rows: int, name: str = name) -> float:
        shape = (8, 2048, 1024, rows)  # of the gradient of the weights
        flops = 2 * 8 * 2048 * 1024 * rows
        entry = Entry(name=name, path="", phase="backward", kind="matmul", dtype=dtype, shape=shape, flops=flops)
        return float(Roofline(H100).time(entry).seconds)

    assert seconds(1001) == pytest.approx(seconds(1008))
    assert seconds(1008) < seconds(1024)
    assert seconds(1001, "bmm") > 5 * seconds(1001)
