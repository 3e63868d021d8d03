"""Every kind of parallelism and eight compositions beside one process: fifty steps, losses and final weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from spread_runs import Layouts, told, train_all, weights

pytestmark = [pytest.mark.process, pytest.mark.slow]

# Adam's epsilon is of the size of gradients here: of one that is rounding alone a smaller one makes a whole step.
FIELDS: dict[str, Any] = {
    "model": {"n_layers": 4}, "steps": 50, "global_batch": 8, "micro_batch": 1, "checkpoints.every": 50,
    "optimizer.epsilon": 1e-5,
}  # fmt: skip
EXPERTS: dict[str, Any] = FIELDS | {
    "model": {
        "n_layers": 4, "feed_forward": "experts", "feed_forward.n_experts": 4, "feed_forward.per_token": 2,
        "feed_forward.expert_d_ff": 16,
    }
}  # fmt: skip
DENSE: dict[int, Layouts] = {
    2: {
        "replicate": {"replicate": 2},
        "shard": {"shard": 2},
        "zero 1": {"shard": 2, "zero": 1},
        "zero 2": {"shard": 2, "zero": 2},
        "tensor": {"tensor": 2},
        "tensor and sequence": {"tensor": 2, "sequence_parallel": True},
        "pipeline": {"pipeline": 2},
        "interleaved": {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2},
        "zero-bubble": {"pipeline": 2, "schedule": "zero-bubble"},
        "ring": {"context": 2},
        "all-to-all": {"context": 2, "context_kind": "all-to-all"},
    },
    4: {
        "hybrid shards": {"replicate": 2, "shard": 2},
        "shards of tensor ranks": {"shard": 2, "tensor": 2},
        "stages of shards": {"pipeline": 2, "shard": 2},
        "stages of tensor ranks": {"pipeline": 2, "tensor": 2},
        "stages of rings": {"pipeline": 2, "context": 2},
        "rings of shards": {"context": 2, "shard": 2},
        "rings of tensor ranks": {"context": 2, "tensor": 2, "sequence_parallel": True},
    },
}
OF_EXPERTS: dict[int, Layouts] = {
    2: {"expert": {"shard": 2, "expert": 2}},
    4: {"experts of shards": {"shard": 4, "expert": 2}},
}


@pytest.mark.parametrize(("by_ranks", "fields"), [(DENSE, FIELDS), (OF_EXPERTS, EXPERTS)], ids=["dense", "experts"])
def test_losses_and_weights_are_those_of_one_process(
    tmp_path: Path, by_ranks: dict[int, Layouts], fields: dict[str, Any]
) -> None:
    train_all(tmp_path, by_ranks, fields)
    losses, alone = told(tmp_path / "alone", "loss"), weights(tmp_path / "alone", fields)
    assert len(losses) == fields["steps"]
    furthest: dict[str, float] = {}
    for name in (name for layouts in by_ranks.values() for name in layouts):
        assert told(tmp_path / name, "loss") == pytest.approx(losses, rel=1e-5), name
        found = weights(tmp_path / name, fields)
        assert found.keys() == alone.keys()
        furthest[name] = max((found[each] - alone[each]).abs().max().item() for each in alone)
    print({name: f"{each:.1e}" for name, each in furthest.items()})
    assert max(furthest.values()) < 1e-5, furthest
