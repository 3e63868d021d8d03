"""Models with mixers: the closed form and the trace of the engine's own part agree as integers."""

from __future__ import annotations

import pytest
from agreement import assert_agree
from random_runs import run_of

from trainledger.spec.rules.run import run_problems

pytestmark = pytest.mark.agreement

MIXERS = {
    "mamba-2": {"n_heads": 4, "head_dim": 8, "state": 6, "n_groups": 2, "chunk": 8},
    "mamba-2 without a norm": {"n_heads": 4, "head_dim": 8, "state": 6, "norm": False, "conv_bias": False},
    "gated-delta": {"n_heads": 4, "n_key_heads": 2, "key_dim": 6, "value_dim": 8},
    "kimi-delta": {"n_heads": 4, "head_dim": 8},
    "short-conv": {"bias": True},
}
RECIPES = {
    "fp32": {},
    "selective": {"precision": "bf16-mixed", "activation_checkpointing": "selective"},
    "full": {"precision": "bf16-mixed", "activation_checkpointing": "full", "attention": "math"},
    "segments": {"activation_checkpointing": "segments", "dropout": 0.1},
    "bf16": {"precision": "bf16", "loss": "chunked", "global_batch": 8, "micro_batch": 2},
}
MODELS = {
    "gated attention": {"attention.gated": True, "attention.qk_norm": "head"},
    "gated, normed over all heads": {"attention.gated": True, "attention.qk_norm": "width"},
    "one branch": {"layers": "M*-M-", "n_layers": 5},
    "both": {"layers": "B", "n_layers": 2},
    "experts": {"layers": "ME*-RB", "n_layers": 6, "feed_forward": "experts", "feed_forward.n_experts": 4},
    "sandwich": {"norm_place": "sandwich"},
    "after": {"norm_place": "post", "n_mtp_layers": 1},
    "windows": {"attention.window": 8, "attention.global_every": 3, "layers": "RAA"},
}


def model_of(kind: str, **changes: object) -> dict[str, object]:
    own = {f"mixer.{name}": value for name, value in MIXERS[kind].items()}
    return {"mixer": kind.split()[0], "layers": "RRA", "n_layers": 5, **own, **changes}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MIXERS)
def test_every_mixer_under_every_recipe(kind: str, recipe: str) -> None:
    assert_agree(run_of(model=model_of(kind), **RECIPES[recipe]))


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("model", MODELS)
def test_every_pattern_of_layers(model: str, precision: str) -> None:
    assert_agree(run_of(model=model_of("gated-delta", **MODELS[model]), precision=precision))


def test_many_equal_rounds_are_traced_once() -> None:
    assert_agree(run_of(model=model_of("mamba-2", layers="RRRA", n_layers=40)))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layers": "RXA"}, "model.layers = 'RXA': has the letter 'X'"),
        ({"layers": "RM"}, "has no layer with attention"),
        ({"layers": "A"}, "has no layer with the mixer"),
        ({"layers": "REA"}, "layers E have experts"),
        ({"block": "parallel"}, "cannot be combined with model.layers"),
        ({"mixer.n_groups": 3}, "must divide n_heads = 4; nearest that works: 4"),
    ],
)
def test_patterns_that_are_refused(changes: dict[str, object], problem: str) -> None:
    assert any(problem in str(one) for one in run_problems(run_of(model=model_of("mamba-2", **changes))))


def test_layers_with_a_mixer_need_one() -> None:
    assert "model.mixer: is missing" in str(next(run_problems(run_of(model={"layers": "RA"}))))


def test_what_a_mixer_is_not_trained_with() -> None:
    fields = {"recipe.compile", "recipe.documents", "recipe.lora.base_format", "recipe.precision"}
    run = run_of(
        model=model_of("mamba-2"),
        compile=True,
        documents="masked",
        lora={"rank": 2, "base_format": "nf4"},
        precision="fp8-tensorwise",
    )
    assert {one.field for one in run_problems(run)} >= fields
