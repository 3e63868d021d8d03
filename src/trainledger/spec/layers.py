"""The kinds of layers of a model and their order, with runs of equal layers as one segment."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from typing import Any

from trainledger.spec.frozen import frozen
from trainledger.spec.model import ModelSpec


@frozen
class LayerKind:
    """What layers of a model differ in.

    ``window`` is the number of tokens that attention sees (None: all before), ``rotary`` whether rope rotates its
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
    number, heads, mixture = layer + 1, spec.attention, spec.experts
    seen_whole = heads.global_every is not None and number % heads.global_every == 0
    skipped = spec.rope is not None and spec.rope.skip_every and number % spec.rope.skip_every == 0
    experts = mixture is not None and layer >= mixture.n_dense_layers and number % mixture.every == 0
    return LayerKind(None if seen_whole else heads.window, spec.rope is not None and not skipped, experts)


def angles_of(spec: ModelSpec, kind: LayerKind) -> str | None:
    """The rotary module of a layer: ``rotary``, ``rotary_local``, or None without rotary positions."""
    if not kind.rotary:
        return None
    return "rotary_local" if kind.window is not None and _local_theta(spec) else "rotary"


def rotary_modules(spec: ModelSpec) -> tuple[str, ...]:
    """The rotary modules of a model."""
    names = {angles_of(spec, kind) for segment in segments(spec) for kind in segment.kinds}
    return tuple(each for each in ("rotary", "rotary_local") if each in names)


def windows_of(spec: ModelSpec) -> tuple[int | None, ...]:
    """The distinct attention windows of a model, None for global layers."""
    return tuple(dict.fromkeys(kind.window for segment in segments(spec) for kind in segment.kinds))


def local_angles(spec: ModelSpec) -> ModelSpec:
    """The spec with the rotary angles of local layers: their own base, without scaling."""
    assert spec.rope is not None
    assert spec.rope.local_theta is not None
    return replace(spec, positions=replace(spec.rope, theta=spec.rope.local_theta, local_theta=None, scaling=None))


def _local_theta(spec: ModelSpec) -> float | None:
    return None if spec.rope is None else spec.rope.local_theta


def last_kind(spec: ModelSpec) -> LayerKind:
    """The kind of the last layer, and of the blocks of multi-token prediction."""
    return segments(spec)[-1].kinds[-1]


def expert_layers(spec: ModelSpec) -> Any:
    """How many layers have experts, those of the multi-token prediction modules included."""
    mtp = spec.n_mtp_layers * last_kind(spec).experts
    return mtp + sum(each.count * sum(kind.experts for kind in each.kinds) for each in segments(spec))


def period_of(spec: ModelSpec) -> int:
    """The number of layers after which their kinds repeat."""
    skip_every = spec.rope.skip_every if spec.rope is not None else None
    return lcm(spec.attention.global_every or 1, skip_every or 1, spec.experts.every if spec.experts else 1)


def segments(spec: ModelSpec) -> tuple[Segment, ...]:
    """The layers of a model as runs of a repeated pattern, so that work does not grow with the number of layers.

    >>> from trainledger.spec.model import ModelSpec
    >>> from trainledger.spec.attention import MultiHead
    >>> from trainledger.spec.feed_forward import Dense, Experts
    >>> sizes = {"vocab_size": 8, "d_model": 8, "n_layers": 8, "max_seq_len": 8}
    >>> heads = MultiHead(n_heads=2, window=4, global_every=3)
    >>> local = ModelSpec(attention=heads, feed_forward=Dense(d_ff=8), **sizes)
    >>> [(len(each.kinds), each.count) for each in segments(local)]
    [(3, 2), (1, 2)]
    >>> mlp = Experts(d_ff=8, n_experts=4, n_dense_layers=3)
    >>> sparse = ModelSpec(attention=MultiHead(n_heads=2), feed_forward=mlp, **sizes)
    >>> [(len(each.kinds), each.count) for each in segments(sparse)]
    [(1, 3), (1, 5)]
    """
    period, dense = period_of(spec), spec.experts.n_dense_layers if spec.experts is not None else 0
    if period == 1 and not dense:
        return (Segment((kind_of(spec, 0),), spec.n_layers),)
    found: list[Segment] = []
    first = 0
    for until in (min(dense, spec.n_layers), spec.n_layers):
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
