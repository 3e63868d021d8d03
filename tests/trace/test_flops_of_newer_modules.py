"""Parameters and FLOPs of a step of transformers' own modules, of model types whose kept bytes are not compared."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from typing import Any

import pytest
import transformers
from transformers_compared import GROUPED, HEADS, WINDOWS, traced

from trainledger.ledger.step import account
from trainledger.spec.convert.huggingface import from_config
from trainledger.spec.recipe import Recipe
from trainledger.spec.run import Run

CONFIGS: dict[str, dict[str, Any]] = {
    "ernie4_5": HEADS,
    "ernie4_5_moe": {**GROUPED, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 40},
    "exaone4": {**WINDOWS, "sliding_window_pattern": 2},
    "glm4_moe": {
        **HEADS, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
    },
    "hunyuan_v1_moe": {**HEADS, "num_experts": 8, "moe_topk": 2},
    "minimax_m2": {**HEADS, "num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 12},
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.long
def test_parameters_and_flops_are_equal(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind])
    config.use_cache = False
    theirs, spec = traced(config), from_config(config.to_dict())
    attention = "sdpa" if theirs.by("kind").get("attention") else "math"
    recipe = Recipe(seq_len=32, global_batch=2, steps=1, grad_clip=None, attention=attention)
    ours = account(Run(model=spec, recipe=recipe))
    assert theirs.parameters == ours.parameters
    for each in ("matmul", "attention"):
        assert theirs.by("kind").get(each, 0) == ours.by("kind").get(each, 0)
    assert theirs.model_flops == ours.model_flops > 0
