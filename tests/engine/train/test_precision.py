"""What each precision does to a model, an optimizer and a loss; and that nothing of it is lost over a restart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume import curve, in_sessions, sha
from tiny_run import CountingFeed, tiny_run
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from trainledger.engine.nn.float8 import DTYPES, Float8Linear, cast, matmul
from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.loss import next_token_loss
from trainledger.engine.nn.transformer import Transformer
from trainledger.engine.train.engine import train
from trainledger.engine.train.optimizer import build_optimizer
from trainledger.engine.train.precision import LossScaler, MasterWeights, build_model
from trainledger.engine.train.step import Batch, optimizer_step
from trainledger.ledger.rules_of_thumb import STATES
from trainledger.ledger.step import account
from trainledger.observe.measure.step import rehearse, rehearse_really
from trainledger.spec.parts import with_fields
from trainledger.spec.precision import PRECISIONS, Float8
from trainledger.spec.problem import InvalidInput
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run

CPU = torch.device("cpu")
ROWS = pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch scales by row on a CPU since 2.12")
MASTER = {"precision.master_weights": True}
MEGATRON = {**MASTER, "precision.gradient_dtype": "fp32"}
WAYS: dict[str, dict[str, Any]] = {
    "tf32": {"precision": "tf32"},
    "bf16": {"precision": "bf16"},
    "bf16, master weights": {"precision": "bf16", **MASTER, "micro_batch": 2},
    "bf16, master weights, fp32 gradients": {"precision": "bf16", **MEGATRON, "micro_batch": 2},
    "fp16, master weights": {"precision": "fp16", **MASTER},
    "bf16-mixed": {"precision": "bf16-mixed", "activation_checkpointing": "full"},
    "fp16-mixed": {"precision": "fp16-mixed", "dropout": 0.1},
    "bf16-sharded": {"precision": "bf16-sharded", "activation_checkpointing": "full", "micro_batch": 2},
    "fp8-tensorwise": {"precision": "fp8-tensorwise"},
    "fp8-rowwise, master weights": {"precision": "fp8-rowwise", **MASTER, "optimizer": "momentum"},
    "fp8-tensorwise-sharded": {"precision": "fp8-tensorwise-sharded", "activation_checkpointing": "full"},
    "fp8-rowwise-sharded": {"precision": "fp8-rowwise-sharded", "micro_batch": 2},
    "fp8-tensorwise, cached": {"precision": "fp8-tensorwise", "precision.weight_caching": True, "micro_batch": 2},
}


def made(run: Run) -> tuple[Transformer, torch.optim.Optimizer]:
    model = build_model(run.model, run.recipe)
    initialize(model, seed=0)
    optimizer = build_optimizer(model, run.recipe)
    return model, optimizer


def batches_of(run: Run, step: int = 0) -> Sequence[Batch]:
    return next(CountingFeed(run, CPU).batches(step))


def gradients_of(model: nn.Module, batches: Sequence[Batch]) -> list[list[Tensor]]:
    """Each micro-batch's own gradients."""
    found = []
    for inputs, targets in batches:
        model.zero_grad()
        (next_token_loss(model(inputs), targets) / len(batches)).backward()
        found.append([each.grad.clone() for each in model.parameters()])
    return found


# Training


@pytest.mark.parametrize("way", [pytest.param(each, marks=ROWS if "rowwise" in each else ()) for each in WAYS])
def test_a_resumed_run_ends_in_the_same_bits(way: str, tmp_path: Path) -> None:
    run = tiny_run(**WAYS[way])
    assert not list(run_problems(run))
    whole = train(run, tmp_path / "whole", open_feed=CountingFeed)
    parts = in_sessions(run, tmp_path / "parts", 3, 4)
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert sha(parts, name) == sha(whole, name)
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")


@pytest.mark.parametrize("way", [pytest.param(each, marks=ROWS if "rowwise" in each else ()) for each in WAYS])
def test_every_precision_learns_about_what_fp32_learns(way: str, tmp_path: Path) -> None:
    def last_loss(name: str, **fields: Any) -> float:
        run = tiny_run(steps=12, dropout=0.0, **fields, **{"evaluation.every": None, "checkpoints.every": None})
        loss = train(run, tmp_path / name, open_feed=CountingFeed).loss
        assert loss is not None
        return loss

    fields = {name: each for name, each in WAYS[way].items() if name not in ("dropout", "activation_checkpointing")}
    reference = last_loss("fp32", optimizer=fields.get("optimizer", "adamw"))
    assert last_loss("this", **fields) == pytest.approx(reference, rel=0.05)


@pytest.mark.parametrize(
    "precision", [pytest.param(each, marks=ROWS if "rowwise" in each else ()) for each in PRECISIONS]
)
def test_a_precision_is_trained_or_refused_in_a_sentence(precision: str) -> None:
    run = tiny_run(precision=precision, **{"precision.master_weights": precision == "fp16"})
    assert not list(run_problems(run))
    if PRECISIONS[precision].scaled is not None and PRECISIONS[precision].scaled.scaling in ("block", "micro"):
        nearest = "fp8-rowwise-sharded" if precision.endswith("-sharded") else "fp8-rowwise"
        with pytest.raises(InvalidInput, match=rf"{precision}'.*does not train it.*nearest that works: {nearest}$"):
            made(run)
        return
    model, optimizer = made(run)
    before = [each.detach().clone() for each in model.parameters()]
    scaler = LossScaler(CPU) if run.recipe.precision.loss_scaling else None
    assert optimizer_step(model, optimizer, batches_of(run), run.recipe, scaler=scaler).loss.isfinite()
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert all(changed) or precision == "bf16"  # where small updates of ones round away


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"precision": "bf16", "precision.moment_dtype": "fp32"},
            "recipe.precision.moment_dtype = 'fp32'.*format of the weights: bf16",
        ),
        ({"precision": "bf16", **MASTER, "precision.moment_dtype": "bf16"}, "nearest that works: fp32"),
        ({"precision": "bf16-sharded", "compile": True}, "recipe.compile = true: is not built for.*bf16-sharded"),
        ({"precision": "fp8-rowwise", "compile": True}, "recipe.compile = true: is not built for.*fp8-rowwise"),
        ({"precision": "bf16-sharded", "loss": "chunked"}, "recipe.loss = 'chunked'.*nearest that works: full"),
    ],
)
def test_what_the_engine_does_not_run_is_a_sentence(fields: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    run = tiny_run(**fields)
    assert not list(run_problems(run))
    assert account(run).flops
    with pytest.raises(InvalidInput, match=sentence):
        train(run, tmp_path, open_feed=CountingFeed)


@pytest.mark.parametrize("gathered", ["", "-sharded"])
def test_scales_by_row_that_a_torch_has_not_are_a_sentence(
    gathered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cpu"))
    run = tiny_run(precision=f"fp8-rowwise{gathered}")
    sentence = rf"rowwise{gathered}': torch 2\.11\.0\+cpu multiplies.*torch 2\.12 does.*: fp8-tensorwise{gathered}$"
    for begin in (lambda: train(run, tmp_path, open_feed=CountingFeed), lambda: rehearse_really(run)):
        with pytest.raises(InvalidInput, match=sentence):
            begin()
    assert rehearse(run).matmul_flops == account(run).matmul_flops  # as on a GPU


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"precision": "bf16", "precision.gradient_dtype": "fp32"}, "recipe.precision.gradient_dtype = 'fp32': belongs "
         "to 16-bit parameters with an fp32 copy: recipe.precision.master_weights = true; nearest that works: none"),
        ({"precision": "fp8-rowwise", "seq_len": 15, "micro_batch": 1}, "recipe.seq_len = 15: 8-bit "
         "matmuls need multiples of 16, and a micro-batch has 15 tokens; nearest that works: 16"),
    ],
)  # fmt: skip
def test_formats_that_do_not_go_together(fields: dict[str, Any], sentence: str) -> None:
    assert [str(each) for each in run_problems(tiny_run(**fields))] == [sentence]


def test_8_bit_matmuls_need_sizes_that_they_can_tile() -> None:
    problems = [
        str(each)
        for each in run_problems(tiny_run({"feed_forward.d_ff": 50, "attention.head_dim": 6}, precision="fp8-rowwise"))
    ]
    assert problems == [
        "model.feed_forward.d_ff = 50: 8-bit matmuls need multiples of 16; nearest that works: 64",
        "model.attention.head_dim = 6: 8-bit matmuls need multiples of 16, and n_heads x head_dim is 24; "
        "nearest that works: 16",
    ]


# The sums that everybody quotes


@pytest.mark.parametrize(
    ("fields", "recipe"),
    [
        ({}, "fp32-adamw"),
        ({"precision": "bf16-mixed"}, "fp32-adamw"),
        ({"precision": "bf16", **MASTER}, "bf16-master-adamw"),
        ({"precision": "fp16", **MASTER}, "bf16-master-adamw"),
        ({"precision": "bf16", **MEGATRON}, "bf16-master-fp32-gradients-adamw"),
        ({"precision": "bf16"}, "bf16-adamw"),
        ({"precision": "bf16", "precision.moment_dtype": "fp32"}, "bf16-fp32-moments-adamw"),
        ({"precision": "fp32", "optimizer": "momentum"}, "fp32-momentum"),
        ({"precision": "fp32", "optimizer": "sgd"}, "fp32-sgd"),
    ],
)
def test_bytes_per_parameter_are_those_of_the_rule_of_thumb(fields: dict[str, Any], recipe: str) -> None:
    run = tiny_run(**fields)
    ledger = account(run)
    resident = dict(ledger.resident)
    tensors = len(list(build_model(run.model, tiny_run().recipe).parameters()))
    counters = 4 * tensors if run.recipe.optimizer.kind == "adamw" else 0
    scaling = 8 if run.recipe.precision.loss_scaling else 0
    born = sum(nbytes * each.times for each in ledger for name, nbytes in each.allocated if name == "gradients")
    state = resident.get("optimizer state", 0) - counters - scaling
    nbytes = resident["parameters"] + state + born + resident.get("gradients", 0)
    assert nbytes == STATES[recipe].bytes_per_parameter * ledger.parameters


# Loss scaling


def test_the_scaler_does_what_torch_s_own_does() -> None:
    run = tiny_run(precision="fp16-mixed", grad_clip=None, **{"optimizer.weight_decay": 0.0})
    (ours, optimizer), (theirs, reference) = made(run), made(run)
    scaler, known = LossScaler(CPU), torch.amp.GradScaler("cpu", init_scale=2.0**22)
    scaler.scale.fill_(2.0**22)  # overflows for a step or two, and is fine then
    skipped = []
    for step in range(5):
        batches = batches_of(run, step)
        skipped.append(optimizer_step(ours, optimizer, batches, run.recipe, scaler=scaler).skipped)
        reference.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = next_token_loss(theirs(batches[0][0]), batches[0][1])
        known.scale(loss).backward()
        known.step(reference)
        known.update()
        assert scaler.scale.item() == known.get_scale()
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert skipped[0]
    assert not skipped[-1]


def test_a_scaler_goes_on_where_it_was() -> None:
    scaler, other = LossScaler(CPU), LossScaler(CPU)
    scaler.scale.fill_(2.0**-7)
    scaler.good_steps.fill_(1234)
    other.restore(scaler.facts())
    assert other.facts() == {"scale": 2.0**-7, "good_steps": 1234}


# Master weights


def test_the_parameters_are_the_rounded_master_copy() -> None:
    run = tiny_run(precision="bf16", **MASTER)
    model, optimizer = made(run)
    assert isinstance(optimizer, MasterWeights)
    for step in range(3):
        optimizer_step(model, optimizer, batches_of(run, step), run.recipe)
    for each in model.parameters():
        master = optimizer.state[each]["master"]
        assert each.dtype == torch.bfloat16
        assert torch.equal(each, master.bfloat16())
        assert not torch.equal(each.float(), master)  # it holds more than they do
        assert optimizer.state[each]["exp_avg"].dtype == torch.float32


def test_the_master_copy_steps_as_fp32_weights_would_with_the_same_gradients() -> None:
    run = tiny_run(precision="bf16", **MASTER, grad_clip=None)
    model, optimizer = made(run)
    assert isinstance(optimizer, MasterWeights)
    (gradients,) = gradients_of(model, batches_of(run))
    plain = [nn.Parameter(each.detach().float()) for each in model.parameters()]
    for each, gradient in zip(plain, gradients, strict=True):
        each.grad = gradient.float()
    groups = [
        {"params": [each for each in plain if each.ndim >= 2], "weight_decay": run.recipe.optimizer.weight_decay},
        {"params": [each for each in plain if each.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (run.recipe.optimizer.beta1, run.recipe.optimizer.beta2)
    torch.optim.AdamW(
        groups, lr=run.recipe.learning_rate, betas=betas, eps=run.recipe.optimizer.epsilon, fused=True
    ).step()
    optimizer_step(model, optimizer, batches_of(run), run.recipe)
    for each, master in zip(plain, optimizer.masters.values(), strict=True):
        assert torch.equal(each, master)


def test_fp32_buffers_add_up_what_bf16_would_round() -> None:
    run = tiny_run(precision="bf16", **MEGATRON, micro_batch=1)
    model, optimizer = made(run)
    assert isinstance(optimizer, MasterWeights)
    parts = gradients_of(build_like(model, run), batches_of(run))
    wide = [sum((each.float() for each in same), torch.zeros(())) for same in zip(*parts, strict=True)]
    optimizer.zero_grad()
    for inputs, targets in batches_of(run):
        (next_token_loss(model(inputs), targets) / len(parts)).backward()
    assert all(each.grad is None for each in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(optimizer.gradients(), wide, strict=True))
    narrow = [sum(same, torch.zeros((), dtype=torch.bfloat16)) for same in zip(*parts, strict=True)]
    assert not all(torch.equal(a.float(), b) for a, b in zip(narrow, wide, strict=True))


def build_like(model: Transformer, run: Run) -> Transformer:
    """A model with the same weights, whose gradients stay where they come."""
    other = build_model(
        run.model, with_fields(run.recipe, {"precision.master_weights": False, "precision.gradient_dtype": None})
    )
    other.load_state_dict(model.state_dict())
    return other


# Gathered copies


def test_gathered_copies_compute_as_a_bf16_model_and_leave_fp32_behind() -> None:
    run = tiny_run({"tie_embeddings": True}, precision="bf16-sharded")
    model, _ = made(run)
    low = build_model(run.model, with_fields(run.recipe, {"precision": "bf16"}))
    low.load_state_dict(model.state_dict())
    (ours,), (theirs,) = (gradients_of(each, batches_of(run)) for each in (model, low))
    for mine, other, parameter in zip(ours, theirs, model.parameters(), strict=True):
        assert parameter.dtype == mine.dtype == torch.float32
        assert torch.equal(mine, other.float())


def test_a_failed_forward_leaves_the_parameters_in_place() -> None:
    run = tiny_run(precision="bf16-sharded")
    model, _ = made(run)
    names = dict(model.named_parameters())
    with pytest.raises(IndexError):
        model(torch.full((1, 4), run.model.vocab_size))
    assert {name: id(each) for name, each in model.named_parameters()} == {k: id(v) for k, v in names.items()}


# 8 bits


@pytest.mark.parametrize("name", ["fp8-tensorwise", "fp8-rowwise", "fp8-rowwise-sharded"])
def test_linear_layers_of_blocks_multiply_in_8_bits_and_no_others(name: str) -> None:
    model, _ = made(tiny_run(precision=name))
    eights = {path for path, each in model.named_modules() if isinstance(each, Float8Linear)}
    assert eights == {path for path, each in model.named_modules() if path.endswith("_proj")}
    plain, _ = made(tiny_run())
    assert [path for path, _ in model.named_parameters()] == [path for path, _ in plain.named_parameters()]


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
def test_a_cast_keeps_the_largest_value_and_loses_half_a_step_of_the_others(scaling: str, format: str) -> None:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    x[3] *= 1000
    x8, inverse = cast(x, scaling, DTYPES[format])
    again = x8.float() * inverse.view(-1, 1)
    rows = x.abs().amax(dim=-1, keepdim=True) if scaling == "rowwise" else x.abs().amax()
    step = torch.finfo(DTYPES[format]).eps / 2
    smallest = rows * torch.finfo(DTYPES[format]).tiny / torch.finfo(DTYPES[format]).max
    assert ((again - x).abs() <= step * torch.maximum(x.abs(), smallest) * 1.001).all()
    assert torch.allclose(again.abs().amax(), x.abs().amax(), rtol=1e-6)
    assert inverse.numel() == (16 if scaling == "rowwise" else 1)


@pytest.mark.parametrize("scaling", ["tensorwise", pytest.param("rowwise", marks=ROWS)])
def test_a_matmul_in_8_bits_is_the_matmul_of_what_was_cast(scaling: str) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(32, 48, generator=generator).bfloat16() for _ in range(2))
    float8 = Float8(scaling, "e4m3", "e4m3", "input")
    (a8, a_inverse), (b8, b_inverse) = (cast(each, scaling, DTYPES["e4m3"]) for each in (a, b))
    exact = (a8.double() * a_inverse.view(-1, 1)) @ (b8.double() * b_inverse.view(-1, 1)).t()
    ours = matmul(a, b, float8, "e4m3", "e4m3", torch.bfloat16)
    assert torch.allclose(ours.double(), exact, rtol=2**-7, atol=1e-2)


def test_zeros_are_cast_to_zeros() -> None:
    for scaling in ("tensorwise", "rowwise"):
        x8, inverse = cast(torch.zeros(16, 16), scaling, DTYPES["e4m3"])
        assert inverse.isfinite().all()
        assert (x8.float() == 0).all()


@ROWS
def test_gradients_in_8_bits_are_near_those_in_full() -> None:
    float8 = PRECISIONS["fp8-rowwise"]().float8
    assert float8 is not None
    generator = torch.Generator().manual_seed(2)
    full = nn.Linear(32, 48)
    eight = Float8Linear(full, float8)
    x = torch.randn(2, 16, 32, generator=generator)
    g = torch.randn(2, 16, 48, generator=generator)
    results = []
    for layer in (full, eight):
        full.zero_grad()
        own = x.clone().requires_grad_()
        layer(own).backward(g)
        assert own.grad is not None
        results.append([own.grad, *(each.grad.clone() for each in full.parameters() if each.grad is not None)])
    for exact, near in zip(*results, strict=True):
        assert (near - exact).norm() < 0.05 * exact.norm()
