"""Each optimizer has its own fields, and what it has not is refused with the nearest that works."""

from typing import Any

import pytest

from models import sizes
from trainledger.spec.optimizers import IMPLEMENTATIONS, OPTIMIZERS
from trainledger.spec.problem import InvalidInput
from trainledger.spec.recipe import Recipe
from trainledger.spec.runfile import parse

MODEL = sizes(V=8, D=8, L=1, H=2, F=8, T=8)


def recipe_of(**fields: Any) -> Recipe:
    return parse({"model": MODEL, "recipe": {"seq_len": 8, "global_batch": 1, "steps": 1, "optimizer": fields}}).recipe


REFUSED = {
    "recipe.optimizer.implementation = 'fused': must be one of foreach, loop": {
        "kind": "rmsprop", "implementation": "fused"},
    "recipe.optimizer.implementation = 'foreach': must be one of loop, fused": {
        "kind": "adamw-8bit", "implementation": "foreach"},
    "recipe.optimizer.amsgrad = true: belongs to adamw and adam, and recipe.optimizer is lion; nearest that works: "
    "recipe.optimizer = adamw": {"kind": "lion", "amsgrad": True},
    "recipe.optimizer.centered = true: belongs to rmsprop, and recipe.optimizer is adamw; nearest that works: "
    "recipe.optimizer = rmsprop": {"centered": True},
    "recipe.optimizer.momentum = 0.9: belongs to momentum, nesterov, rmsprop and muon, and recipe.optimizer is sgd; "
    "nearest that works: recipe.optimizer = momentum": {"kind": "sgd", "momentum": 0.9},
    "recipe.optimizer.momentum = 0: must be above 0": {"kind": "nesterov", "momentum": 0},
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_is_refused(sentence: str) -> None:
    with pytest.raises(InvalidInput) as found:
        recipe_of(**REFUSED[sentence])
    assert str(found.value) == sentence


def test_each_optimizer_runs_as_it_may() -> None:
    for name, ways in IMPLEMENTATIONS.items():
        assert recipe_of(kind=name).optimizer == OPTIMIZERS[name](implementation=ways[0])
        for way in ways:
            assert recipe_of(kind=name, implementation=way).optimizer.implementation == way


def test_another_optimizer_keeps_what_was_chosen_of_the_shared_fields() -> None:
    base = {"model": MODEL, "recipe": recipe_of(beta2=0.99, implementation="fused")}
    lion = parse(base, ["recipe.optimizer=lion"]).recipe.optimizer
    assert (lion.kind, lion.beta2, lion.implementation) == ("lion", 0.99, "foreach")
