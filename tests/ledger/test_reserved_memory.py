"""Memory that frameworks reserve and no live tensor has: which runs have it, and how the allocator takes segments."""

import pytest

import trainledger as tl
from trainledger.ledger.ranks import accounts
from trainledger.ledger.step import new_segments
from trainledger.spec.run import Run

RECIPE = {"seq_len": 1024, "micro_batch": 2, "global_batch": 16, "steps": 1, "precision": "bf16-sharded"}


def _run(**layout: object) -> Run:
    recipe = {**RECIPE, "precision": "bf16-sharded" if layout.get("zero", 3) == 3 else "bf16-mixed"}
    count = 8
    return tl.load({
        "model": {"preset": "gpt2"}, "recipe": recipe, "layout": layout,
        "cluster": {"device": "a100-sxm-80gb", "count": count},
    })  # fmt: skip


def test_fully_sharded_runs_reserve_what_their_streams_have() -> None:
    run = _run(shard=8)
    (rank, *_) = accounts(run, backend="cuda")
    rows = run.model.padded_vocab * run.model.d_model + run.model.max_seq_len * run.model.d_model
    logits = 2 * 1024 * run.model.padded_vocab
    assert rank.ledger.reserved == (("FSDP2's streams", 2 * rows + 4 * rank.ledger.parameters + 2 * logits),)
    plan = tl.plan(run)
    line = next(each for each in plan.device_memory.lines if each.name == "FSDP2's streams")
    assert line.nbytes == rank.ledger.reserved_nbytes
    assert (line.basis, "_fsdp_collectives.py" in line.source) == ("assumed", True)
    assert plan.device_memory.reserved_nbytes >= plan.device_memory.allocated_nbytes + line.nbytes


def test_others_reserve_nothing_that_is_known() -> None:
    for run, backend in ((_run(shard=8), "cpu"), (_run(replicate=8), "cuda"), (_run(shard=8, zero=1), "cuda")):
        assert all(each.ledger.reserved == () for each in accounts(run, backend=backend))
    megatron = tl.load(_run(shard=8, zero=1), {"recipe.framework": "megatron-core"})
    assert all(each.ledger.reserved == () for each in accounts(megatron, backend="cuda"))


def test_deepspeed_keeps_what_stages_send() -> None:
    changes = {"recipe.framework": "deepspeed", "recipe.precision": "fp16", "recipe.attention": "math"}
    run = tl.load(_run(shard=4, zero=1, pipeline=2), changes)
    first, last = accounts(run, backend="cuda")
    activation = 2 * run.device_batch * 1024 * run.model.d_model
    assert dict(first.ledger.reserved)["DeepSpeed's pipeline buffers"] == int(first.in_flight) * activation
    assert dict(last.ledger.reserved)["DeepSpeed's pipeline buffers"] == int(last.in_flight) * activation


@pytest.mark.parametrize(
    ("free", "requests", "taken"),
    [
        ([], [(5,)], 5),
        ([5], [(5,)], 0),
        ([5], [(3,), (3,)], 0),  # one after the other
        ([5], [(3, 3)], 3),  # both at once
        ([4, 6], [(5,)], 0),  # the smallest that is large enough
        ([3, 3], [(6,)], 6),  # segments are never joined
        ([5], [(8,), (2, 8)], 8),  # what was taken once is there from then on
    ],
)
def test_large_blocks_are_taken_as_the_caching_allocator_does(free, requests, taken):
    assert new_segments(free, requests) == taken
