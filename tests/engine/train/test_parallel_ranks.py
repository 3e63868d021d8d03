"""Real processes against the ledger: what each rank of an FSDP2, tensor-parallel or DDP run holds and sends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from trainledger.answers.load import load
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.parallel.rank_plan import rank_plan
from trainledger.ledger.ranks import accounts
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.run import Run

pytestmark = pytest.mark.process

LLAMA: dict[str, Any] = {
    "vocab_size": 96,
    "d_model": 32,
    "n_layers": 3,
    "attention.n_heads": 4,
    "attention.n_kv_heads": 2,
    "feed_forward.d_ff": 80,
    "max_seq_len": 16,
}
GPT2: dict[str, Any] = {
    **LLAMA,
    "attention.n_kv_heads": 4,
    "norm": "layernorm",
    "norm.bias": True,
    "feed_forward.activation": "gelu_tanh",
    "feed_forward.gated": False,
    "positions": "learned",
    "attention.bias": True,
    "feed_forward.bias": True,
    "tie_embeddings": True,
}
RECIPE: dict[str, Any] = {"seq_len": 16, "global_batch": 8, "micro_batch": 2, "steps": 3}
WITNESS = Path(__file__).with_name("rank_witness.py")

TWO = {
    "fsdp": ({"shard": 2}, {}, {}),
    "fsdp, odd sizes": (
        {"shard": 2},
        {"feed_forward.d_ff": 81, "vocab_size": 97, "d_model": 33, "attention.head_dim": 8},
        {},
    ),
    "fsdp, kept": ({"shard": 2, "reshard_after_forward": False}, GPT2, {}),
    "tensor": ({"tensor": 2}, {}, {}),
    "tensor and sequence": ({"tensor": 2, "sequence_parallel": True}, {}, {"micro_batch": 4}),
    "gathered again": ({"tensor": 2, "sequence_parallel": True, "sequence_gather": "again"}, {}, {"micro_batch": 4}),
    "ddp": ({"replicate": 2}, {}, {"global_batch": 4}),
    "fsdp, fp8 of shards in bf16": ({"shard": 2}, {}, {"precision": "fp8-tensorwise-sharded"}),
}
TWO_MORE = {
    "fsdp, two ahead": ({"shard": 2, "prefetch": 2}, {"n_layers": 5}, {}),
    "fsdp, checkpointed": ({"shard": 2}, {}, {"activation_checkpointing": "full"}),
    "fsdp, one layer": ({"shard": 2}, {"n_layers": 1}, {"global_batch": 4}),
    "fsdp, bf16": ({"shard": 2}, {}, {"precision": "bf16-mixed"}),
    "tensor, gpt2": ({"tensor": 2}, GPT2, {}),
    "tensor and sequence, gpt2": ({"tensor": 2, "sequence_parallel": True}, GPT2, {}),
    "gathered again, gpt2": ({"tensor": 2, "sequence_parallel": True, "sequence_gather": "again"}, GPT2, {}),
    "tensor, normed heads": ({"tensor": 2}, {"attention.qk_norm": "head"}, {}),
    "fsdp, chunked loss": ({"shard": 2}, {}, {"loss": "chunked", "loss.chunks": 4}),
    "fsdp, shards in bf16": ({"shard": 2}, {}, {"precision": "bf16-sharded"}),
    "fsdp, experts": (
        {"shard": 2},
        {
            "feed_forward": "experts",
            "feed_forward.n_experts": 4,
            "feed_forward.per_token": 2,
            "feed_forward.expert_d_ff": 16,
        },
        {},
    ),
    "fsdp, kept, fp8 of shards in bf16": (
        {"shard": 2, "reshard_after_forward": False},
        GPT2,
        {"precision": "fp8-tensorwise-sharded"},
    ),
    "fsdp, fp8": ({"shard": 2}, {}, {"precision": "fp8-tensorwise", "activation_checkpointing": "full"}),
    "tensor, fp8": (
        {"tensor": 2},
        {"feed_forward.d_ff": 96, "attention.head_dim": 16},
        {"precision": "fp8-tensorwise"},
    ),
    "tensor and sequence, gpt2, fp8": (
        {"tensor": 2, "sequence_parallel": True},
        {**GPT2, "feed_forward.d_ff": 96, "attention.head_dim": 16},
        {"precision": "fp8-tensorwise"},
    ),
    "tensor, bf16": ({"tensor": 2}, {}, {"precision": "bf16-mixed"}),
    "ddp, large": ({"replicate": 2}, {"d_model": 512, "feed_forward.d_ff": 2048, "n_layers": 4}, {"global_batch": 4}),
}
FOUR = {
    "fsdp x tensor": ({"shard": 2, "tensor": 2, "sequence_parallel": True}, {}, {}),
    "hybrid": ({"shard": 2, "replicate": 2}, {}, {"global_batch": 8}),
    "fsdp over four, odd sizes": (
        {"shard": 4},
        {
            "feed_forward.d_ff": 81,
            "vocab_size": 97,
            "d_model": 33,
            "attention.n_heads": 3,
            "attention.head_dim": 6,
            "attention.n_kv_heads": 3,
        },
        {},
    ),
    "fsdp x tensor, fp8 of shards in bf16": (
        {"shard": 2, "tensor": 2, "sequence_parallel": True},
        {"feed_forward.d_ff": 96, "attention.head_dim": 16},
        {"precision": "fp8-tensorwise-sharded"},
    ),
    "hybrid, fp8 of shards in bf16": ({"shard": 2, "replicate": 2}, {}, {"precision": "fp8-tensorwise-sharded"}),
    "tensor over four": ({"tensor": 4}, {**GPT2}, {}),
}

Case = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def tables(case: Case) -> dict[str, Any]:
    layout, model, recipe = case
    teacher = {"teacher": {**LLAMA, **recipe["teacher"]}} if "teacher" in recipe else {}
    recipe = {name: value for name, value in recipe.items() if name != "teacher"}
    devices = 1
    for axis in ("replicate", "shard", "context", "tensor"):
        devices *= layout.get(axis, 1)
    return {
        "model": {**LLAMA, **model}, "recipe": {**RECIPE, **recipe}, "layout": layout, "cluster": {"count": devices},
        **teacher,
    }  # fmt: skip


def run_for_real(
    cases: dict[str, Case], world: int, folder: Path, *, fake: bool = False, peft: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """The facts of every case, rank by rank; in a ``fake`` world those of the first rank only."""
    told = folder / "cases.json"
    by_name = {name: tables(case) for name, case in cases.items()}
    told.write_text(json.dumps({"world": world, "fake": fake, "peft": peft, "cases": by_name}))
    outs = [folder / f"rank{rank}.json" for rank in range(1 if fake else world)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(WITNESS), str(told), str(rank), str(out)], env=environment, stderr=subprocess.PIPE,
            text=True,
        )
        for rank, out in enumerate(outs)
    ]  # fmt: skip
    errors = [each.communicate(timeout=300)[1] for each in processes]
    assert all(out.exists() for out in outs), "\n".join(errors)[-4000:]
    facts = [json.loads(out.read_text()) for out in outs]
    return {name: [each[name] for each in facts] for name in cases}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return run_for_real(TWO, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", TWO)
def test_a_rank_of_two_is_what_the_ledger_says(two: dict[str, list[dict[str, Any]]], name: str) -> None:
    check(load(tables(TWO[name])), two[name])


def test_a_layout_does_not_change_the_losses(two: dict[str, list[dict[str, Any]]]) -> None:
    halves = [rank["losses"] for rank in two["fsdp"]]  # each has its half of the batch
    mean = [sum(each) / 2 for each in zip(*halves, strict=True)]
    assert halves[0] != halves[1]
    for name in ("tensor", "tensor and sequence", "gathered again"):
        for rank in two[name]:
            assert rank["losses"] == pytest.approx(mean, rel=1e-5)


@pytest.mark.slow
def test_more_of_two_ranks(tmp_path: Path) -> None:
    for name, ranks in run_for_real(TWO_MORE, 2, tmp_path).items():
        check(load(tables(TWO_MORE[name])), ranks)


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    for name, ranks in run_for_real(FOUR, 4, tmp_path).items():
        check(load(tables(FOUR[name])), ranks)


@pytest.mark.slow
def test_the_first_of_many_ranks(tmp_path: Path) -> None:
    sizes = {"d_model": 256, "feed_forward.d_ff": 512, "vocab_size": 1024, "attention.n_kv_heads": 4, "n_layers": 4}
    layout = {"replicate": 2, "shard": 16, "tensor": 4, "sequence_parallel": True}
    case: Case = (layout, sizes, {"global_batch": 64, "micro_batch": 1})
    (ranks,) = run_for_real({"many": case}, 128, tmp_path, fake=True).values()
    check(load(tables(case)), ranks)


def check(run: Run, ranks: list[dict[str, Any]]) -> None:
    """Equal as integers, the peak within 1 %."""
    told, layout = ledgers_by_rank(run), run.layout
    for rank, (facts, ledger) in enumerate(zip(ranks, told, strict=False)):
        assert sent(ledger) == Counter({tuple(key): times for *key, times in facts["collectives"]}), rank
        resident = dict(ledger.resident)
        assert resident["parameters"] + resident.get("frozen weights", 0) == facts["parameters"]
        assert resident["optimizer state"] == facts["optimizer state"]
        assert ledger.parameters == facts["elements"]
        owned = rank_plan(run, place=rank // layout.tensor % layout.shard_ranks).owned
        assert facts["gradients"] == nbytes_in(owned.elements(), run.recipe.precision.gradients)
        # gloo holds what it reads into another tensor until its thread lets go of it, unlike NCCL: where collectives do
        # nothing the peak is the ledger's to the byte.
        apart = [each.payload for each in ledger if each.name in ("reduce_scatter", "all_to_all")]
        held = max(apart, default=0) if run.layout.shard_ranks > 1 else 0
        assert ledger.peak().nbytes + held >= 0.99 * facts["peak"]
        assert ledger.peak().nbytes <= 1.01 * facts["peak"]


def ledgers_by_rank(run: Run) -> list[Ledger]:
    """The ledger of every rank in the order of the mesh: replicas outermost, then shards, then tensor ranks."""
    layout = run.layout
    places: list[Ledger] = []
    for rank in accounts(run):
        places += [rank.ledger] * (rank.count // (layout.replicate * layout.tensor))
    return [
        places[place]
        for _ in range(layout.replicate)
        for place in range(layout.shard_ranks)
        for _ in range(layout.tensor)
    ]


def sent(ledger: Ledger) -> Counter[tuple[str, str, int, int]]:
    found: Counter[tuple[str, str, int, int]] = Counter()
    for each in ledger:
        if each.kind == "collective":
            phase = "backward" if each.phase == "recompute" else each.phase
            found[phase, each.name, each.payload, each.ranks] += each.times
    return found
