"""Layouts of mixtures of experts: what is told of their messages is kept, and the bounds stay below the accounts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_layout_search import EXPERTS, bounded, run_for

import trainledger as tl
from trainledger.plan.layouts.grid import Shape, Spread, Stages, run_of, whole

GIVEN: list[dict[str, Any]] = [
    {"expert_send": "nodes"},
    {"expert_send": "nodes", "overlap": ("gradients", "parameters", "experts")},
    {"overlap": ("gradients", "experts", "tensor")},
    {"overlap": None},
]


@pytest.mark.parametrize("given", GIVEN, ids=str)
@pytest.mark.parametrize("zero", [1, 3])
def test_bounds_of_experts_are_below_the_account_and_near_it(given: dict[str, Any], zero: int) -> None:
    run = run_for(16, {"preset": "mixtral-8x7b"}, seq_len=1024, global_batch=64)
    run = replace(run, layout=replace(run.layout, **given))
    found = list(bounded(run, 10, 5, {"micro_batch": 1, "context": 1, "zero": zero, "tensor": 1}))
    assert any(one.layout.expert > 1 for _, _, one in found)
    for nbytes, seconds, one in found:
        assert nbytes <= 1, (nbytes, one.layout)
        assert 0.1 < seconds < 1.1, (seconds, one.layout)
        assert one.layout.expert_send == (given.get("expert_send", "copies") if one.layout.expert > 1 else "copies")
    assert np.median([nbytes for nbytes, _, _ in found]) > 0.8


def test_modules_that_predict_ahead_have_bounds_in_pipelines() -> None:
    run = run_for(8, {"preset": "deepseek-v2-lite", "n_predict_ahead": 1}, seq_len=1024, global_batch=16)
    found = list(bounded(run, 12, 3, {"micro_batch": 1, "context": 1}))
    assert any(one.layout.pipeline > 1 for _, _, one in found)
    assert all(nbytes <= 1 for nbytes, _, _ in found)


def test_what_runs_beside_compute_is_kept_where_the_layout_has_it() -> None:
    run = run_for(16, EXPERTS, global_batch=32)
    run = whole(replace(run, layout=replace(run.layout, overlap=("gradients", "tensor", "experts"))))

    def overlap(expert: int, stages: Stages, spread: Spread, *, parallel: bool = False) -> Any:
        shape = Shape(2 if parallel else 1, parallel, 1, "ring", expert, 1, "none")
        found = run_of(run, shape, stages, spread)
        assert not list(found.problems())
        return found.layout.overlap

    alone, zero_bubble = Stages(1, "1f1b", 1, None), Stages(2, "zero-bubble", 1, None)
    assert overlap(4, alone, Spread(1, 16, 1)) == ("gradients", "experts")
    assert overlap(1, alone, Spread(1, 16, 1)) == ("gradients",)
    assert overlap(4, zero_bubble, Spread(1, 8, 1)) == ("gradients", "experts")
    assert overlap(4, Stages(2, "1f1b", 1, None), Spread(1, 8, 1)) == ("gradients",)
    assert overlap(1, alone, Spread(1, 8, 1), parallel=True) == ("gradients", "tensor")
    one = replace(run, recipe=replace(run.recipe, global_batch=16))
    shape = Shape(1, False, 1, "ring", 4, 1, "none")
    assert run_of(one, shape, alone, Spread(1, 16, 1)).layout.overlap == ("gradients",)


def test_a_search_keeps_what_it_is_told_of_experts() -> None:
    run = run_for(16, {"preset": "deepseek-v2-lite"}, seq_len=1024, global_batch=64)
    told = replace(run.layout, expert_send="nodes", overlap=("gradients", "experts"))
    fixed = {"expert": 16, "pipeline": 1, "micro_batch": 1, "tensor": 1, "context": 1, "zero": 1, "shard": 16}
    found, plain = (
        tl.layouts(each, fixed=fixed, limit_seconds=2).best for each in (replace(run, layout=told), run)
    )  # fmt: skip
    assert found is not None
    assert plain is not None
    assert (found.run.layout.expert_send, found.run.layout.overlap) == ("nodes", ("gradients", "experts"))
    assert (plain.run.layout.expert_send, plain.run.layout.overlap) == ("copies", ("gradients",))
    assert found.seconds < plain.seconds


def test_what_makes_experts_send_less_or_beside_compute_is_advised() -> None:
    run = run_for(16, {"preset": "deepseek-v2-lite"}, seq_len=4096, global_batch=256, micro_batch=1)
    run = replace(run, layout=replace(run.layout, shard=16, expert=16))
    found = {each.sets: each for each in tl.advise(run, together=0).alone}
    assert found[("layout.expert_send=nodes",)].faster > 0.01
    beside = next(each for sets, each in found.items() if "experts" in sets[0])
    assert beside.faster > 0.01
    assert "Megatron Core" in beside.cost
    at_once = replace(run, layout=replace(run.layout, expert_send="nodes", overlap=("gradients", "experts")))
    assert not [sets for sets in (each.sets[0] for each in tl.advise(at_once, together=0).alone)
                if sets.startswith(("layout.expert_send", "layout.overlap"))]  # fmt: skip
