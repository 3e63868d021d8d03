"""One optimizer step against formulas written by hand, and what it must not do."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_run import CountingFeed, tiny_run
from torch import Tensor, nn

from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.transformer import Transformer, build
from trainledger.engine.train.optimizer import build_optimizer, for_muon
from trainledger.engine.train.step import StepResult, optimizer_step
from trainledger.spec.optimizers import ACCOUNTED_ONLY, IMPLEMENTATIONS, OPTIMIZERS, Momentum
from trainledger.spec.problem import InvalidInput
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run

CPU = torch.device("cpu")


def model_of(run: Run) -> Transformer:
    model = build(run.model, run.recipe)
    initialize(model, seed=3)
    return model


def one_step(run: Run, **given: Any) -> tuple[Transformer, StepResult]:
    model = model_of(run)
    batches = next(CountingFeed(run, CPU).batches(0))
    return model, optimizer_step(model, build_optimizer(model, run.recipe), batches, run.recipe, **given)


@pytest.mark.parametrize("grad_clip", [None, 0.1])
def test_micro_batches_give_the_gradient_of_the_whole_batch(grad_clip: float | None) -> None:
    whole, whole_result = one_step(tiny_run(global_batch=8, grad_clip=grad_clip))
    for micro_batch in (1, 2, 4):
        parts, result = one_step(tiny_run(global_batch=8, micro_batch=micro_batch, grad_clip=grad_clip))
        torch.testing.assert_close(result.loss, whole_result.loss, rtol=1e-6, atol=0)
        for (name, a), b in zip(whole.named_parameters(), parts.parameters(), strict=True):
            assert a.grad is not None
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-7, msg=name)


def test_clipping_is_by_the_joint_norm_of_all_gradients() -> None:
    free, _ = one_step(tiny_run(grad_clip=None))
    clipped, result = one_step(tiny_run(grad_clip=0.01))
    assert result.grad_norm is not None
    assert result.grad_norm.item() == pytest.approx(joint_norm(free), rel=1e-6)
    assert joint_norm(clipped) == pytest.approx(0.01, rel=1e-4)


def joint_norm(model: nn.Module) -> float:
    """The L2 norm of all gradients as one vector, in fp64."""
    gradients = [each.grad.double().flatten() for each in model.parameters() if each.grad is not None]
    return float(torch.linalg.vector_norm(torch.cat(gradients)))


def test_without_clipping_there_is_no_norm() -> None:
    assert one_step(tiny_run(grad_clip=None))[1].grad_norm is None


def first_update(optimizer: str, gradient: Tensor, before: Tensor, decay: float, run: Run) -> Tensor:
    """The weight after the first step by the published formulas, in fp64 (all moments start at zero)."""
    rate, chosen = run.recipe.learning_rate, run.recipe.optimizer
    epsilon = getattr(chosen, "epsilon", 0.0)
    decayed = before * (1 - rate * decay)
    if optimizer in ("adamw", "adamw-8bit"):  # both bias-corrected moments of one step are the gradient and its square
        return decayed - rate * gradient / (gradient.abs() + epsilon)
    if optimizer == "lion":  # the interpolated momentum of one step is a share of the gradient
        return decayed - rate * gradient.sign()
    if optimizer == "adafactor":
        return adafactors_first(gradient, before, decayed, rate)
    gradient = gradient + decay * before  # L2 for all others
    if optimizer in ("adam", "adam-8bit"):
        return before - rate * gradient / (gradient.abs() + epsilon)
    if optimizer in ("sgd", "momentum"):  # the first momentum is the gradient itself
        return before - rate * gradient
    if optimizer == "nesterov":
        return before - rate * (1 + chosen.momentum) * gradient
    if optimizer == "adagrad":
        return before - rate * gradient / (gradient.abs() + epsilon)
    assert optimizer == "rmsprop"
    return before - rate * gradient / ((1 - chosen.beta2) ** 0.5 * gradient.abs() + epsilon)


def adafactors_first(gradient: Tensor, before: Tensor, decayed: Tensor, rate: float) -> Tensor:
    """Shazeer and Stern 2018, algorithms 4 and 5, where the first second moment is the squared gradient's own."""
    square = gradient**2
    if gradient.ndim > 1:
        square = square.mean(-1, keepdim=True) * square.mean(-2, keepdim=True) / square.mean()
    update = gradient / square.clamp(min=torch.finfo(torch.float32).eps ** 2).sqrt()
    update = update / max(1.0, rms(update))
    return decayed - max(1e-3, rms(before)) * rate * update


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


ALL_WAYS = [(name, loop) for name, loops in IMPLEMENTATIONS.items() for loop in loops]
WAYS = [each for each in ALL_WAYS if each not in ACCOUNTED_ONLY]


@pytest.mark.parametrize(("optimizer", "loop"), WAYS)
def test_the_first_update_is_the_formula(optimizer: str, loop: str) -> None:
    of_moments = {"optimizer.epsilon": 1e-3} if hasattr(OPTIMIZERS[optimizer](), "epsilon") else {}
    own = {"optimizer.implementation": loop, "optimizer.weight_decay": 0.3, **of_moments}
    run = tiny_run(optimizer=optimizer, grad_clip=None, **own)
    before = {name: each.detach().double().clone() for name, each in model_of(run).named_parameters()}
    model, _ = one_step(run)
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        gradient = weight.grad.double()
        decay = 0.3 if weight.ndim >= 2 else 0.0
        if (optimizer, loop, decay) == ("nesterov", "foreach", 0.0):  # torch adds the momentum to the gradient in place
            gradient = gradient / (1 + run.recipe.optimizer.momentum)
        if optimizer == "muon" and for_muon(name, weight):
            follows_muon(weight, gradient, before[name], run)
            continue
        rule = "adamw" if optimizer == "muon" else optimizer
        expected = first_update(rule, gradient, before[name], decay, run)
        torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("optimizer", ["adamw-8bit", "adam-8bit"])
def test_the_engine_says_what_it_cannot_run(optimizer: str) -> None:
    run = tiny_run(optimizer=optimizer, **{"optimizer.implementation": "fused"})
    assert not list(run_problems(run))
    with pytest.raises(InvalidInput) as refused:
        one_step(run)
    rule = f"the engine has no fused {optimizer}, it is accounted for only; nearest that works: loop"
    assert str(refused.value) == f"recipe.optimizer.implementation = 'fused': {rule}"


def follows_muon(weight: Tensor, gradient: Tensor, before: Tensor, run: Run) -> None:
    """The update of a matrix G = U S V' is near U V', as large as AdamW's (Liu et al. 2025, section 2.2)."""
    rate = run.recipe.learning_rate
    update = (before * (1 - rate * 0.3) - weight.detach().double()) / (rate * 0.2 * max(weight.shape) ** 0.5)
    left, _, right = torch.linalg.svd(gradient, full_matrices=False)
    through = torch.diagonal(left.T @ update @ right.T)
    assert 0.5 < through[: len(through) // 2].min() <= through.max() < 1.4  # five iterations of Jordan et al. 2024
    across = left.T @ update @ right.T - torch.diag(through)
    assert across.abs().max() < 0.1  # bf16


def test_momentum_and_moments_accumulate_over_steps() -> None:
    weight = nn.Parameter(torch.tensor([[1.0, -2.0]]))
    holder = nn.Module()
    holder.weight = weight
    recipe = tiny_run(optimizer=Momentum(momentum=0.5, weight_decay=0.0), learning_rate=0.1).recipe
    optimizer = build_optimizer(holder, recipe)
    for _ in range(2):
        weight.grad = torch.tensor([[1.0, 2.0]])
        optimizer.step()
    # v1 = g, v2 = 0.5 g + g; w = w0 - 0.1 (1 + 1.5) g
    torch.testing.assert_close(weight.detach(), torch.tensor([[0.75, -2.5]]))


def test_a_tied_weight_is_one_parameter_with_decay_once() -> None:
    run = tiny_run({"tie_embeddings": True})
    groups = build_optimizer(model_of(run), run.recipe).param_groups
    members = [id(each) for group in groups for each in group["params"]]
    assert len(members) == len(set(members))
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(each.ndim >= 2 for each in groups[0]["params"])
    assert all(each.ndim < 2 for each in groups[1]["params"])


def test_logits_are_gone_before_the_optimizer_runs() -> None:
    """A name that kept the logits would raise the peak by batch x sequence x vocabulary."""
    run = tiny_run(micro_batch=2)
    model = model_of(run)
    logits: list[weakref.ref[Tensor]] = []
    model.register_forward_hook(lambda module, inputs, output: logits.append(weakref.ref(output)))
    alive: dict[str, int] = {}

    @contextmanager
    def clock(phase: str) -> Any:
        alive[phase] = sum(each() is not None for each in logits)
        yield

    optimizer_step(
        model, build_optimizer(model, run.recipe), next(CountingFeed(run, CPU).batches(0)), run.recipe, clock=clock
    )
    assert len(logits) == 2
    assert alive == {"forward": 0, "backward": 0, "clip": 0, "optimizer": 0}


def test_dropout_is_a_function_of_its_seed() -> None:
    run = tiny_run(dropout=0.5, micro_batch=2)

    def weights(seeds: list[int] | None, disturb: Callable[[], object]) -> Tensor:
        disturb()
        model, _ = one_step(run, seeds=seeds)
        return torch.cat([each.detach().flatten() for each in model.parameters()])

    same = weights([1, 2], lambda: torch.manual_seed(5))
    assert torch.equal(same, weights([1, 2], lambda: torch.rand(7)))
    assert not torch.equal(same, weights([1, 3], lambda: None))


def test_bf16_mixed_keeps_parameters_gradients_and_loss_in_fp32() -> None:
    seen: set[torch.dtype] = set()
    run = tiny_run(precision="bf16-mixed")
    model = model_of(run)
    model.get_submodule("layers.0.mlp.up_proj").register_forward_hook(
        lambda module, inputs, output: seen.add(output.dtype)
    )
    result = optimizer_step(
        model, build_optimizer(model, run.recipe), next(CountingFeed(run, CPU).batches(0)), run.recipe
    )
    assert seen == {torch.bfloat16}
    assert result.loss.dtype == torch.float32
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert {each.grad.dtype for each in model.parameters() if each.grad is not None} == {torch.float32}
