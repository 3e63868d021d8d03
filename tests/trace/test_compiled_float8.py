"""Compiled blocks whose linear layers multiply in 8 bits: the closed form, the compiler's own code, and a real run.

What is kept is equal on a CPU as it is. On a CPU Inductor gives memory to what it computes of a sigmoid, a tanh or an
exponential and reads twice, as each cast to 8 bits reads what it casts; its rules for GPUs do not, and those the peak
is held against.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pytest
import torch
import torch._inductor.ir
from compiled_cases import Case, WithLoss, blocks_of, net_nbytes, run_of_ours

from trainledger.engine.nn.float8 import Float8Linear, use_float8
from trainledger.engine.nn.transformer import build
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.step import account
from trainledger.observe.measure.meter import AllocatorPeak
from trainledger.spec.parts import with_fields
from trainledger.spec.run import Run
from trainledger.trace.step import trace

torch.set_num_threads(1)
pytestmark = [
    pytest.mark.agreement,
    pytest.mark.skipif(
        shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler on a CPU"
    ),
    pytest.mark.skipif(torch.__version__ < "2.12", reason="matmuls in 8 bits with a scale per row run on CPUs since"),
]


def run_of(model: str, scaling: str, again: str) -> Run:
    case = Case(model, "blocks", checkpointing=again == "full", selective=again == "selective", tokens=128, width=128)
    run = run_of_ours(case)
    return replace(run, recipe=with_fields(run.recipe, {"precision": f"fp8-{scaling}"}))


def made(run: Run) -> WithLoss:
    """The model as the engine has it; its blocks are compiled, which the engine refuses in 8 bits."""
    model, float8 = build(run.model, run.recipe), run.recipe.precision.float8
    assert float8 is not None
    use_float8(model, float8)
    with_loss = WithLoss(model).train()
    for block in blocks_of(model):
        block.compile()
    return with_loss


def tokens_of(run: Run) -> tuple[torch.Tensor, ...]:
    shape = (run.recipe.global_batch, run.recipe.seq_len)
    return tuple(torch.randint(0, run.model.vocab_size, shape) for _ in "xy")


def compiled(run: Run) -> Ledger:
    model = made(run)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    return trace(model, tokens_of(run), optimizer=optimizer, autocast=torch.bfloat16)


def as_on_gpus(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch._inductor.ir, "is_cpu", lambda x: False)


def agree(run: Run, near: float) -> None:
    told, traced = account(run), compiled(run)
    assert (told.notes, traced.notes) == ((), ())
    assert told.kept_nbytes == traced.kept_nbytes
    assert told.peak().nbytes == pytest.approx(traced.peak().nbytes, rel=near)


def test_kept_and_peak_of_blocks_in_8_bits_are_those_of_the_compiled_step(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_gpus(monkeypatch)
    agree(run_of("llama", "tensorwise", "selective"), 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "gpt"])
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(("again", "near"), [("none", 0.001), ("selective", 0.01), ("full", 0.04)])
def test_either_scaling_and_each_way_to_checkpoint(
    model: str, scaling: str, again: str, near: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_gpus(monkeypatch)
    agree(run_of(model, scaling, again), near)


@pytest.mark.slow
@pytest.mark.parametrize("again", ["none", "selective", "full"])
def test_on_a_cpu_as_much_is_kept_and_the_peak_is_higher(again: str) -> None:
    run = run_of("llama", "rowwise", again)
    told, traced = account(run), compiled(run)
    assert told.kept_nbytes == traced.kept_nbytes
    assert 0.88 * traced.peak().nbytes < told.peak().nbytes <= traced.peak().nbytes


@pytest.mark.slow
@pytest.mark.parametrize("again", ["none", "selective"])
def test_a_real_forward_leaves_as_many_bytes(again: str) -> None:
    run = run_of("llama", "tensorwise", again)
    torch._dynamo.reset()
    model, batch = made(run), tokens_of(run)

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: torch.Tensor = model(*batch)
        return loss

    forward().backward()
    with AllocatorPeak(torch.device("cpu")) as left:
        loss = forward()
    assert net_nbytes(left) == account(run).kept_nbytes
    del loss
    torch._dynamo.reset()


class CastOnce(torch.nn.Module):
    """The model with its weights cast when it begins, and left so for a block that runs again in backward."""

    def __init__(self, model: WithLoss) -> None:
        super().__init__()
        self.model = model

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        for each in self.model.modules():
            if isinstance(each, Float8Linear):
                each.cast_weight()
        loss: torch.Tensor = self.model(*batch)
        return loss


@pytest.mark.parametrize(
    ("again", "scaling"),
    [
        ("none", "tensorwise"),
        *(pytest.param(each, "rowwise", marks=pytest.mark.slow) for each in ("none", "selective", "full")),
    ],
)  # fmt: skip
def test_blocks_whose_weights_are_cast_once_keep_what_the_compiled_step_keeps(
    again: str, scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_gpus(monkeypatch)
    run = run_of("llama", scaling, again)
    run = replace(run, recipe=with_fields(run.recipe, {"precision.weight_caching": True}))
    told, model = account(run), CastOnce(made(run))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    traced = trace(model, tokens_of(run), optimizer=optimizer, autocast=torch.bfloat16)
    assert (told.notes, traced.notes, traced.partial) == ((), (), "")
    assert told.kept_nbytes == traced.kept_nbytes
    assert told.peak().nbytes == pytest.approx(traced.peak().nbytes, rel=0.04 if again == "full" else 0.01)


def test_a_compiled_cast_is_the_eager_one() -> None:
    # Compiled, the largest value is looked for another way; the numbers are the same, a NaN as well.
    from trainledger.engine.nn.float8 import cast

    compiling = torch.compile(cast, backend="eager", dynamic=False)
    for x in (torch.randn(32, 48), torch.randn(32, 48).bfloat16(), torch.zeros(16, 16), torch.full((2, 2), torch.nan)):
        for scaling in ("tensorwise", "rowwise"):
            one, other = cast(x, scaling, torch.float8_e4m3fn), compiling(x, scaling, torch.float8_e4m3fn)
            for a, b in zip(one, other, strict=True):
                assert torch.equal(a.float().nan_to_num(-1.0), b.float().nan_to_num(-1.0))
