"""The loss chunk by chunk and the fused loss are the full one, gradients included."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models import sizes
from thinned import thinned
from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.loss import next_token_loss, run_loss
from trainledger.engine.nn.transformer import build
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run

torch.set_num_threads(1)

SIZES = sizes(V=61, D=24, L=2, H=4, F=40, T=12)
HEADS = (
    {}, {"tie_embeddings": True}, {"head_bias": True, "vocab_multiple": 64}, {"logit_softcap": 5.0, "logit_scale": 0.5},
)  # fmt: skip


needs_a_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler on a CPU"
)


def run_of(model: dict[str, Any], **recipe: Any) -> Run:
    batch = {"seq_len": 12, "global_batch": 2, "steps": 3}
    return Run(model=from_fields(ModelSpec, {**SIZES, **model}), recipe=from_fields(Recipe, {**batch, **recipe}))


def loss_and_gradients(run: Run, *, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one batch and the gradients of ``scale`` times it."""
    model = build(run.model, run.recipe)
    initialize(model, seed=0)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if name == "lm_head.bias":
                each.copy_(torch.linspace(-1, 1, each.numel()))
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randint(run.model.vocab_size, (2, 2, run.recipe.seq_len), generator=generator)
    mixed = torch.autocast("cpu", torch.bfloat16, enabled=run.recipe.precision.kind == "bf16-mixed")
    with mixed:
        loss = run_loss(model, inputs, targets, run.recipe)
    (scale * loss).backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return loss.detach(), gradients


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", ["chunked", "fused"])
@settings(max_examples=8, deadline=None)
@given(chunks=st.sampled_from([1, 2, 3, 8, 24]), scale=st.sampled_from([1.0, -0.25, 3.0]))
def test_chunks_give_the_full_loss_and_its_gradients(
    head: dict[str, Any], kind: str, chunks: int, scale: float
) -> None:
    full, wanted = loss_and_gradients(run_of(head), scale=scale)
    loss, found = loss_and_gradients(run_of(head, loss=kind, **{"loss.chunks": chunks}), scale=scale)
    torch.testing.assert_close(loss, full, atol=1e-6, rtol=1e-6)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=2e-6, rtol=2e-5, msg=name)


@pytest.mark.parametrize("kind", ["chunked", "fused"])
def test_chunks_are_as_good_as_the_full_loss_under_autocast(kind: str) -> None:
    """In bf16 they differ by how sums are rounded: from fp32 no farther than a little more than the full loss is."""
    exact, true = loss_and_gradients(run_of({}))
    full, plain = loss_and_gradients(run_of({}, precision="bf16-mixed"))
    loss, found = loss_and_gradients(run_of({}, precision="bf16-mixed", loss=kind, **{"loss.chunks": 4}))
    assert (loss - exact).abs() <= 1.5 * (full - exact).abs() + 1e-4
    for name, gradient in true.items():
        wrong, usual = (found[name] - gradient).norm(), (plain[name] - gradient).norm()
        assert wrong <= 1.5 * usual + 1e-3 * gradient.norm(), name


@needs_a_compiler
@pytest.mark.parametrize("head", thinned(HEADS))
@pytest.mark.long
def test_compiled_it_gives_the_full_loss_and_its_gradients(head: dict[str, Any]) -> None:
    full, wanted = loss_and_gradients(run_of(head), scale=3.0)
    loss, found = loss_and_gradients(run_of(head, loss="compiled"), scale=3.0)
    torch.testing.assert_close(loss, full, atol=1e-6, rtol=1e-6)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=2e-6, rtol=2e-5, msg=name)


@needs_a_compiler
@pytest.mark.agreement
@pytest.mark.parametrize("upcast", [True, False])
def test_compiled_it_is_as_good_as_the_full_loss_under_autocast(*, upcast: bool) -> None:
    exact, true = loss_and_gradients(run_of({}))
    full, plain = loss_and_gradients(run_of({}, precision="bf16-mixed", **{"loss.upcast": upcast}))
    loss, found = loss_and_gradients(run_of({}, precision="bf16-mixed", loss="compiled", **{"loss.upcast": upcast}))
    assert loss.dtype == torch.float32
    assert (loss - exact).abs() <= 1.5 * (full - exact).abs() + 1e-4
    for name, gradient in true.items():
        wrong, usual = (found[name] - gradient).norm(), (plain[name] - gradient).norm()
        assert wrong <= 1.5 * usual + 1e-3 * gradient.norm(), name


def test_the_loss_is_fp32_in_every_way() -> None:
    for kind in ("full", "chunked", "fused"):
        for upcast in (True, False):
            chunks = {} if kind == "full" else {"loss.chunks": 4}
            run = run_of({}, precision="bf16-mixed", loss=kind, **chunks, **{"loss.upcast": upcast})
            assert loss_and_gradients(run)[0].dtype == torch.float32


def test_without_upcast_log_probabilities_are_rounded_as_the_logits_are() -> None:
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.tensor([[0, 1, 2], [3, 4, 0]])
    wide, narrow = (next_token_loss(logits, targets, upcast=each) for each in (True, False))
    by_hand = -torch.stack([logits[b, t].log_softmax(-1)[targets[b, t]] for b in range(2) for t in range(3)])
    assert by_hand.dtype == torch.bfloat16
    torch.testing.assert_close(narrow, by_hand.float().mean(), atol=0.05, rtol=0)
    assert narrow == narrow.bfloat16()
    assert wide != narrow


def test_an_evaluation_takes_no_gradients() -> None:
    run = run_of({}, loss="fused", **{"loss.chunks": 4})
    model = build(run.model, run.recipe)
    initialize(model, seed=0)
    ids = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(run_loss(model, ids, ids, run.recipe), next_token_loss(model(ids), ids))


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        (
            {"loss": "chunked", "loss.chunks": 7},
            "recipe.loss.chunks = 7: must divide the 24 tokens of a micro-batch; nearest that works: 6",
        ),
        (
            {"loss": "fused", "loss.chunks": 1000},
            "recipe.loss.chunks = 1000: must divide the 24 tokens of a micro-batch; nearest that works: 24",
        ),
        (
            {"loss": "fused", "precision": "fp16-mixed"},
            "recipe.loss = 'fused': computes gradients in forward, which precision fp16-mixed scales or gathers "
            "afterwards; nearest that works: chunked",
        ),
    ],
)
def test_what_does_not_work_is_reported(recipe: dict[str, Any], sentence: str) -> None:
    assert [str(each) for each in run_problems(run_of({}, **recipe))] == [sentence]
