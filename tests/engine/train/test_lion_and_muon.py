"""Lion against its formula over several steps; Muon with AdamW as one optimizer."""

from __future__ import annotations

import pytest
import torch
from tiny_run import tiny_run
from torch import Tensor, nn

from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.transformer import Transformer, build
from trainledger.engine.train.optimizer import build_optimizer, set_learning_rate
from trainledger.spec.optimizers import Lion
from trainledger.spec.run import Run


def lion(weight: Tensor, gradients: list[Tensor], rate: float, beta1: float, beta2: float, decay: float) -> Tensor:
    """Chen et al. 2023, program 1, in fp64."""
    weight, moment = weight.double(), torch.zeros_like(weight).double()
    for gradient in gradients:
        direction = torch.sign(beta1 * moment + (1 - beta1) * gradient.double())
        weight = weight - rate * (direction + decay * weight)
        moment = beta2 * moment + (1 - beta2) * gradient.double()
    return weight


@pytest.mark.parametrize("loop", ["foreach", "loop"])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_lion_is_its_formula(loop: str, decay: float) -> None:
    generator = torch.Generator().manual_seed(2)
    module = nn.Linear(12, 9)
    before = [each.detach().clone() for each in module.parameters()]
    recipe = tiny_run(learning_rate=0.01, optimizer=Lion(weight_decay=decay, beta1=0.8, implementation=loop)).recipe
    optimizer = build_optimizer(module, recipe)
    gradients = [[torch.randn(each.shape, generator=generator) for each in before] for _ in range(6)]
    for step in gradients:
        for weight, gradient in zip(module.parameters(), step, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()
    for at, weight in enumerate(module.parameters()):
        decays = decay if weight.ndim == 2 else 0.0
        expected = lion(before[at], [step[at] for step in gradients], 0.01, 0.8, recipe.optimizer.beta2, decays)
        torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-5, atol=1e-6)


def muon_run() -> Run:
    return tiny_run(optimizer="muon", **{"optimizer.momentum": 0.9})


def model_of(run: Run) -> Transformer:
    model = build(run.model, run.recipe)
    initialize(model, seed=1)
    return model


def test_muon_gets_the_hidden_matrices_and_adamw_the_rest() -> None:
    run = muon_run()
    model = model_of(run)
    optimizer = build_optimizer(model, run.recipe)
    names = {id(each): name for name, each in model.named_parameters()}
    groups = [{names[id(each)] for each in group["params"]} for group in optimizer.param_groups]
    muon, tables, vectors = groups
    assert muon == {name for name in names.values() if name.endswith("proj.weight")}
    assert tables == {"embed_tokens.weight", "lm_head.weight"}
    assert vectors == {name for name in names.values() if "norm" in name}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0]
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert optimizer.param_groups[1]["betas"] == (run.recipe.optimizer.beta1, run.recipe.optimizer.beta2)


def test_muon_with_adamw_does_what_the_two_do_apart() -> None:
    run = muon_run()
    together, apart = model_of(run), model_of(run)
    optimizer = build_optimizer(together, run.recipe)
    named = dict(apart.named_parameters())
    muon = torch.optim.Muon(
        [each for name, each in named.items() if name.endswith("proj.weight")],
        lr=0.5, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    tables = [named["embed_tokens.weight"], named["lm_head.weight"]]
    norms = [each for name, each in named.items() if "norm" in name]
    adamw = torch.optim.AdamW(
        [{"params": tables, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
        lr=0.5, betas=(run.recipe.optimizer.beta1, run.recipe.optimizer.beta2), eps=run.recipe.optimizer.epsilon,
        fused=True,
    )  # fmt: skip
    set_learning_rate(optimizer, 0.5)
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        for a, b in zip(together.parameters(), apart.parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        optimizer.step()
        muon.step()
        adamw.step()
    for (name, a), b in zip(together.named_parameters(), apart.parameters(), strict=True):
        assert torch.equal(a, b), name
