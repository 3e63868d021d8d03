"""The runs of equal layers say of every layer what its number says."""

from hypothesis import given
from hypothesis import strategies as st

from trainledger.spec.layers import LayerKind, angles_of, kind_of, rotary_modules, segments
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields
from trainledger.spec.rules.model import model_problems

SIZES = {"vocab_size": 8, "d_model": 8, "attention.n_heads": 2, "feed_forward.d_ff": 8, "max_seq_len": 8}


@st.composite
def patterns(draw: st.DrawFn) -> ModelSpec:
    """Any number of layers in any pattern of windows, positions and experts."""
    n_layers = draw(st.integers(1, 40))
    mixture = {
        "feed_forward": "experts",
        "feed_forward.n_experts": 4,
        "feed_forward.n_dense_layers": draw(st.integers(0, n_layers)),
        "feed_forward.every": draw(st.integers(1, 4)),
    }
    window = draw(st.sampled_from([None, 4]))
    every = st.one_of(st.none(), st.integers(1, 5))
    return from_fields(
        ModelSpec,
        {
            "n_layers": n_layers,
            "attention.window": window,
            "positions.skip_every": draw(every),
            "attention.global_every": draw(st.one_of(st.none(), st.integers(2, 7))) if window else None,
            "positions.local_theta": draw(st.sampled_from([None, 10.0])) if window else None,
            **(mixture if draw(st.booleans()) else {}),
            **SIZES,
        },
    )


def one_by_one(spec: ModelSpec) -> list[LayerKind]:
    """The layers again, by the words of the fields: every so many-th, counted from one; leading ones are dense."""
    kinds = []
    for number in range(1, spec.n_layers + 1):
        is_global = spec.attention.window is None or (
            spec.attention.global_every is not None and number in _multiples(spec.attention.global_every)
        )
        turned = spec.rope.skip_every is None or number not in _multiples(spec.rope.skip_every)
        sparse = (
            spec.experts is not None
            and number > spec.experts.n_dense_layers
            and number in _multiples(spec.experts.every)
        )
        kinds.append(LayerKind(None if is_global else spec.attention.window, turned, sparse))
    return kinds


def _multiples(step: int) -> range:
    return range(step, 1000, step)


@given(patterns())
def test_segments_written_out_are_the_layers(spec: ModelSpec) -> None:
    written_out = [kind for each in segments(spec) for _ in range(each.count) for kind in each.kinds]
    assert written_out == one_by_one(spec) == [kind_of(spec, layer) for layer in range(spec.n_layers)]


@given(patterns())
def test_segments_are_few_and_short(spec: ModelSpec) -> None:
    runs = segments(spec)
    assert len(runs) <= 4, "leading dense layers and the rest, each a whole number of patterns and what remains"
    for each in runs:
        kinds = each.kinds
        shorter = (size for size in range(1, len(kinds)) if len(kinds) % size == 0)
        assert not any(kinds == kinds[:size] * (len(kinds) // size) for size in shorter)


def test_the_number_of_segments_does_not_grow_with_the_layers() -> None:
    spec = {
        "attention.window": 4,
        "attention.global_every": 6,
        "positions.skip_every": 4,
        "feed_forward": "experts",
        "feed_forward.n_experts": 4,
        "feed_forward.n_dense_layers": 3,
        **SIZES,
    }
    few, many = (segments(from_fields(ModelSpec, {"n_layers": count, **spec})) for count in (51, 12003))
    assert len(few) == len(many)
    assert sum(len(each.kinds) for each in few) == sum(len(each.kinds) for each in many)


def test_layers_without_a_pattern_may_be_an_array_or_a_symbol() -> None:
    count = object()
    (only,) = segments(from_fields(ModelSpec, {"n_layers": count, "attention.window": 4, **SIZES}))
    assert only.count is count
    assert only.kinds == (LayerKind(4, True, False),)


@given(patterns())
def test_the_modules_with_rotary_angles_are_those_that_a_layer_reads(spec: ModelSpec) -> None:
    read = {angles_of(spec, kind) for kind in one_by_one(spec)} - {None}
    assert set(rotary_modules(spec)) == read
    for kind in one_by_one(spec):
        local = kind.rotary and kind.window is not None and spec.rope.local_theta is not None
        assert angles_of(spec, kind) == ("rotary_local" if local else "rotary" if kind.rotary else None)


def test_local_layers_turn_by_their_own_base_and_are_not_stretched() -> None:
    spec = from_fields(
        ModelSpec,
        {
            "n_layers": 6,
            "attention.window": 4,
            "attention.global_every": 6,
            "positions.theta": 1e6,
            "positions.local_theta": 1e4,
            "positions.scaling.factor": 8.0,
            "positions.scaling": "linear",
            **SIZES,
        },
    )
    local = rotary_modules(spec)["rotary_local"]
    assert (local.rope.theta, local.rope.scaling) == (1e4, None)
    assert not list(model_problems(local))
