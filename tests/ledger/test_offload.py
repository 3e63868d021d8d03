"""Model states in host memory: what leaves the device, what a host holds, and what goes between them."""

from __future__ import annotations

from math import ceil, log2
from typing import Any

import pytest

import trainledger as tl
from trainledger.ledger.entry import in_any_memory
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import peak_on_host
from trainledger.ledger.ranks import account_run, static_memory
from trainledger.ledger.step import account
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run

RECIPE: dict[str, Any] = {"seq_len": 256, "micro_batch": 1, "steps": 1}


def run_of(offload: str | None, layout: dict[str, Any] | None = None, micro_batches: int = 1, **recipe: Any) -> Run:
    layout = layout or {}
    count = layout.get("shard", 1) * layout.get("replicate", 1) * layout.get("pipeline", 1)
    batch = micro_batches * count // layout.get("pipeline", 1)
    more = {"offload": offload} if offload else {}
    return tl.load({
        "model": {"preset": "gpt2"}, "recipe": {**RECIPE, "global_batch": batch, **recipe, **more}, "layout": layout,
        "cluster": {"device": "a100-sxm-80gb", "count": count},
    })  # fmt: skip


def ledger_of(run: Run) -> Ledger:
    return account_run(run, backend="cuda").heaviest


LAYOUTS = [{"shard": 2}, {"shard": 4, "reshard_after_forward": False}, {"shard": 2, "replicate": 2}]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16-sharded", "bf16"])
def test_states_are_as_large_on_the_host(layout: dict[str, Any], precision: str) -> None:
    there = ledger_of(run_of("parameters", layout, precision=precision))
    here = ledger_of(run_of(None, layout, precision=precision))
    assert in_any_memory(there.resident) == dict(here.resident)
    assert {name for name, _ in there.resident if not name.startswith("host ")} <= {"batch", "buffers"}
    assert there.matmul_flops == here.matmul_flops
    states = sum(nbytes for name, nbytes in there.resident if name.startswith("host "))
    gradients = tl.plan(run_of("parameters", layout, precision=precision)).ranks[0].ledger.parameters * (
        2 if precision == "bf16" else 4
    )
    assert sum(peak_on_host(there).values()) >= states + gradients


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_one_device_sends_each_gradient_and_keeps_the_weights(micro_batches: int) -> None:
    run = run_of("optimizer", micro_batches=micro_batches, precision="bf16", **{"precision.master_weights": True})
    ledger = account(run, backend="cuda")
    sent = dict.fromkeys(("to_host", "to_device"), 0)
    for entry in ledger:
        if entry.name in sent:
            sent[entry.name] += entry.read * entry.times
    n = ledger.parameters
    assert sent == {"to_host": 2 * n * micro_batches, "to_device": 2 * n}
    resident = dict(ledger.resident)
    assert resident["parameters"] == 2 * n
    assert (
        resident["host optimizer state"] == 12 * n + 4 * account_run(run, backend="cuda").tensors
    )  # moments, copy, counters
    assert "gradients" not in ledger.peak().by_category or ledger.peak().by_category["gradients"] < 0.4 * 2 * n
    host = peak_on_host(ledger)
    assert host["host gradients"] >= 2 * n  # and at most the largest of a later micro-batch in addition
    assert host["host gradients"] <= 2 * n + 2 * run.model.padded_vocab * run.model.d_model


def test_whole_gradients_that_ranks_sum_go_once_a_step() -> None:
    for layout in ({"replicate": 2}, {"shard": 2, "zero": 1}, {"pipeline": 2}):
        once, often = (ledger_of(run_of("optimizer", layout, micro_batches)) for micro_batches in (2, 4))
        down = [sum(e.read * e.times for e in ledger if e.name == "to_host") for ledger in (once, often)]
        assert down[0] == down[1] > 0


def test_a_processor_has_one_memory() -> None:
    for offload, layout in (("optimizer", {}), ("parameters", {"shard": 2})):
        there, here = (account_run(run_of(each, layout), backend="cpu").heaviest for each in (offload, None))
        assert there.entries == here.entries
        assert there.resident == here.resident


@pytest.mark.parametrize("layout", [*LAYOUTS, {"shard": 2, "zero": 2}, {"replicate": 2}, {"pipeline": 2}])
def test_static_memory_is_no_more_than_the_peak(layout: dict[str, Any]) -> None:
    for offload in ("optimizer", "parameters"):
        if offload == "parameters" and (layout.get("zero", 3) < 3 or "shard" not in layout):
            continue
        for rank in account_run(run_of(offload, layout, 2), backend="cuda").ranks:
            static = static_memory(rank.plan, backend="cuda")
            assert static.resident + static.gradients <= rank.ledger.peak().nbytes


def test_a_plan_says_what_a_host_holds_and_whether_it_fits() -> None:
    run = run_of("parameters", {"shard": 2}, precision="bf16-sharded")
    plan = tl.plan(run)
    assert plan.host is not None
    assert plan.host.processes == 2
    parts = dict(plan.host.parts)
    n = plan.ranks[0].ledger.parameters
    assert parts["parameters"] == parts["gradients"] == 4 * n
    assert 0 < parts["rounding of pinned memory"] <= 8 * n
    assert plan.host.node == 2 * plan.host.process
    assert plan.host.fits is None
    small = tl.plan(run, {"cluster.host_memory_nbytes": "1GB"})
    assert small.host is not None
    assert small.host.fits is False
    assert "host" in str(tl.plan(run_of(None), {"cluster.host_memory_nbytes": "1GB"}).host).lower()
    assert tl.plan(run_of(None)).host is None


# DeepSpeed pins one flat buffer each of fp32 weights, fp32 gradients and 16-bit weights; moments are not pinned.
@pytest.mark.parametrize("layout", [{}, {"shard": 2, "zero": 2}])
@pytest.mark.parametrize("precision", ["fp32", {"kind": "bf16", "master_weights": True}])
def test_flat_buffers_of_an_optimizer_on_the_host_are_rounded_up(layout: dict[str, Any], precision: Any) -> None:
    plan = tl.plan(run_of("optimizer", layout, precision=precision))
    assert plan.host is not None
    n = plan.ranks[0].plan.owned.elements() if plan.ranks else plan.ledger.parameters
    low = [2 * n] if plan.run.recipe.precision.gradients == "bf16" else []
    pinned = [4 * n, 4 * n, *low]
    assert dict(plan.host.parts)["rounding of pinned memory"] == sum(2 ** ceil(log2(each)) - each for each in pinned)
    assert plan.host.loading == plan.host.processes * plan.host.model


def test_a_host_updates_in_proportion_to_its_processes() -> None:
    one, two = (tl.plan(run_of("optimizer", layout)) for layout in ({"replicate": 1}, {"replicate": 2}))
    bars = [{bar.cause: bar.nanoseconds for bar in plan.forecast.waterfall} for plan in (one, two)]
    seconds = [found["update on the host"] for found in bars]
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=1e-6)
    quick = tl.plan(run_of("optimizer"), {"cluster.host_update_bytes_per_second": "1000GB/s"})
    assert {bar.cause: bar.nanoseconds for bar in quick.forecast.waterfall}["update on the host"] < seconds[0]


@pytest.mark.long
def test_offloading_is_advised_where_memory_is_short_alone() -> None:
    small, large = (
        tl.advise("llama-3-8b", {"method": "full", "cluster.device": device, "cluster.count": 8, "layout.shard": 8})
        for device in ("rtx-3090", "h200")
    )
    offered = {advised.sets for advised in (*small.alone, *large.alone) if "recipe.offload" in str(advised.sets)}
    assert ("recipe.offload=parameters",) in offered
    assert not any("recipe.offload" in str(advised.sets) for advised in large.alone)


def test_what_is_refused_names_what_works() -> None:
    for offload, layout, more, said in (
        (
            "parameters",
            {"replicate": 2},
            {},
            "needs layout.zero = 3 and layout.shard above 1; nearest that works: optimizer",
        ),
        ("parameters", {"shard": 2, "zero": 2}, {}, "nearest that works: optimizer"),
        ("optimizer", {}, {"compile": True}, "recipe.compile = true: is not accounted for with states on the host"),
    ):
        with pytest.raises(InvalidInput) as refused:
            run_of(offload, layout, **more)
        assert said in str(refused.value)


def test_a_search_keeps_an_optimizer_on_the_host() -> None:
    found = tl.layouts(run_of("optimizer", {"shard": 4}, 16), limit_seconds=5)
    assert found.best is not None
    with pytest.raises(InvalidInput, match=r"recipe.offload = 'parameters': is not searched .*works: optimizer"):
        tl.layouts(run_of("parameters", {"shard": 4}, 16))
