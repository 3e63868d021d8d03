"""Pipelines of real processes (gloo): the losses and weights of one process, and checkpoints for any other layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_runs import run_of
from spread_runs import compare, go_on, told, train_all

from trainledger.engine.nn.init import initialize
from trainledger.engine.nn.transformer import build
from trainledger.engine.train.parallel.pipeline import stages_of
from trainledger.engine.train.parallel.refusals import refuse_pipeline
from trainledger.engine.train.run_directory import all_checkpoints, read_facts
from trainledger.spec.problem import InvalidInput

pytestmark = pytest.mark.process

FIELDS: dict[str, Any] = {
    "model": {"n_layers": 4}, "steps": 20, "global_batch": 8, "micro_batch": 1, "checkpoints.every": 20,
    "evaluation.every": 5,
}  # fmt: skip
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "gpipe": {"pipeline": 2, "schedule": "gpipe"},
        "1f1b": {"pipeline": 2},
        "interleaved": {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2},
        "zero-bubble": {"pipeline": 2, "schedule": "zero-bubble"},
        "uneven": {"pipeline": 2, "stage_layers": (3, 1)},
    },
    4: {
        "shards": {"pipeline": 2, "shard": 2},
        "interleaved shards": {"pipeline": 2, "shard": 2, "schedule": "interleaved", "virtual_stages": 2},
        "zero-bubble of shards": {"pipeline": 2, "shard": 2, "schedule": "zero-bubble"},
        "tensor": {"pipeline": 2, "tensor": 2},
        "tensor and sequence": {"pipeline": 2, "tensor": 2, "sequence_parallel": True},
        "zero-bubble of tensor ranks": {"pipeline": 2, "tensor": 2, "schedule": "zero-bubble"},
        "replicas": {"pipeline": 2, "replicate": 2},
        "four stages": {"pipeline": 4},
    },
}
NAMES = [name for layouts in LAYOUTS.values() for name in layouts]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every layout's run, and that of one process in ``alone``."""
    return train_all(tmp_path_factory.mktemp("pipelines"), LAYOUTS, FIELDS)


@pytest.mark.parametrize("name", NAMES)
def test_a_pipeline_has_the_losses_of_one_process(trained: Path, name: str) -> None:
    compare(trained / name, trained / "alone", FIELDS["steps"])


def test_a_pipeline_goes_on_as_shards_and_shards_as_a_pipeline(trained: Path, tmp_path: Path) -> None:
    legs: list[dict[str, Any]] = [
        {"layout": LAYOUTS[2]["interleaved"], "stop_after": 5}, {"layout": {"shard": 2}, "stop_after": 10},
        {"layout": LAYOUTS[2]["zero-bubble"], "stop_after": 15}, {"layout": LAYOUTS[2]["1f1b"]},
    ]  # fmt: skip
    for leg in legs:
        go_on(tmp_path, leg, FIELDS)
        # Ranks agree once a step: a signal that comes after that stops them a step later.
        reached = leg["stop_after"] + 1 if "stop_after" in leg else FIELDS["steps"]
        assert read_facts(all_checkpoints(tmp_path / "run")[-1])["step"] == reached
    assert told(tmp_path / "run", "loss") == pytest.approx(told(trained / "alone", "loss"), rel=1e-6)


@pytest.mark.parametrize("name", LAYOUTS[2])
def test_the_stages_have_every_parameter_once_with_the_values_of_the_whole_model(name: str) -> None:
    run = run_of({"fields": FIELDS, "layout": LAYOUTS[2][name]})
    whole = build(run.model, run.recipe)
    initialize(whole, seed=3)
    found: dict[str, Any] = {}
    for rank in range(2):
        model = build(run.model, run.recipe)
        stages = stages_of(model, run, rank)
        assert sum(len(list(each.parameters())) for each in stages) == len(list(model.parameters()))
        initialize(model, seed=3)
        assert not found.keys() & dict(model.named_parameters()).keys()
        found |= dict(model.named_parameters())
    assert found.keys() == dict(whole.named_parameters()).keys()
    assert all(found[name].equal(each) for name, each in whole.named_parameters())


@pytest.mark.parametrize(
    ("fields", "layout", "named"),
    [
        ({"model": {"tie_embeddings": True}}, {}, "model.tie_embeddings"),
        ({"dropout": 0.1}, {}, "recipe.dropout"),
        ({"compile": True}, {"schedule": "zero-bubble"}, "recipe.compile"),
        ({"loss": "fused"}, {"schedule": "zero-bubble"}, "recipe.loss"),
        ({"activation_checkpointing": "full"}, {"schedule": "zero-bubble"}, "layout.schedule"),
        ({"micro_batch": 4}, {"pipeline": 4}, "layout.schedule = '1f1b': takes at least as many micro-batches"),
        ({"micro_batch": 2}, {"pipeline": 3, "schedule": "zero-bubble"}, None),
        ({"global_batch": 5}, {"schedule": "zero-bubble"}, "layout.schedule = 'zero-bubble': takes micro-batches in 2"),
        ({}, {"pipeline": 3, "stage_layers": (2, 0, 2)}, "layout.stage_layers"),
        ({}, {"shard": 2, "reshard_after_forward": True}, "layout.reshard_after_forward"),
    ],
)
def test_what_no_pipeline_trains_is_refused(fields: dict[str, Any], layout: dict[str, Any], named: str | None) -> None:
    run = run_of({"fields": {**FIELDS, **fields}, "layout": {"pipeline": 2, **layout}})
    if named is None:
        refuse_pipeline(run)
        return
    with pytest.raises(InvalidInput, match=named):
        refuse_pipeline(run)
