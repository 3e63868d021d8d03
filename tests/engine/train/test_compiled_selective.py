"""Compiled blocks that run again but for what a policy keeps have a checkpoint of their own, inside of them."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from models import sizes
from trainledger.engine.nn.loss import next_token_loss
from trainledger.engine.nn.transformer import Transformer, build
from trainledger.engine.train.precision import refuse
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields, with_fields
from trainledger.spec.recipe import Recipe
from trainledger.spec.savings import Selective

SPEC = from_fields(ModelSpec, sizes(V=64, D=32, L=4, H=2, F=64, T=16))
RECIPE = Recipe(seq_len=16, global_batch=2, steps=1, compile=True, activation_checkpointing=Selective())
IDS, TARGETS = (torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(each)) for each in (1, 2))


class Matmuls(TorchDispatchMode):
    """Counts matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def gradients(recipe: Recipe, *, compiled: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = build(SPEC, recipe).train()
    for block in model.layers if compiled else ():
        block.compile()
    return gradients_of(model)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    next_token_loss(model(IDS), TARGETS).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def same(some: dict[str, Tensor], others: dict[str, Tensor], **near: float) -> None:
    assert some.keys() == others.keys()
    for name, each in some.items():
        torch.testing.assert_close(each, others[name], **near)


def test_the_engine_takes_it() -> None:
    refuse(RECIPE.precision, RECIPE)


@pytest.mark.parametrize("every", [1, 2])
def test_a_block_s_own_checkpoint_makes_again_what_the_policy_does_not_keep(every: int) -> None:
    selective = with_fields(RECIPE, {"activation_checkpointing.every": every})
    outside, none = replace(selective, compile=False), with_fields(RECIPE, {"activation_checkpointing": "none"})
    counts = []
    for recipe in (selective, outside, none):
        with Matmuls() as matmuls:
            found = gradients(recipe)
        counts.append(matmuls.count)
        same(found, gradients(none), rtol=0, atol=0)
    assert counts[0] == counts[1] == counts[2] + 3 * (4 // every)  # keys, the output of attention, up


def test_blocks_without_gradients_do_not_run_again() -> None:
    model: Transformer = build(SPEC, RECIPE)
    with Matmuls() as matmuls, torch.no_grad():
        model(IDS)
    assert matmuls.count == 4 * 7 + 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler")
def test_compiled_it_gives_the_same_gradients() -> None:
    same(gradients(RECIPE, compiled=True), gradients(with_fields(RECIPE, {"activation_checkpointing": "none"})))
