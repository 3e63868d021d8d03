"""What the optimizer's fields say against each other, with the nearest that works."""

from __future__ import annotations

from typing import Any

import pytest

from trainledger.spec.optimizers import IMPLEMENTATIONS, OPTIMIZER_LOOPS, OPTIMIZERS
from trainledger.spec.recipe import Recipe
from trainledger.spec.rules.recipe import recipe_problems


def recipe_of(**fields: Any) -> Recipe:
    return Recipe(seq_len=8, global_batch=1, steps=1, **fields)


REFUSED = {
    "recipe.optimizer_loop = 'fused': torch has no fused RMSProp; nearest that works: foreach": {
        "optimizer": "rmsprop", "optimizer_loop": "fused"},
    "recipe.optimizer_loop = 'fused': torch has no fused Adafactor; nearest that works: loop": {
        "optimizer": "adafactor", "optimizer_loop": "fused"},
    "recipe.optimizer_loop = 'fused': there is no fused lion here; nearest that works: foreach": {
        "optimizer": "lion", "optimizer_loop": "fused"},
    "recipe.optimizer_loop = 'foreach': there is no foreach adamw-8bit here; nearest that works: loop": {
        "optimizer": "adamw-8bit", "optimizer_loop": "foreach"},
    "recipe.amsgrad = true: belongs to optimizer adamw and adam, not to lion; nearest that works: false": {
        "optimizer": "lion", "amsgrad": True},
    "recipe.rmsprop_centred = true: belongs to optimizer rmsprop, not to adamw; nearest that works: false": {
        "rmsprop_centred": True},
    "recipe.rmsprop_momentum = 0.9: belongs to optimizer rmsprop, not to sgd; nearest that works: 0.0": {
        "optimizer": "sgd", "rmsprop_momentum": 0.9},
    "recipe.beta1 = 0.0: without it nesterov is optimizer sgd; nearest that works: 0.9": {
        "optimizer": "nesterov", "beta1": 0.0},
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_is_refused(sentence: str) -> None:
    assert [str(each) for each in recipe_problems(recipe_of(**REFUSED[sentence]))] == [sentence]


def test_what_is_said_to_work_works() -> None:
    for name in OPTIMIZERS:
        assert not list(recipe_problems(recipe_of(optimizer=name)))
        assert recipe_of(optimizer=name).optimizer_implementation == IMPLEMENTATIONS[name][0]
        for loop in OPTIMIZER_LOOPS:
            problems = list(recipe_problems(recipe_of(optimizer=name, optimizer_loop=loop)))
            assert bool(problems) == (loop not in IMPLEMENTATIONS[name])
            for each in problems:
                assert not list(recipe_problems(recipe_of(optimizer=name, optimizer_loop=each.nearest)))
