"""What the fields of a model say against each other: each rule once, and what it proposes works."""

from dataclasses import Field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refusals

from models import sizes as model_fields
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import fields_of, from_fields, kinds_of, with_fields
from trainledger.spec.reading import field_of, value_of
from trainledger.spec.rules.model import model_problems
from trainledger.spec.setting import quantity_of, read_value, rule_of

SIZES = model_fields(V=100, D=64, L=6, H=4, F=96, T=16)
LATENT = {
    "attention": "latent",
    "attention.kv_rank": 16,
    "attention.nope_head_dim": 8,
    "attention.rope_head_dim": 4,
    "attention.v_head_dim": 8,
}


def test_key_value_heads_are_held_against_the_heads_that_are_proposed() -> None:
    fields = {**SIZES, "attention.n_heads": 7, "attention.n_kv_heads": 3}
    heads, kv_heads = model_problems(from_fields(ModelSpec, fields))
    assert (heads.field, heads.nearest) == ("model.attention.n_heads", 8)
    assert str(kv_heads) == "model.attention.n_kv_heads = 3: must divide n_heads = 8; nearest that works: 4"
    assert not [*model_problems(from_fields(ModelSpec, {**fields, "attention.n_heads": 8, "attention.n_kv_heads": 4}))]


@pytest.mark.parametrize(("fields", "sentence"), refusals("model", LATENT=LATENT))
def test_each_rule_in_its_own_words(fields: list[str], sentence: str) -> None:
    pairs = (field.split("=") for field in fields)
    spec = from_fields(ModelSpec, {**SIZES, **{path: value_of(None, text) for path, text in pairs}})
    assert [str(each) for each in model_problems(spec)] == [sentence]


def test_what_obeys_every_rule_has_no_problems() -> None:
    for right in (
        {},
        LATENT,
        {"feed_forward": "experts", "feed_forward.n_experts": 8, "feed_forward.n_dense_layers": 1},
        {"attention.window": 8, "attention.global_every": 2},
    ):
        assert not list(model_problems(from_fields(ModelSpec, {**SIZES, **right})))


def field(path: str) -> Field[Any]:
    found = field_of({"model": ModelSpec}, f"model.{path}")
    assert found is not None
    return found


def of_field(path: str) -> st.SearchStrategy[Any]:
    """Values that the field takes by itself."""
    rule = rule_of(field(path))
    match quantity_of(field(path)):
        case "flag":
            values: st.SearchStrategy[Any] = st.booleans()
        case "text":
            values = st.sampled_from(rule["choices"]) if rule["choices"] else st.just("model")
        case "count":
            least = int(rule["at_least"])
            values = st.integers(least, least + 40)
        case _:
            values = st.sampled_from([1.0, 2.0, 40.0])
    return st.one_of(st.none(), values) if field(path).default is None else values


@st.composite
def any_models(draw: st.DrawFn) -> ModelSpec:
    """A model of fields that are each in order and may be at odds with one another."""
    kinds: dict[str, Any] = {}
    for each in ("norm", "positions"):
        kinds[each] = draw(st.sampled_from(sorted(kinds_of(field(each)) or {})))
    if kinds["positions"] == "rope":
        scaling = draw(st.sampled_from([None, "llama3", "linear", "yarn", "longrope", "proportional"]))
        kinds |= {} if scaling is None else {"positions.scaling": scaling, "positions.scaling.factor": 2.0}
    others = {f"attention.in_global.{name}": value for name, value in (("n_heads", 6), ("n_kv_heads", 3))}
    kinds |= draw(st.sampled_from([{}, LATENT, {**others, "attention.in_global.head_dim": 30, "attention.window": 4}]))
    kinds |= draw(st.sampled_from([{}, {"feed_forward": "experts", "feed_forward.n_experts": 8}]))
    spec = from_fields(ModelSpec, {**SIZES, **kinds})
    paths = [each for each in fields_of(spec) if kinds_of(field(each)) is None]
    changed = draw(st.sets(st.sampled_from(sorted(paths)), max_size=9))
    return with_fields(spec, {each: draw(of_field(each)) for each in sorted(changed)})


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
        nearest = fixable[0].nearest
        value = read_value(field(name), nearest) if kinds_of(field(name)) is None else nearest
        value = None if value == "none" and name == "attention.in_global" else value
        spec = with_fields(spec, {name: value})  # as a run file would be read
        assert all(each.field != fixable[0].field for each in model_problems(spec))
    assert all(each.nearest is None for each in model_problems(spec))


def test_a_pattern_as_long_as_a_model_is_refused() -> None:
    sizes = {"vocab_size": 8, "d_model": 8, "attention.n_heads": 2, "feed_forward.d_ff": 8, "max_seq_len": 8}
    long = from_fields(ModelSpec, {"n_layers": 99_991, "attention.window": 4, "attention.global_every": 9_973, **sizes})
    (problem,) = model_problems(long)
    assert "repeats after 9,973 layers; at most 1,000" in str(problem)
    assert not list(
        model_problems(
            from_fields(ModelSpec, {"n_layers": 99_991, "attention.window": 4, "attention.global_every": 997, **sizes})
        )
    )
    assert not list(
        model_problems(
            from_fields(ModelSpec, {"n_layers": 12, "attention.window": 4, "attention.global_every": 9_973, **sizes})
        )
    )
