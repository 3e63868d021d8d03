"""What a run is written as: overrides that make one run of another."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

import trainledger as tl
from trainledger.answers.defaults import run_of_model
from trainledger.spec.layout import Layout
from trainledger.spec.optimizers import IMPLEMENTATIONS
from trainledger.spec.run_text import changed, found_layout, overrides

RUN = {"model": {"preset": "gpt2"}, "recipe": {"seq_len": 64, "global_batch": 2, "steps": 2}}


@pytest.mark.parametrize(("kind", "other"), [*itertools.permutations(["adamw", "adamw-8bit", "sgd", "muon"], 2)])
def test_overrides_make_the_other_run_whatever_the_defaults_of_its_parts_are(kind: str, other: str) -> None:
    runs = [
        tl.load(RUN, {"recipe.optimizer": name, "recipe.optimizer.implementation": way})
        for name in (kind, other)
        for way in IMPLEMENTATIONS[name]
    ]
    for a, b in itertools.product(runs, repeat=2):
        again = changed(a, dict(line.split("=", 1) for line in overrides(a, b)))
        assert again.recipe == b.recipe


def test_overrides_give_a_run_a_teacher_and_take_it_away() -> None:
    plain, taught = tl.load(RUN), tl.load(RUN, {"teacher.preset": "gpt2-medium"})
    assert taught.recipe.objective.kind == "distillation"
    for a, b in ((plain, taught), (taught, plain)):
        assert tl.load(a, overrides(a, b)) == b
    assert overrides(taught, plain) == ("recipe.objective=next-token", "teacher=")


@pytest.mark.parametrize(
    ("axes", "says"), [({"shard": 2048, "pipeline": 4}, True), ({"shard": 2048, "tensor": 4}, False)]
)
def test_a_found_layout_keeps_the_assumed_batch_where_it_would_get_another(axes: dict[str, int], says: bool) -> None:
    cluster = ["cluster.device=h100-sxm", "cluster.count=8192"]
    asked = run_of_model("llama-3-70b", cluster)
    assert asked.recipe.global_batch == 2048
    recipe, origin = replace(asked.recipe, micro_batch=1), replace(asked.origin, searched=True)
    sets = found_layout(replace(asked, layout=Layout(**axes), recipe=recipe, origin=origin))
    assert ("recipe.global_batch=2048" in sets) == says
    assert tl.load("llama-3-70b", [*cluster, *sets]).recipe.global_batch == 2048
