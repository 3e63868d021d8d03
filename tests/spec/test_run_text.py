"""What a run is written as: overrides that make one run of another."""

from __future__ import annotations

import itertools

import pytest

import trainledger as tl
from trainledger.spec.optimizers import IMPLEMENTATIONS
from trainledger.spec.run_text import changed, overrides

RUN = {"model": {"preset": "gpt2"}, "recipe": {"seq_len": 64, "global_batch": 2, "steps": 2}}


@pytest.mark.parametrize(("kind", "other"), itertools.permutations(["adamw", "adamw-8bit", "sgd", "muon"], 2))
def test_overrides_make_the_other_run_whatever_the_defaults_of_its_parts_are(kind: str, other: str) -> None:
    runs = [
        tl.load(RUN, {"recipe.optimizer": name, "recipe.optimizer.implementation": way})
        for name in (kind, other)
        for way in IMPLEMENTATIONS[name]
    ]
    for a, b in itertools.product(runs, repeat=2):
        again = changed(a, dict(line.split("=", 1) for line in overrides(a, b)))
        assert again.recipe == b.recipe
