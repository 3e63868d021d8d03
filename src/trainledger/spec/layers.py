"""Which kinds of layers a model has, and in which order: runs of equal layers are told once."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import Any

from trainledger.frozen import frozen
from trainledger.spec.model import ModelSpec


@frozen
class LayerKind:
    """What sets one layer of a model apart from another.

    ``window`` is how many tokens its attention sees (None: all before), ``rotary`` whether rope turns its
    heads, ``experts`` whether its MLP is a mixture of experts.
    """

    window: int | None
    rotary: bool
    experts: bool


@frozen
class Segment:
    """``kinds`` in order, and that order ``count`` times (an int, or an array or symbol where all layers are equal)."""

    kinds: tuple[LayerKind, ...]
    count: Any


def kind_of(spec: ModelSpec, layer: int) -> LayerKind:
    """The kind of the layer with this number, counted from 0."""
    number = layer + 1
    seen_whole = spec.global_every is not None and number % spec.global_every == 0
    turned = spec.positions == "rope" and not (spec.rope_skip_every and number % spec.rope_skip_every == 0)
    experts = spec.n_experts is not None and layer >= spec.n_dense_layers and number % spec.expert_every == 0
    return LayerKind(None if seen_whole else spec.window, turned, experts)


def angles_of(spec: ModelSpec, kind: LayerKind) -> str | None:
    """Whose rotary angles turn the heads of a layer: ``rotary``, ``rotary_local``, or None where nothing turns them."""
    if not kind.rotary:
        return None
    return "rotary_local" if kind.window is not None and spec.rope_local_theta is not None else "rotary"


def rotary_modules(spec: ModelSpec) -> tuple[str, ...]:
    """The names of all that `angles_of` tells of the layers of a model."""
    names = {angles_of(spec, kind) for segment in segments(spec) for kind in segment.kinds}
    return tuple(each for each in ("rotary", "rotary_local") if each in names)


def windows_of(spec: ModelSpec) -> tuple[int | None, ...]:
    """The windows that the layers of a model have, each once, None for layers that see all before."""
    return tuple(dict.fromkeys(kind.window for segment in segments(spec) for kind in segment.kinds))


def local_angles(spec: ModelSpec) -> ModelSpec:
    """The spec whose rotary angles the local layers have: their own base, and waves that are not stretched."""
    assert spec.rope_local_theta is not None
    return replace(
        spec, rope_theta=spec.rope_local_theta, rope_local_theta=None, rope_factor=None, rope_scaling=None,
        rope_attention_factor=1.0,
    )  # fmt: skip


def last_kind(spec: ModelSpec) -> LayerKind:
    """The kind of the last layer, and of the blocks of multi-token prediction."""
    return segments(spec)[-1].kinds[-1]


def expert_layers(spec: ModelSpec) -> Any:
    """How many layers have experts, those of the multi-token prediction modules included."""
    ahead = spec.n_predict_ahead * last_kind(spec).experts
    return ahead + sum(each.count * sum(kind.experts for kind in each.kinds) for each in segments(spec))


def period_of(spec: ModelSpec) -> int:
    """After how many layers the kinds of layers repeat, where that many there are."""
    return lcm(spec.global_every or 1, spec.rope_skip_every or 1, spec.expert_every if spec.n_experts else 1)


def segments(spec: ModelSpec) -> tuple[Segment, ...]:
    """The layers of a model as runs of a repeated pattern: the work does not grow with the number of layers.

    >>> from trainledger.spec.model import ModelSpec
    >>> sizes = {"vocab_size": 8, "d_model": 8, "n_heads": 2, "d_ff": 8, "max_seq_len": 8}
    >>> local = ModelSpec(n_layers=8, window=4, global_every=3, **sizes)
    >>> [(len(each.kinds), each.count) for each in segments(local)]
    [(3, 2), (1, 2)]
    >>> sparse = ModelSpec(n_layers=8, n_experts=4, n_dense_layers=3, **sizes)
    >>> [(len(each.kinds), each.count) for each in segments(sparse)]
    [(1, 3), (1, 5)]
    """
    period = period_of(spec)
    if period == 1 and not spec.n_dense_layers:
        return (Segment((kind_of(spec, 0),), spec.n_layers),)
    found: list[Segment] = []
    first = 0
    for until in (min(spec.n_dense_layers, spec.n_layers), spec.n_layers):
        whole, rest = divmod(until - first, period)
        if whole:
            found.append(Segment(tuple(kind_of(spec, first + each) for each in range(period)), whole))
        if rest:
            found.append(Segment(tuple(kind_of(spec, until - rest + each) for each in range(rest)), 1))
        first = until
    return tuple(_simplest(each) for each in found)


def _simplest(segment: Segment) -> Segment:
    """The same run with the shortest pattern."""
    kinds = segment.kinds
    for size in range(1, len(kinds)):
        if len(kinds) % size == 0 and kinds == kinds[:size] * (len(kinds) // size):
            return Segment(kinds[:size], segment.count * (len(kinds) // size))
    return segment
