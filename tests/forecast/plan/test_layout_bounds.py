"""No layout that fits is rejected: the search's bound of bytes is never above the account, in the corners either."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_layout_search import bounded, run_for

import trainledger as tl
from trainledger.forecast.plan.layouts.grid import grid_of, runs_of, whole
from trainledger.spec.parts import with_fields
from trainledger.spec.problem import InvalidInput

pytestmark = pytest.mark.agreement

ONE = {"context": 1, "micro_batch": 1}
# model, devices, recipe, layout, what is fixed of the grid, draws
CORNERS: dict[str, tuple[Any, int, dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    # A rank's part of the head is small there, and layers are what peaks.
    "tensor ranks beyond key-value heads and a node": (
        "llama-3-8b", 64, {"seq_len": 2048, "precision": "bf16-mixed"}, {}, {"tensor": 32, "context": 1}, 12,
    ),
    "the same compiled": (
        "llama-3-8b", 64, {"seq_len": 2048, "precision": "bf16-mixed", "compile": True}, {},
        {"tensor": 32, "context": 1, "activation_checkpointing": "full"}, 8,
    ),
    "sequence parallel, gathered again": (
        "llama-3-70b", 64, {"seq_len": 1024}, {"sequence_gather": "again"},
        {**ONE, "tensor": 16, "sequence_parallel": True}, 6,
    ),
    "a head that widens what it reads": (
        "gemma-3-12b", 64, {"seq_len": 4096, "global_batch": 256}, {},
        {"tensor": 2, "shard": 2, "pipeline": 8, "schedule": "gpipe", "context": 1, "micro_batch": 64, "zero": 3,
         "activation_checkpointing": "full"}, 4,
    ),
    "a head that is the embedding": (
        "mpt-7b", 64, {"seq_len": 512, "global_batch": 16, "precision": "bf16-mixed"}, {},
        {"tensor": 32, "pipeline": 2, "activation_checkpointing": "none", "schedule": "zero-bubble"}, 6,
    ),
    "norms behind the branches": (
        "olmo-2-7b", 128, {"seq_len": 1024, "precision": "fp8-block", "attention": "flash"}, {},
        {"tensor": 1, "context": 1, "pipeline": 8, "activation_checkpointing": "none", "schedule": "gpipe"}, 6,
    ),
    "experts that no other rank holds": (
        "mixtral-8x7b", 256, {"seq_len": 2048, "global_batch": 128, "precision": "bf16-mixed"},
        {"expert_send": "nodes"}, {"tensor": 4, "shard": 2, "pipeline": 32, "expert": 2, "context": 1}, 6,
    ),
    "experts, ZeRO 1": ("qwen3-30b-a3b", 32, {"seq_len": 1024}, {}, {**ONE, "zero": 1, "tensor": 1, "expert": 8}, 4),
    "experts, ZeRO 2": ("qwen3-30b-a3b", 32, {"seq_len": 1024}, {}, {**ONE, "zero": 2, "tensor": 1, "expert": 8}, 4),
    "experts of modules that predict ahead": (
        {"preset": "deepseek-v2-lite", "n_mtp_layers": 1}, 4,
        {"seq_len": 4096, "global_batch": 16, "precision": "bf16-mixed", "attention": "cudnn"}, {},
        {"shard": 4, "expert": 4, "zero": 3, "pipeline": 1, "context": 1, "micro_batch": 4}, 6,
    ),
    "matmuls in 8 bits of gathered parameters": (
        "llama-3-70b", 64, {"seq_len": 4096, "global_batch": 64, "precision": "fp8-tensorwise-sharded"}, {},
        {**ONE, "tensor": 8, "pipeline": 1, "context": 1}, 4,
    ),
    "virtual stages": ("llama-3-8b", 32, {"seq_len": 1024}, {}, {**ONE, "schedule": "interleaved", "pipeline": 4}, 6),
    "uneven stages": ("llama-3.1-405b", 64, {"seq_len": 1024}, {}, {**ONE, "pipeline": 16, "tensor": 4}, 4),
    "experts compiled": (
        "qwen3-30b-a3b", 32, {"seq_len": 1024, "compile": True, "activation_checkpointing": "selective"}, {},
        {**ONE, "tensor": 1, "expert": 1, "activation_checkpointing": "selective"}, 4,
    ),
    "latent attention compiled": (
        "deepseek-v2-lite", 32, {"seq_len": 1024, "compile": True}, {},
        {**ONE, "tensor": 1, "expert": 1, "pipeline": 2, "activation_checkpointing": "none"}, 4,
    ),
    "context ranks": ("llama-3-8b", 64, {"seq_len": 4096}, {}, {"context": 8, "micro_batch": 1}, 8),
    "offloaded": (
        "gpt-j-6b", 8, {"seq_len": 1024, "activation_checkpointing": "offload"}, {},
        {"activation_checkpointing": "offload", "pipeline": 4, "context": 1}, 6,
    ),
    "attention made again, parameters gathered once": (
        "llama-3.1-405b", 32, {"seq_len": 4096, "precision": "fp8-block", "activation_checkpointing": "attention"}, {},
        {**ONE, "tensor": 1, "pipeline": 16, "activation_checkpointing": "attention", "reshard_after_forward": False}, 3
    ),
    "sums over tensor ranks behind segments": (
        "qwen3-30b-a3b", 8, {"seq_len": 1024, "precision": "bf16-mixed", "activation_checkpointing": "segments",
                             "global_batch": 32},
        {}, {"tensor": 2, "context": 1, "pipeline": 1, "zero": 1, "expert": 4, "micro_batch": 4,
             "activation_checkpointing": "segments"}, 4,
    ),
    "segments of which a stage has one layer": (
        "llama-3.1-405b", 1024, {"seq_len": 512, "activation_checkpointing": "segments", "global_batch": 4096}, {},
        {"tensor": 8, "pipeline": 128, "context": 1, "micro_batch": 16, "schedule": "zero-bubble",
         "activation_checkpointing": "segments"}, 2,
    ),
    "adapters beside weights in several formats": (
        "gpt2", 8, {"seq_len": 512, "precision": "bf16-mixed", "lora.rank": 64, "lora.base_format": "int8"}, {}, {}, 12,
    ),
    "adapters over tensor ranks": (
        "llama-3-8b", 8, {"seq_len": 512, "precision": "bf16", "lora.rank": 64}, {}, {"tensor": 2, "context": 1}, 8,
    ),
    "adapters on experts": (
        "mixtral-8x7b", 8,
        {"seq_len": 512, "precision": "bf16", "lora.rank": 16, "lora.targets": ("linear", "experts")}, {},
        {"tensor": 1, "context": 1, "pipeline": 1}, 12,
    ),
    "segments": (
        "mistral-7b", 32, {"seq_len": 512, "activation_checkpointing": "segments"}, {},
        {"pipeline": 16, "zero": 3, "context": 1, "activation_checkpointing": "segments"}, 6,
    ),
}  # fmt: skip


@pytest.mark.parametrize("corner", CORNERS)
def test_bounds_are_below_the_account_in_the_corners(corner: str) -> None:
    name, devices, recipe, layout, fixed, draws = CORNERS[corner]
    model = name if isinstance(name, dict) else {"preset": name}
    run = run_for(devices, model, **{"global_batch": devices, **recipe})
    run = replace(run, layout=replace(run.layout, **layout))
    found = list(bounded(run, draws, 5, fixed))
    assert len(found) > draws // 2
    for nbytes, _, one in found:
        assert 0.2 < nbytes <= 1, (nbytes, one.layout, one.recipe)


# device, and the rest as in CORNERS: where bounds in seconds were above the account, by up to what stands behind
SECONDS: dict[str, tuple[str, str, int, dict[str, Any], dict[str, Any]]] = {
    "compiled kernels that make gradients and add them": (  # 12 %
        "h100-sxm", "gpt-oss-20b", 4,
        {"seq_len": 1024, "global_batch": 16, "attention": "flash", "compile": True},
        {**ONE, "micro_batch": 2, "tensor": 2, "shard": 2, "zero": 1, "pipeline": 1, "expert": 1,
         "activation_checkpointing": "none"},
    ),
    "a compiled pipeline": (  # 17 %
        "a100-sxm-80gb", "deepseek-v2-lite", 32, {"seq_len": 1024, "global_batch": 64, "compile": True},
        {**ONE, "tensor": 1, "shard": 8, "zero": 1, "expert": 1, "pipeline": 4, "schedule": "gpipe",
         "activation_checkpointing": "none"},
    ),
    "gathered once for a single micro-batch": (  # 11 %
        "h800-sxm", "gpt2-medium", 4, {"seq_len": 512, "global_batch": 4, "precision": "bf16"},
        {"micro_batch": 4, "context": 2, "context_kind": "ring", "shard": 1, "zero": 3, "pipeline": 2,
         "schedule": "gpipe", "activation_checkpointing": "none", "reshard_after_forward": False},
    ),
    "copies of experts that no other rank holds": (  # 3 %
        "h100-sxm", "mixtral-8x7b", 16, {"seq_len": 512, "global_batch": 32, "precision": "bf16-mixed"},
        {"micro_batch": 4, "context": 1, "tensor": 2, "sequence_parallel": False, "shard": 8, "zero": 3, "expert": 8,
         "pipeline": 1, "activation_checkpointing": "none", "reshard_after_forward": True},
    ),
    "states over many ranks, whose hops are not in proportion to bytes": (  # 31 %
        "h100-sxm", "qwen3-30b-a3b", 256, {"seq_len": 2048, "global_batch": 512, "compile": True},
        {**ONE, "tensor": 1, "expert": 1, "shard": 256, "zero": 1, "pipeline": 1, "activation_checkpointing": "full"},
    ),
    "a part of a segment on a stage": (  # 5 %
        "h100-sxm", "llama-3-70b", 32,
        {"seq_len": 4096, "global_batch": 128, "precision": "bf16", "activation_checkpointing": "segments"},
        {"context": 1, "micro_batch": 8, "tensor": 16, "sequence_parallel": True, "shard": 1, "replicate": 1,
         "pipeline": 2, "schedule": "interleaved", "activation_checkpointing": "segments"},
    ),
    "gradients added beside their sum over replicas": (  # 2 %
        "h800-sxm", "llama-3-8b", 4, {"seq_len": 512, "global_batch": 4},
        {**ONE, "tensor": 2, "sequence_parallel": False, "replicate": 2, "shard": 1, "pipeline": 1,
         "activation_checkpointing": "full"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("corner", SECONDS)
def test_bounds_in_seconds_are_not_above_the_account(corner: str) -> None:
    device, name, devices, recipe, fixed = SECONDS[corner]
    run = run_for(devices, {"preset": name}, **recipe)
    run = replace(run, cluster=replace(run.cluster, device=device))
    found = list(bounded(run, 3, 5, fixed))
    assert found
    for _, seconds, one in found:
        assert 0.9 < seconds < 1.003, (seconds, one.layout, one.recipe)


def test_runs_of_layers_are_alike_in_every_way_of_recomputing() -> None:
    run = whole(run_for(4, {"preset": "llama-3-70b"}, seq_len=1024, activation_checkpointing="segments"))
    assert runs_of(run) == [72, 8]  # groups of nine, and what is left of them
    assert runs_of(replace(run, recipe=with_fields(run.recipe, {"activation_checkpointing": "none"}))) == [80]
    fixed = {"activation_checkpointing": "segments"}
    plain = replace(run, recipe=with_fields(run.recipe, {"activation_checkpointing": "none"}))
    assert runs_of(grid_of(plain, 4, fixed).run) == [72, 8]


@pytest.mark.parametrize(("own", "fixed"), [("segments", {}), ("none", {"activation_checkpointing": "segments"})])
def test_segments_are_searched_where_they_do_not_go_evenly(own: str, fixed: dict[str, Any]) -> None:
    """Twenty-four layers in fives: nothing else cuts them there."""
    run = run_for(2, {"preset": "gpt2-medium"}, seq_len=512, activation_checkpointing=own)
    found = tl.layouts(run, fixed={"micro_batch": 1, "pipeline": 1, **fixed}, keep=1)
    assert found.best is not None
    assert found.best.seconds == pytest.approx(tl.predict(found.best.run).step_seconds)
    assert (found.best.run.recipe.activation_checkpointing.kind == "segments") is bool(fixed)


@pytest.mark.parametrize("fixed", [{}, {"activation_checkpointing": "from-start"}])
def test_recomputation_from_the_start_are_refused_with_a_sentence(fixed: dict[str, Any]) -> None:
    again = "none" if fixed else "from-start"
    run = run_for(4, {"preset": "gpt2"}, seq_len=512, precision="fp32", activation_checkpointing=again)
    with pytest.raises(InvalidInput, match=r"= 'from-start': is not searched: .*; nearest that works: full"):
        tl.layouts(run, fixed=fixed)
