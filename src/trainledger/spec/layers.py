"""The kinds of layers of a model and their order, and the groups of layers that backward recomputes.

Chen et al. 2016 (Training Deep Nets with Sublinear Memory Cost): a model of L blocks in segments of s keeps L / s
inputs and the activations of one segment; s = sqrt(L) keeps the least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import lru_cache
from itertools import pairwise
from math import isqrt, lcm
from typing import Any

from trainledger.spec.frozen import frozen
from trainledger.spec.model import ModelSpec
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.recipe import Recipe
from trainledger.spec.savings import (
    ATTENTION,
    BESIDE_EXPERTS,
    CHECKPOINTING,
    MLP,
    Checkpointing,
    Lora,
    Segments,
    is_target,
)
from trainledger.spec.units import ceil_div


@frozen
class LayerKind:
    """The differences between layers of a model.

    ``window`` is the number of tokens that attention sees (None: all before), ``rotary`` whether rope rotates its
    heads, ``experts`` whether its MLP is a mixture of experts, ``in_16_bits`` whether its matmuls are where others'
    are in fewer; ``attends``, ``mixes`` and ``feeds`` whether it has attention, a mixer and an MLP; ``chooses`` whether
    an indexer of its own chooses its keys.
    """

    window: int | None
    rotary: bool
    experts: bool
    in_16_bits: bool = False
    attends: bool = True
    mixes: bool = False
    feeds: bool = True
    chooses: bool = False


# The letters of `ModelSpec.layers`: which layers attend, mix and feed. Those of one branch are NVIDIA's (Nemotron-H).
LONGEST_REPEATED = 12  # layers of a pattern that is looked for
ATTENDS, MIXES, FEEDS = frozenset("AGB*"), frozenset("RBM"), frozenset("AGRB-E")


@frozen
class Segment:
    """``kinds`` in order, and that order ``count`` times (an int, or an array or symbol where all layers are equal)."""

    kinds: tuple[LayerKind, ...]
    count: Any


def kind_of(spec: ModelSpec, layer: int) -> LayerKind:
    """The kind of the layer with this number, counted from 0."""
    number, heads, mixture = layer + 1, spec.attention, spec.experts
    skipped = spec.rope is not None and spec.rope.skip_every and number % spec.rope.skip_every == 0
    sparse = mixture is not None and layer >= mixture.n_dense_layers and number % mixture.every == 0
    letter = "A" if spec.layers is None else spec.layers[layer % len(spec.layers)]
    seen_whole = letter == "G" or (heads.global_every is not None and number % heads.global_every == 0)
    attends, part = letter in ATTENDS, spec.indexer
    return LayerKind(
        window=heads.window if attends and not seen_whole else None,
        rotary=attends and spec.rope is not None and not skipped,
        experts=sparse if letter in "AGRB" else letter == "E",
        attends=attends,
        mixes=letter in MIXES,
        feeds=letter in FEEDS,
        chooses=attends and part is not None and max(number - part.leading, 0) % part.every == 0,
    )


def angles_of(spec: ModelSpec, kind: LayerKind) -> str | None:
    """The rotary module of a layer: ``rotary``, ``rotary_local``, or None without rotary positions."""
    if not kind.rotary:
        return None
    return "rotary_local" if kind.window is not None and spec.rope and spec.rope.local_theta else "rotary"


def rotary_modules(spec: ModelSpec) -> dict[str, ModelSpec]:
    """The rotary modules of a model, each with a spec of its layers."""
    specs = {angles_of(spec, kind): spec.of_layers(kind.window) for segment in segments(spec) for kind in segment.kinds}
    return {name: specs[name] for name in ("rotary", "rotary_local") if name in specs}


def windows_of(spec: ModelSpec) -> tuple[int | None, ...]:
    """The distinct attention windows of a model, None for global layers."""
    kinds = [kind for segment in segments(spec) for kind in segment.kinds]
    return tuple(dict.fromkeys(kind.window for kind in kinds if kind.attends))


def mtp_kind(spec: ModelSpec) -> LayerKind:
    """The kind of the blocks of multi-token prediction: that of the last layer, with a choice of keys of its own."""
    last = segments(spec)[-1].kinds[-1]
    return replace(last, chooses=last.attends and spec.indexer is not None)


def expert_layers(spec: ModelSpec) -> Any:
    """The number of layers with experts, those of the multi-token prediction modules included."""
    mtp = spec.n_mtp_layers * mtp_kind(spec).experts
    return mtp + sum(segment.count * sum(kind.experts for kind in segment.kinds) for segment in segments(spec))


def period_of(spec: ModelSpec) -> int:
    """The number of layers after which their kinds repeat."""
    skip_every = spec.rope.skip_every if spec.rope is not None else None
    every = spec.experts.every if spec.experts else 1
    shared = spec.indexer.every if spec.indexer is not None else 1
    return lcm(spec.attention.global_every or 1, skip_every or 1, every, shared, len(spec.layers or "A"))


def segments(spec: ModelSpec) -> tuple[Segment, ...]:
    """The layers of a model as runs of a repeated pattern, so that work does not grow with the number of layers.

    >>> from trainledger.spec.model import ModelSpec
    >>> from trainledger.spec.block import Dense, Experts, MultiHead
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
    if spec.layers is not None:
        return tuple(_repeats([kind_of(spec, layer) for layer in range(_known_count(spec, "model.layers"))]))
    period, dense = period_of(spec), spec.leading_layers
    if period == 1 and not dense:
        return (Segment((kind_of(spec, 0),), spec.n_layers),)
    found: list[Segment] = []
    first = 0
    for until in (min(dense, spec.n_layers), spec.n_layers):
        whole, rest = divmod(until - first, period)
        if whole:
            found.append(Segment(tuple(kind_of(spec, first + layer) for layer in range(period)), whole))
        if rest:
            found.append(Segment(tuple(kind_of(spec, until - rest + layer) for layer in range(rest)), 1))
        first = until
    return tuple(_simplest(segment) for segment in found)


def _repeats(kinds: list[LayerKind]) -> Iterator[Segment]:
    """The layers as runs of repeated patterns: from each place on the pattern that most layers follow."""
    first = 0
    while first < len(kinds):
        best, covered = 1, 1
        for size in range(1, min(LONGEST_REPEATED, len(kinds) - first) + 1):
            pattern, count = kinds[first : first + size], 1
            while kinds[first + count * size : first + (count + 1) * size] == pattern:
                count += 1
            if count > 1 and count * size > covered:
                best, covered = size, count * size
        yield Segment(tuple(kinds[first : first + best]), covered // best)
        first += covered


def _known_count(spec: ModelSpec, why: str) -> int:
    """The number of layers; `InvalidInput` where it is an array or a symbol."""
    if not isinstance(spec.n_layers, int):
        rule = f"n_layers must be one number for {why}, not many or a symbol"
        raise InvalidInput([Problem("model.n_layers", None, rule)])
    return spec.n_layers


def _simplest(segment: Segment) -> Segment:
    """The same run with the shortest pattern."""
    kinds = segment.kinds
    for size in range(1, len(kinds)):
        if len(kinds) % size == 0 and kinds == kinds[:size] * (len(kinds) // size):
            return Segment(kinds[:size], segment.count * (len(kinds) // size))
    return segment


@frozen
class Group:
    """So many blocks in a row; ``again`` says that they keep only their input and are recomputed in backward."""

    size: int
    again: bool


@frozen
class LayerRun:
    """``groups`` of blocks of these ``kinds`` in order, and that order ``count`` times."""

    kinds: tuple[LayerKind, ...]
    groups: tuple[Group, ...]
    count: Any


def checkpointed(recipe: Recipe, kind: str) -> Recipe:
    """A recipe with another kind of activation checkpointing, which keeps what it shares with the one before."""
    if recipe.activation_checkpointing.kind == kind:
        return recipe
    return replace(recipe, activation_checkpointing=_as_kind(recipe.activation_checkpointing, kind))


@lru_cache(maxsize=256)  # whoever asks names any number of segments
def _as_kind(now: Checkpointing, kind: str) -> Checkpointing:
    cls: Any = CHECKPOINTING[kind]
    known = {field.name for field in fields(cls)}
    again: Checkpointing = cls(**{name: value for name, value in vars(now).items() if name in known})
    return again


def segment_size(n_layers: int, recipe: Recipe) -> int:
    """Blocks in one recomputed segment: given, or the whole number nearest to sqrt(n_layers).

    >>> from trainledger.spec.recipe import Recipe
    >>> segment_size(32, Recipe(seq_len=1, global_batch=1, steps=1, activation_checkpointing=Segments()))
    6
    """
    again = recipe.activation_checkpointing
    if isinstance(again, Segments) and again.n_blocks is not None:
        return again.n_blocks
    root = isqrt(n_layers)
    return root + 1 if n_layers - root * root > root else root


def is_again(recipe: Recipe, group: int) -> bool:
    """The group with this number, counted from 0, is recomputed."""
    again = recipe.activation_checkpointing
    if again.kind in ("full", "selective"):
        return (group + 1) % again.every == 0
    return again.kind == "segments"


def linear_layers(spec: ModelSpec, kind: LayerKind) -> list[str]:
    """The weights of the linear layers of a layer of this kind by name."""
    attend: tuple[str, ...] = ATTENTION[:4]
    if spec.latent is not None:
        queries = ("q_proj",) if spec.latent.q_rank is None else ("q_a_proj", "q_b_proj")
        attend = (*queries, *ATTENTION[-2:], "o_proj")
    mixture, feed = spec.experts if kind.experts else None, MLP if spec.feed_forward.gated else MLP[1:]
    if mixture is not None:
        has = (mixture.shared_gate, mixture.expert_d_model, mixture.expert_d_model)
        beside = tuple(name for name, there in zip(BESIDE_EXPERTS, has, strict=True) if there)
        feed = (*(feed if mixture.n_shared else ()), *beside)
    parts = (("self_attn", attend if kind.attends else ()), ("mlp", feed if kind.feeds else ()))
    return [f"{part}.{name}.weight" for part, names in parts for name in names]


def first_adapted(spec: ModelSpec, lora: Lora) -> int:
    """The number of the first layer with adapters, counted from 0: those before it have no backward."""
    for layer in range(spec.leading_layers + period_of(spec)):
        kind = kind_of(spec, layer)
        if (kind.experts and lora.of_experts) or any(is_target(n, lora.targets) for n in linear_layers(spec, kind)):
            return layer
    return 0


def group_size(spec: ModelSpec, recipe: Recipe) -> int:
    """Blocks in one group."""
    return segment_size(spec.n_layers, recipe) if recipe.activation_checkpointing.kind == "segments" else 1


def groups_of(spec: ModelSpec, recipe: Recipe) -> Iterator[tuple[int, Group]]:
    """Every group of a model in order, with the number of its first layer."""
    size = group_size(spec, recipe)
    for number, first in enumerate(range(0, spec.n_layers, size)):
        yield first, Group(min(size, spec.n_layers - first), is_again(recipe, number))


def layer_runs(spec: ModelSpec, recipe: Recipe | None) -> tuple[LayerRun, ...]:
    """The layers of a model as runs of repeated groups: the work does not grow with the number of layers.

    Without a recipe nothing is recomputed.

    >>> from trainledger.spec.recipe import Recipe
    >>> from trainledger.spec.block import Dense, MultiHead
    >>> sizes = {"vocab_size": 8, "d_model": 8, "max_seq_len": 8, "n_layers": 14}
    >>> spec = ModelSpec(attention=MultiHead(n_heads=2), feed_forward=Dense(d_ff=8), **sizes)
    >>> recipe = Recipe(seq_len=8, global_batch=1, steps=1, activation_checkpointing=Segments(n_blocks=4))
    >>> for run in layer_runs(spec, recipe):
    ...     print([each.size for each in run.groups], run.count)
    [4] 3
    [2] 1
    """
    if recipe is None:
        return tuple(_alike(segment, False) for segment in segments(spec))
    runs = _runs(spec, recipe)
    first, last = recipe.precision.first_in_16_bits, recipe.precision.last_in_16_bits
    if first or last:
        runs = tuple(_in_16_bits(runs, spec.n_layers, first, last))
    # Of what is not kept, the first round's input and the last one's output live on: a loop cannot say so.
    # The first of frozen blocks with adapters alone gives no gradient on.
    apart = recipe.activation_checkpointing.ends_apart or recipe.lora is not None
    if recipe.lora is not None and (first := first_adapted(spec, recipe.lora)):
        cuts = pairwise((0, first, first + 1, spec.n_layers))
        runs = tuple(run for start, until in cuts for run in layers_between(runs, start, until))
    return _ends_apart(runs) if apart else runs


def _ends_apart(runs: tuple[LayerRun, ...]) -> tuple[LayerRun, ...]:
    """The same layers with the first and the last round as separate runs."""
    first, *_ = runs
    runs = (*_rounds(first, 1, first.count - 1), *runs[1:])
    *_, last = runs
    return (*runs[:-1], *_rounds(last, last.count - 1, 1))


def _in_16_bits(runs: tuple[LayerRun, ...], n_layers: int, first: int, last: int) -> Iterator[LayerRun]:
    """The same layers, of which the first and the last ones have matmuls in 16 bits."""
    ends = min(first, n_layers), max(first, n_layers - last)
    for begin, end, wide in ((0, ends[0], True), (*ends, False), (ends[1], n_layers, True)):
        for run in layers_between(runs, begin, end):
            yield replace(run, kinds=tuple(replace(kind, in_16_bits=wide) for kind in run.kinds))


def layers_between(runs: tuple[LayerRun, ...], start: int, until: int) -> Iterator[LayerRun]:
    """The runs of the layers from ``start`` to ``until``; a group that is recomputed together ends with them."""
    at = 0
    for run in runs:
        size = len(run.kinds)
        low, high = max(start - at, 0), min(until - at, size * run.count)
        at += size * run.count
        if low < high:
            yield from _part(run, low, high)


def _part(run: LayerRun, low: int, high: int) -> Iterator[LayerRun]:
    """The layers from ``low`` to ``high`` of a run: the end of a round, whole rounds, the beginning of one."""
    size = len(run.kinds)
    head = min(-low % size, high - low)
    if head:
        yield _piece(run, low % size, low % size + head)
    whole, tail = divmod(high - low - head, size)
    if whole:
        yield LayerRun(run.kinds, run.groups, whole)
    if tail:
        yield _piece(run, 0, tail)


def _piece(run: LayerRun, low: int, high: int) -> LayerRun:
    groups, at = [], 0
    for group in run.groups:
        size = min(high, at + group.size) - max(low, at)
        at += group.size
        if size > 0:
            groups.append(Group(size, group.again))
    return LayerRun(run.kinds[low:high], tuple(groups), 1)


def _rounds(run: LayerRun, *counts: Any) -> Iterator[LayerRun]:
    for count in counts:
        if not isinstance(count, int) or count > 0:
            yield LayerRun(run.kinds, run.groups, count)


def _runs(spec: ModelSpec, recipe: Recipe) -> tuple[LayerRun, ...]:
    every = recipe.activation_checkpointing.every
    if recipe.activation_checkpointing.kind != "segments" and every == 1:
        return tuple(_alike(segment, is_again(recipe, 0)) for segment in segments(spec))
    layers = _known_count(spec, f"{recipe.activation_checkpointing.kind} in groups")
    size, dense = group_size(spec, recipe), spec.leading_layers
    groups = lcm(lcm(period_of(spec), size) // size, every)
    # Groups of leading dense layers, the one that goes over their end, the others, and a last one that is smaller.
    dense = min(dense, layers)
    bounds = sorted({0, dense // size, ceil_div(dense, size), layers // size, ceil_div(layers, size)})
    found: list[LayerRun] = []
    for first, until in pairwise(bounds):
        whole, rest = divmod(until - first, groups)
        if whole:
            found.append(_run(spec, recipe, first, groups, size, whole))
        if rest:
            found.append(_run(spec, recipe, until - rest, rest, size, 1))
    return tuple(found)


def _alike(segment: Segment, again: bool) -> LayerRun:
    return LayerRun(segment.kinds, (Group(1, again),) * len(segment.kinds), segment.count)


def _run(spec: ModelSpec, recipe: Recipe, first: int, groups: int, size: int, count: int) -> LayerRun:
    """A run of ``groups`` groups from the one with this number on, in the shortest pattern."""
    members = []
    for number in range(first, first + groups):
        layers = range(number * size, min((number + 1) * size, spec.n_layers))
        members.append((tuple(kind_of(spec, layer) for layer in layers), Group(len(layers), is_again(recipe, number))))
    whole = len(members)
    shortest = next(n for n in range(1, whole + 1) if whole % n == 0 and members == members[:n] * (whole // n))
    pattern = members[:shortest]
    kinds = tuple(kind for kinds, _ in pattern for kind in kinds)
    return LayerRun(kinds, tuple(group for _, group in pattern), count * (whole // shortest))
