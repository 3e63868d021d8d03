"""What the fields of a model say against each other: each rule once, and what it proposes works."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainledger.spec.model import ModelSpec
from trainledger.spec.rules.model import model_problems
from trainledger.spec.setting import read_value, rule_of

SIZES = {"vocab_size": 100, "d_model": 64, "n_layers": 6, "n_heads": 4, "d_ff": 96, "max_seq_len": 16}
LATENT = {"kv_rank": 16, "nope_head_dim": 8, "rope_head_dim": 4, "v_head_dim": 8}
BY_NAME = {each.name: each for each in fields(ModelSpec)}

RULES: list[tuple[dict[str, Any], str]] = [
    ({"norm_bias": True}, "model.norm_bias = true: rmsnorm has no bias; nearest that works: false"),
    (
        {"norm_weight": False},
        "model.norm_weight = false: rmsnorm has a weight here; layernorm may be without; nearest that works: true",
    ),
    (
        {"norm": "layernorm", "norm_plus_one": True},
        "model.norm_plus_one = true: only rmsnorm multiplies by 1 + its weight; nearest that works: false",
    ),
    (
        {"norm": "layernorm", "norm_weight": False, "norm_bias": True},
        "model.norm_bias = true: a norm without weight has no bias; nearest that works: false",
    ),
    (
        {"block": "parallel", "norm_place": "post"},
        "model.norm_place = 'post': a parallel block has its norms before; nearest that works: pre",
    ),
    (
        {"n_heads": 7},
        "model.n_heads = 7: must divide d_model = 64 where head_dim is not given; nearest that works: 8",
    ),
    (
        {"head_dim": 7},
        "model.head_dim = 7: rotary positions turn pairs, so the head width must be even; nearest that works: 8",
    ),
    (
        {"n_heads": 64},
        "model.n_heads = 64: rotary positions turn pairs, so the head width must be even, not 1; "
        "nearest that works: 32",
    ),
    ({"n_kv_heads": 3}, "model.n_kv_heads = 3: must divide n_heads = 4; nearest that works: 4"),
    (
        {"q_rank": 8},
        "model.q_rank = 8: belongs to latent attention, which needs kv_rank; nearest that works: none",
    ),
    (
        {**LATENT, "nope_head_dim": None},
        "model.nope_head_dim: is missing: latent attention (kv_rank) needs it",
    ),
    (
        {**LATENT, "rope_head_dim": 5},
        "model.rope_head_dim = 5: rotary positions turn pairs, so the width must be even; nearest that works: 6",
    ),
    (
        {**LATENT, "n_kv_heads": 2},
        "model.n_kv_heads = 2: latent attention has a key and a value for every query head; nearest that works: 4",
    ),
    (
        {**LATENT, "window": 8},
        "model.window = 8: does not go with latent attention (kv_rank); nearest that works: none",
    ),
    (
        {**LATENT, "positions": "learned"},
        "model.positions = 'learned': latent attention has rotary positions; nearest that works: rope",
    ),
    (
        {"rotary_dim": 7},
        "model.rotary_dim = 7: rotary positions turn pairs, so the width must be even; nearest that works: 6",
    ),
    (
        {"rotary_dim": 18},
        "model.rotary_dim = 18: is more than the head width of 16; nearest that works: 16",
    ),
    (
        {"positions": "alibi", "rope_skip_every": 4},
        "model.rope_skip_every = 4: positions are alibi, not rope; nearest that works: none",
    ),
    ({"extra_positions": 2}, "model.extra_positions = 2: only learned positions have rows; nearest that works: 0"),
    (
        {"rope_factor": 8.0, "rope_low_freq_factor": 4.0},
        "model.rope_high_freq_factor = 4.0: must be above rope_low_freq_factor = 4.0; nearest that works: 16.0",
    ),
    ({"global_every": 2}, "model.global_every = 2: without a window all layers are global; nearest that works: none"),
    (
        {"rope_local_theta": 100.0},
        "model.rope_local_theta = 100.0: without a window all layers are global; nearest that works: none",
    ),
    (
        {"gated": False, "activation": "clamped_swish"},
        "model.activation = 'clamped_swish': belongs to a gated MLP; nearest that works: silu",
    ),
    ({"n_dense_layers": 1}, "model.n_dense_layers = 1: needs n_experts; nearest that works: 0"),
    (
        {"n_experts": 4, "experts_per_token": 5},
        "model.experts_per_token = 5: is more than n_experts = 4; nearest that works: 4",
    ),
    (
        {"n_experts": 2, "experts_per_token": 3, "router_groups": 2},
        "model.experts_per_token = 3: is more than n_experts = 2; nearest that works: 1",
    ),
    ({"n_experts": 8, "router_groups": 3}, "model.router_groups = 3: must divide n_experts = 8; nearest that works: 4"),
    (
        {"n_experts": 8, "router_groups": 4, "router_top_groups": 5},
        "model.router_top_groups = 5: is more than router_groups = 4; nearest that works: 4",
    ),
    (
        {"n_experts": 8, "router_groups": 4, "experts_per_token": 3},
        "model.experts_per_token = 3: is more than the 2 experts in the chosen groups; nearest that works: 2",
    ),
    (
        {"n_experts": 8, "shared_expert_gate": True},
        "model.shared_expert_gate = true: there is no shared expert (n_shared_experts); nearest that works: false",
    ),
    (
        {"n_experts": 8, "n_dense_layers": 7},
        "model.n_dense_layers = 7: is more than n_layers = 6; nearest that works: 6",
    ),
]


@pytest.mark.parametrize(("given_fields", "sentence"), RULES, ids=[sentence.split(":")[0] for _, sentence in RULES])
def test_each_rule_in_its_own_words(given_fields: dict[str, Any], sentence: str) -> None:
    assert [str(each) for each in model_problems(ModelSpec(**{**SIZES, **given_fields}))] == [sentence]


def test_what_obeys_every_rule_has_no_problems() -> None:
    for right in ({}, LATENT, {"n_experts": 8, "n_dense_layers": 1}, {"window": 8, "global_every": 2}):
        assert not list(model_problems(ModelSpec(**{**SIZES, **right})))


def of_field(name: str) -> st.SearchStrategy[Any]:
    """Values that the field takes by itself."""
    rule = rule_of(BY_NAME[name])
    match rule["quantity"]:
        case "flag":
            values: st.SearchStrategy[Any] = st.booleans()
        case "text":
            values = st.sampled_from(rule["choices"]) if rule["choices"] else st.just("model")
        case "count":
            least = int(rule["at_least"])
            values = st.integers(least, least + 40)
        case _:
            values = st.sampled_from([1.0, 2.0, 40.0])
    return st.one_of(st.none(), values) if BY_NAME[name].default is None else values


@st.composite
def any_models(draw: st.DrawFn) -> ModelSpec:
    """A model of fields that are each in order and may be at odds with one another."""
    changed = draw(st.sets(st.sampled_from(sorted(BY_NAME)), max_size=9))
    return ModelSpec(**{**SIZES, **{name: draw(of_field(name)) for name in sorted(changed)}})


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(any_models())
def test_proposed_values_end_in_a_model_without_problems(spec: ModelSpec) -> None:
    for _ in range(20):
        found = list(model_problems(spec))
        assert len({each.field for each in found}) == len(found), "a field is complained of once"
        fixable = [each for each in found if each.nearest is not None]
        if not fixable:
            break
        name = fixable[0].field.removeprefix("model.")
        spec = replace(spec, **{name: read_value(BY_NAME[name], fixable[0].nearest)})  # as a run file would be read
        assert all(each.field != fixable[0].field for each in model_problems(spec))
    assert all(each.nearest is None for each in model_problems(spec))


def test_a_pattern_as_long_as_a_model_is_refused() -> None:
    sizes = {"vocab_size": 8, "d_model": 8, "n_heads": 2, "d_ff": 8, "max_seq_len": 8}
    long = ModelSpec(n_layers=99_991, window=4, global_every=9_973, **sizes)
    (problem,) = model_problems(long)
    assert "repeats after 9,973 layers; at most 1,000" in str(problem)
    assert not list(model_problems(ModelSpec(n_layers=99_991, window=4, global_every=997, **sizes)))
    assert not list(model_problems(ModelSpec(n_layers=12, window=4, global_every=9_973, **sizes)))
