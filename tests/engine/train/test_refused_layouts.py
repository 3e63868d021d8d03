"""What a layout may say and the engine does not do yet is refused, never ignored."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_run import tiny_run
from torch import nn

from trainledger.engine.nn.transformer import build
from trainledger.engine.train.parallel.model_on_rank import spread
from trainledger.spec.layout import Layout
from trainledger.spec.problem import InvalidInput
from trainledger.spec.recipe import Recipe


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tensor": 2, "sequence_parallel": True, "overlap": ("gradients", "tensor")}, "layout.overlap"),
        ({"replicate": 2, "overlap": None}, "layout.overlap"),
        ({"shard": 2, "zero": 1, "tensor": 2}, "layout.zero"),
        ({"shard": 2, "gather": "tensor"}, "layout.gather"),
        ({"tensor": 2, "sequence_parallel": True, "sequence_gather": "again"}, "layout.sequence_gather"),
        ({"pipeline": 2}, "layout.pipeline"),
    ],
)
def test_what_no_model_is_spread_by_is_refused(fields: dict[str, Any], named: str) -> None:
    precision = Recipe(seq_len=8, global_batch=2, steps=1).precision
    mesh: Any = None  # nothing is asked of it before the layout is
    with pytest.raises(InvalidInput, match=named):
        spread(nn.Linear(2, 2), Layout(**fields), mesh, precision)


def test_weights_cast_once_are_not_split_over_tensor_ranks() -> None:
    run = tiny_run(precision="fp8-tensorwise", **{"precision.weight_caching": True})
    mesh: Any = None
    with pytest.raises(InvalidInput, match="weight_caching = true: is not split over tensor ranks yet"):
        spread(build(run.model, run.recipe), Layout(tensor=2), mesh, run.recipe.precision)
