"""A compiled loss: the closed form against the compiler's own code on fake tensors and against a real run."""

from __future__ import annotations

import gc
import os
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from compiled_cases import Case, blocks_of, net_nbytes, run_of_ours
from torch import Tensor, nn

from trainledger.engine.nn.loss import run_loss
from trainledger.engine.train.precision import autocast, build_model
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.step import account
from trainledger.observe.measure.meter import AllocatorPeak, with_sums
from trainledger.observe.measure.step import rehearse
from trainledger.spec.parts import with_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run
from trainledger.trace.step import trace

torch.set_num_threads(1)
pytestmark = [
    pytest.mark.agreement,
    pytest.mark.skipif(
        shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler on a CPU"
    ),
]
ROWS = 256  # tokens of the batch
SCALARS = 8  # sums of a kernel, freed with it


class WithLoss(nn.Module):
    """Token ids and targets [B, T] to the loss that the engine takes of them."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        super().__init__()
        self.model = model
        self.recipe = recipe

    def forward(self, ids_BT: Tensor, targets_BT: Tensor) -> Tensor:
        return run_loss(self.model, ids_BT, targets_BT, self.recipe)


def run_of(vocab_size: int, model: dict[str, Any] | None = None, **recipe: Any) -> Run:
    run = run_of_ours(Case("llama", "nothing", vocab_size=vocab_size))
    told = with_fields(run.recipe, {"loss": "compiled", **recipe})
    return replace(run, model=replace(run.model, **(model or {})), recipe=told)


def made(run: Run) -> tuple[nn.Module, tuple[Tensor, ...], torch.optim.Optimizer]:
    model = WithLoss(build_model(run.model, run.recipe), run.recipe).train()
    for block in blocks_of(model.model) if run.recipe.compile else ():
        block.compile()
    batch = tuple(torch.randint(0, run.model.vocab_size, (run.recipe.global_batch, run.recipe.seq_len)) for _ in "xy")
    return model, batch, torch.optim.AdamW(model.parameters(), foreach=False)


def traced(run: Run, kernels: str = "cpu") -> Ledger:
    model, batch, optimizer = made(run)
    mixed = torch.bfloat16 if run.recipe.precision.copies == "autocast" else None
    ledger = trace(model, batch, optimizer=optimizer, autocast=mixed, kernels=kernels)
    assert (ledger.notes, ledger.uncounted) == ((), ())
    return ledger


def same(run: Run, kernels: str = "cpu", *, near: float = 0.0) -> None:
    closed, compiled = account(run, backend=kernels), traced(run, kernels)
    assert closed.notes == ()
    assert closed.kept_nbytes == compiled.kept_nbytes
    here = with_sums(closed) if kernels == "cpu" else closed
    assert here.peak().nbytes == pytest.approx(compiled.peak().nbytes, rel=near, abs=SCALARS)
    assert closed.matmul_flops == compiled.matmul_flops
    assert closed.model_flops == compiled.model_flops


@pytest.mark.parametrize("vocab_size", [61, 8192, 50257])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
@pytest.mark.parametrize("upcast", [True, False])
def test_kept_and_peak_are_those_of_the_compiled_loss(vocab_size: int, precision: str, *, upcast: bool) -> None:
    same(run_of(vocab_size, precision=precision, **{"loss.upcast": upcast}))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
def test_so_they_are_with_the_kernels_of_a_gpu(precision: str) -> None:
    same(run_of(8192, precision=precision), "cuda")


HEADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tied": ({"tie_embeddings": True}, {}),
    "bias, padded": ({"head_bias": True, "vocab_multiple": 64}, {}),
    "softcap and scale": ({"logit_softcap": 5.0, "logit_scale": 0.5}, {}),
    "two sequences": ({}, {"global_batch": 2}),
    "odd": ({}, {"seq_len": 63, "global_batch": 3}),
    "multi-token prediction": ({"n_mtp_layers": 1}, {}),
    "blocks run again": ({}, {"activation_checkpointing": "full"}),
}


@pytest.mark.parametrize("kind", HEADS)
def test_other_heads_and_batches(kind: str) -> None:
    model, recipe = HEADS[kind]
    same(run_of(3000, model, **{"precision": "bf16", **recipe}))


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_beside_compiled_blocks(precision: str) -> None:
    same(run_of(8192, precision=precision, compile=True), near=0.01)


def test_the_two_kernels_read_and_write_what_those_of_the_compiler_do() -> None:
    run = run_of(8192, precision="bf16")
    (forward, backward) = (each for each in account(run) if each.name.startswith("cross_entropy"))
    kernels = [each for each in traced(run) if "nll_loss" in each.name and each.phase != "recompute"]
    for ours, theirs, own in zip((forward, backward), kernels, (SCALARS, 0), strict=True):
        assert ours.phase == theirs.phase
        assert ours.read == theirs.read
        assert ours.written == theirs.written - own
        assert ours.kept == theirs.kept
    logits = 2 * ROWS * 8192
    assert forward.kept == 8 * ROWS + 4 + 4  # the largest logit and the logarithm of the sum; weights and the loss
    assert dict(backward.allocated)["logits and loss"] == logits + 4 * ROWS


def test_four_bytes_of_a_16_bit_logit_are_held_where_twelve_were() -> None:
    compiled, full = (account(run_of(50_000, precision="bf16", loss=loss)) for loss in ("compiled", "full"))
    logits = ROWS * 50_000
    assert full.peak().nbytes - compiled.peak().nbytes == pytest.approx(8 * logits, rel=0.01)


def test_a_real_step_holds_as_much() -> None:
    run = run_of(8192, precision="bf16-mixed")
    model, batch, optimizer = made(run)
    torch._dynamo.reset()

    def forward() -> Tensor:
        with autocast(run.recipe.precision, torch.device("cpu")):
            loss: Tensor = model(*batch)
        return loss

    for _ in range(2):
        forward().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    gc.collect()
    left = AllocatorPeak(torch.device("cpu"))
    with left:
        loss = forward()
    assert loss.requires_grad
    torch._dynamo.reset()
    assert net_nbytes(left) == pytest.approx(account(run).kept_nbytes, abs=SCALARS)


def test_operation_by_operation_it_is_the_full_loss() -> None:
    run = run_of(64, precision="bf16")
    eager = replace(run, recipe=run.recipe.uncompiled)
    assert eager.recipe.loss.kind == "full"
    told = rehearse(run)
    assert told.peak().nbytes == account(eager).peak().nbytes
    assert told.flops == account(eager).flops


def test_batches_as_an_array() -> None:
    numpy = pytest.importorskip("numpy")
    batches = numpy.array([2, 4, 6])
    many = account(run_of(3000, precision="bf16", global_batch=batches, micro_batch=batches))
    for at, each in enumerate(batches):
        one = account(run_of(3000, precision="bf16", global_batch=int(each), micro_batch=int(each)))
        assert many.total("flops")[at] == one.total("flops")
        assert many.kept_nbytes[at] == one.kept_nbytes
