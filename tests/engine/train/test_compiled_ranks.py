"""Ranks whose blocks are compiled: the closed form against the compiler's own code in worlds of any size.

What stands behind the traces is one real run of two processes, whose allocator tells the same bytes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_fake_worlds import program_of, told
from test_parallel_ranks import GPT2, LLAMA, Case, ledgers_by_rank, tables
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from trainledger.answers.load import load
from trainledger.engine.nn.loss import compiled_loss, next_token_loss
from trainledger.engine.nn.transformer import build, run_layers
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.parallel.rank_plan import rank_plan
from trainledger.ledger.parallel.schedule import in_flight
from trainledger.ledger.ranks import account_of_stage
from trainledger.spec.run import Run
from trainledger.trace.distributed import trace_rank
from trainledger.trace.step import trace_step

pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler on a CPU"
)
WITNESS = Path(__file__).with_name("compiled_rank.py")
LAYERS = {name: value for name, value in GPT2.items() if name not in LLAMA}
SIZES: dict[str, Any] = {
    "d_model": 128,
    "feed_forward.d_ff": 384,
    "vocab_size": 256,
    "attention.n_heads": 4,
    "attention.n_kv_heads": 4,
    "n_layers": 3,
    "max_seq_len": 128,
}
RECIPE: dict[str, Any] = {"seq_len": 128, "global_batch": 8, "micro_batch": 4, "compile": True}
AGAIN, SELECTIVE, MIXED, SHARDED = (
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "selective"},
    {"precision": "bf16-mixed"},
    {"precision": "bf16-sharded"},
)
LATENT = {
    "attention": "latent",
    "attention.kv_rank": 64,
    "attention.nope_head_dim": 32,
    "attention.rope_head_dim": 16,
    "attention.v_head_dim": 32,
    "attention.n_kv_heads": None,
}
EXPERTS = {
    "feed_forward": "experts",
    "feed_forward.n_experts": 4,
    "feed_forward.per_token": 2,
    "feed_forward.expert_d_ff": 192,
}
SEQUENCE = {"tensor": 2, "sequence_parallel": True}
QUICK: dict[str, Case] = {
    "fsdp": ({"shard": 2}, {}, {}),
    "fsdp, shards in bf16, checkpointed": ({"shard": 2}, {}, {**AGAIN, **SHARDED}),
    "fsdp x tensor": ({"shard": 2, **SEQUENCE}, {}, SHARDED),
    "fsdp, selective": ({"shard": 2}, {"attention.n_kv_heads": 2}, {**SELECTIVE, **SHARDED}),
    "fsdp, the loss too": ({"shard": 2}, {"vocab_size": 8192}, {**SELECTIVE, **SHARDED, "loss": "compiled"}),
    "fsdp, latent attention and experts": ({"shard": 2}, {**LATENT, **EXPERTS, "feed_forward.n_shared": 1}, SHARDED),
}
MORE: dict[str, Case] = {
    "fsdp, latent attention": ({"shard": 2}, {**LATENT, "attention.q_rank": 96}, {}),
    "fsdp, latent attention, selective": ({"shard": 2}, LATENT, {**SELECTIVE, **SHARDED}),
    "ddp, latent attention, checkpointed": ({"replicate": 2}, LATENT, {**AGAIN, **MIXED}),
    "fsdp, experts, two micro-batches": ({"shard": 2}, EXPERTS, {"global_batch": 16}),
    "fsdp, experts in balance": ({"shard": 2}, EXPERTS, {**SHARDED, "load_balance_loss": 0.01}),
    "fsdp, gpt2, kept": ({"shard": 2, "reshard_after_forward": False}, LAYERS, {}),
    "fsdp, two ahead": ({"shard": 2, "prefetch": 2}, {"n_layers": 5}, {}),
    "fsdp, every other block": ({"shard": 2}, {"n_layers": 4}, {**AGAIN, "activation_checkpointing.every": 2}),
    "fsdp, bf16": ({"shard": 2}, {}, MIXED),
    "fsdp, bf16, checkpointed": ({"shard": 2}, {}, {**AGAIN, **MIXED}),
    "fsdp, odd sizes": (
        {"shard": 2},
        {"feed_forward.d_ff": 385, "vocab_size": 97, "d_model": 129, "attention.head_dim": 32},
        {},
    ),
    "fsdp over a thousand": ({"shard": 1024}, {}, {"global_batch": 1024, "micro_batch": 1}),
    "fsdp, two micro-batches": ({"shard": 2}, {}, {"global_batch": 16}),
    "hybrid": ({"shard": 2, "replicate": 2}, {}, {"global_batch": 16}),
    "ddp": ({"replicate": 2}, {}, {}),
    "ddp, bf16, checkpointed": ({"replicate": 2}, {}, {**AGAIN, **MIXED}),
    "ddp, segments": ({"replicate": 2}, {"n_layers": 4}, {"activation_checkpointing": "segments"}),
    "tensor": ({"tensor": 2}, {}, {}),
    "tensor and sequence": (SEQUENCE, {}, {}),
    "tensor and sequence, one sequence": (SEQUENCE, {}, {"micro_batch": 1, "global_batch": 2}),
    "tensor, gpt2": ({"tensor": 2}, LAYERS, {}),
    "tensor and sequence, bf16": (SEQUENCE, {}, MIXED),
    "tensor, normed heads": ({"tensor": 2}, {"attention.qk_norm": "head"}, {}),
    "tensor and sequence, sandwich": (SEQUENCE, {"norm_place": "sandwich", "norm.plus_one": True}, {}),
    "tensor and sequence, relu": (SEQUENCE, {**LAYERS, "feed_forward.activation": "relu"}, {}),
    "tensor, parallel branches": ({"tensor": 2}, {**LAYERS, "block": "parallel"}, {}),
    "tensor, attention written out": ({"tensor": 2}, {"attention.n_kv_heads": 2}, {"attention": "math"}),
    "tensor over four": ({"tensor": 4}, {}, {}),
    "fsdp, selective, fp32": ({"shard": 2}, {}, SELECTIVE),
    "fsdp, selective, bf16": ({"shard": 2}, {}, {**SELECTIVE, **MIXED}),
    "fsdp, selective, gpt2": ({"shard": 2}, LAYERS, {**SELECTIVE, **SHARDED}),
    "fsdp, selective, attention alone": (
        {"shard": 2},
        {},
        {**SELECTIVE, **SHARDED, "activation_checkpointing.keep": ["attention"]},
    ),
    "fsdp, selective, every other": (
        {"shard": 2},
        {"n_layers": 4},
        {**SELECTIVE, **SHARDED, "activation_checkpointing.every": 2},
    ),
    "fsdp, selective, gathered once": ({"shard": 2, "reshard_after_forward": False}, {}, SELECTIVE),
    "fsdp, selective, two micro-batches": ({"shard": 2}, {}, {**SELECTIVE, "global_batch": 16}),
    "hybrid, selective": ({"shard": 2, "replicate": 2}, {}, {**SELECTIVE, "global_batch": 16}),
    "ddp, the loss too": ({"replicate": 2}, {"vocab_size": 8192}, {**MIXED, "loss": "compiled"}),
    "hybrid, the loss too, two micro-batches": (
        {"shard": 2, "replicate": 2},
        {"vocab_size": 8192},
        {"loss": "compiled", "global_batch": 32},
    ),
    "ddp, selective": ({"replicate": 2}, {}, {**SELECTIVE, **MIXED}),
    "tensor, selective": ({"tensor": 2}, {}, SELECTIVE),
    "tensor and sequence, selective": (SEQUENCE, {}, SELECTIVE),
    "fsdp x tensor, selective": ({"shard": 2, **SEQUENCE}, {}, {**SELECTIVE, **SHARDED}),
}
# Gradients of expert weights are cast in kernels together with others where a CPU's compiler joins their loops.
EXPERTS_AGAIN: dict[str, Case] = {
    "fsdp, experts, checkpointed": ({"shard": 2}, EXPERTS, {**AGAIN, **SHARDED}),
    "fsdp, experts, selective": ({"shard": 2}, EXPERTS, {**SELECTIVE, **SHARDED}),
}
# Checkpointed by the engine, a compiled block runs again to its end, with the sum over the ranks that nobody reads.
TO_THE_END: dict[str, Case] = {
    "tensor, checkpointed": ({"tensor": 2}, {}, AGAIN),
    "tensor and sequence, checkpointed": (SEQUENCE, {}, AGAIN),
    "tensor and sequence, bf16, checkpointed": (SEQUENCE, {}, {**AGAIN, **MIXED}),
    "fsdp x tensor, checkpointed": ({"shard": 2, **SEQUENCE}, {}, {**AGAIN, **SHARDED}),
}


def run_of(case: Case) -> Run:
    layout, model, recipe = case
    told = tables((layout, {**SIZES, **model}, {**RECIPE, **recipe}))
    told["model"] = {name: each for name, each in told["model"].items() if each is not None}
    told["cluster"]["count"] *= layout.get("pipeline", 1)
    return load(told)


def same(case: Case, *, near: float) -> None:
    """Nothing left out or said; kept bytes equal, the peak near."""
    run = run_of(case)
    traced, closed = trace_rank(program_of(run), world_size=run.layout.devices), ledgers_by_rank(run)[0]
    assert not traced.partial
    assert (traced.notes, traced.uncounted, closed.notes) == ((), (), ())
    batch = dict(closed.resident)["batch"]  # a loss that is split keeps another copy of the targets
    assert 0 <= traced.kept_nbytes - closed.kept_nbytes <= batch
    assert closed.peak().nbytes == pytest.approx(traced.peak().nbytes, rel=near)


@pytest.mark.agreement
@pytest.mark.parametrize("name", QUICK)
def test_a_rank_with_compiled_blocks_is_what_the_closed_form_says(name: str) -> None:
    same(QUICK[name], near=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_other_ranks_with_compiled_blocks(name: str) -> None:
    same(MORE[name], near=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERTS_AGAIN)
def test_experts_that_run_again(name: str) -> None:
    same(EXPERTS_AGAIN[name], near=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", TO_THE_END)
def test_tensor_ranks_that_run_blocks_again(name: str) -> None:
    same(TO_THE_END[name], near=0.04 if torch.__version__ >= (2, 12) else 0.06)


@pytest.mark.agreement
def test_what_is_sent_is_what_eager_blocks_send() -> None:
    run = run_of(QUICK["fsdp x tensor"])
    traced, closed = trace_rank(program_of(run), world_size=4), ledgers_by_rank(run)[0]
    sent = told(closed)
    if torch.__version__ >= (2, 15):  # FSDP2 sums norms' gradients over tensor ranks in the format that it reduces in
        in_bf16, in_fp32 = (("backward", "all_reduce", size * run.model.d_model, 2) for size in (2, 4))
        sent[in_fp32] += sent.pop(in_bf16)
    assert told(traced) == sent


# Two processes


@pytest.mark.slow
def test_the_allocator_of_two_processes_tells_the_same(tmp_path: Path) -> None:
    cases = {
        "plain": QUICK["fsdp"],
        "checkpointed": QUICK["fsdp, shards in bf16, checkpointed"],
        "selective": MORE["fsdp, selective, fp32"],
    }
    given = {name: tables((layout, SIZES, {**RECIPE, **recipe})) for name, (layout, _, recipe) in cases.items()}
    (tmp_path / "cases.json").write_text(json.dumps(given))
    outs = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(WITNESS), str(tmp_path / "cases.json"), str(rank), str(out)], env=environment,
            stderr=subprocess.PIPE, text=True,
        )
        for rank, out in enumerate(outs)
    ]  # fmt: skip
    errors = [each.communicate(timeout=500)[1] for each in started]
    assert all(out.exists() for out in outs), "\n".join(errors)[-4000:]
    for out in outs:
        for name, facts in json.loads(out.read_text()).items():
            closed = ledgers_by_rank(load(given[name]))[0]
            assert facts["kept"] == closed.kept_nbytes
            assert facts["peak"] == pytest.approx(closed.peak().nbytes, rel=0.001)


# Stages of a pipeline


class Stage(nn.Module):
    """Layers of a model that one stage has, with what stands before or after all layers."""

    def __init__(self, run: Run, stage: int) -> None:
        super().__init__()
        (self.chunk,) = (each.chunk for each in rank_plan(run, stage).chunks)
        self.model = build(run.model, run.recipe)
        self.loss = run.recipe.loss.kind
        self.own = range(self.chunk.first, self.chunk.first + self.chunk.count)
        self.model.layers = nn.ModuleList([self.model.layers[each] for each in self.own])
        for each in self.model.layers:
            each.compile()
        if not self.chunk.begins:
            self.model.embed_tokens = None  # type: ignore[assignment]
        if not self.chunk.ends:
            self.model.norm = self.model.lm_head = None  # type: ignore[assignment]

    def forward(self, x: Tensor, targets_BT: Tensor) -> Tensor:
        model, n_tokens = self.model, x.shape[1]
        first = [model.embed(x) if self.chunk.begins else x]
        del x
        shared = model.shared(self.own, first[0], n_tokens)
        y_BTD = run_layers(list(model.layers), shared, first.pop(), model.spec, model.checkpointing)
        if not self.chunk.ends:
            return y_BTD
        assert model.norm is not None
        of_logits = compiled_loss() if self.loss == "compiled" else next_token_loss
        return of_logits(model.lm_head(model.norm(y_BTD)), targets_BT)


def stage_traced(run: Run, stage: int) -> Ledger:
    """A stage's step by hand: forwards up to the number in flight, then one backward and one forward in turn.

    What is sent to the next stage is let go of, as Megatron-LM does; its place in the graph stays.
    """
    model = Stage(run, stage).train()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    count, ahead = run.grad_accum, in_flight(run.layout, stage, run.grad_accum)
    shape, chunk = (run.device_batch, run.recipe.seq_len), model.chunk

    def forward(ids_BT: Tensor, targets_BT: Tensor) -> Any:
        x = ids_BT if chunk.begins else torch.empty(*shape, run.model.d_model).requires_grad_()
        y = model(x, targets_BT)
        return y / count if chunk.ends else get_gradient_edge(y)

    def backward(y: Any) -> None:
        torch.autograd.backward((y,), None if chunk.ends else (torch.empty(*shape, run.model.d_model),))

    def step(*tokens: Tensor) -> None:
        pairs = list(zip(tokens[:count], tokens[count:], strict=True))
        held = [forward(*each) for each in pairs[: ahead - 1]]
        for each in pairs[ahead - 1 :]:
            held.append(forward(*each))
            backward(held.pop(0))
        while held:
            backward(held.pop(0))
        optimizer.step()

    tokens = tuple(torch.randint(0, run.model.vocab_size, shape) for _ in range(2 * count))
    return trace_step(step, model, tokens, optimizers=optimizer)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_stage_holds_what_its_micro_batches_in_flight_keep(stage: int) -> None:
    stage_is("1f1b", stage, {}, near=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_last_stage_with_a_compiled_loss(schedule: str) -> None:
    stage_is(schedule, 2, {"loss": "compiled"}, {"vocab_size": 8192}, near=0.005)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "stage"), [("1f1b", 1), ("gpipe", 0), ("gpipe", 1), ("gpipe", 2)])
def test_other_stages(schedule: str, stage: int) -> None:
    stage_is(schedule, stage, {}, near=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_that_keep_what_a_policy_says(schedule: str, stage: int) -> None:
    stage_is(schedule, stage, SELECTIVE, near=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_that_run_blocks_again(schedule: str, stage: int) -> None:
    stage_is(schedule, stage, AGAIN, near=0.02)


def stage_is(
    schedule: str, stage: int, recipe: dict[str, Any], model: dict[str, Any] | None = None, *, near: float
) -> None:
    sizes = {"global_batch": 12, "micro_batch": 2}
    model = {"n_layers": 6, **(model or {})}
    run = run_of(({"pipeline": 3, "schedule": schedule}, model, {**sizes, **recipe}))
    traced, closed = stage_traced(run, stage), account_of_stage(run, stage)
    assert (traced.notes, closed.notes) == ((), ())
    assert closed.peak().nbytes == pytest.approx(traced.peak().nbytes, rel=near)
