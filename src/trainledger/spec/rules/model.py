"""Rules between the fields of a model, each with the nearest value that obeys it."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

from trainledger.spec.block import Experts, GlobalHeads, Latent, LayerNorm, Llama3, MultiHead, Rope, Yarn
from trainledger.spec.layers import ATTENDS, FEEDS, MIXES, period_of
from trainledger.spec.mixers import GatedDelta, Mamba2
from trainledger.spec.model import ModelSpec
from trainledger.spec.problem import Problem

LONGEST_PATTERN = 1000
_ODD = "rotary positions turn pairs, so the width must be even"


def model_problems(spec: ModelSpec) -> Iterator[Problem]:
    """Every contradiction between the fields of a model."""
    if isinstance(spec.norm, LayerNorm) and spec.norm.bias and not spec.norm.weight:
        yield Problem("model.norm.bias", True, "a norm without weight has no bias", False)
    if spec.block != "serial" and spec.norm_place != "pre":
        yield Problem("model.norm_place", spec.norm_place, f"a {spec.block} block has its norms before", "pre")
    if isinstance(spec.attention, Latent):
        yield from _latent(spec, spec.attention)
    else:
        yield from _heads(spec, spec.attention)
    if spec.mixer is not None or spec.layers is not None:
        yield from _mixed(spec)
    if isinstance(spec.positions, Rope):
        yield from _rope(spec, spec.positions)
    if spec.feed_forward.activation == "clamped_swish" and not spec.feed_forward.gated:
        yield Problem("model.feed_forward.activation", "clamped_swish", "belongs to a gated MLP", "silu")
    if spec.experts is not None:
        yield from _experts(spec.experts, spec.n_layers)
        if spec.experts.own_norms and spec.norm_place != "sandwich":
            rule = "experts norm the stream themselves and what they made, as norm_place = 'sandwich' has it"
            yield Problem("model.feed_forward.own_norms", True, rule, False)
    # Every layer of a pattern is followed by itself, so a pattern may not be as long as a model.
    if min(period_of(spec), spec.n_layers) > LONGEST_PATTERN:
        rule = (
            f"repeats after {period_of(spec):,} layers; at most {LONGEST_PATTERN:,} kinds of layers are distinguished"
        )
        yield Problem("model's pattern of layers", None, rule)


def _mixed(spec: ModelSpec) -> Iterator[Problem]:
    """Layers that are not all attention and MLP."""
    layers, mixer, at = spec.layers or "", spec.mixer, "model.mixer"
    allowed = "".join(letter for letter in layers if letter in {*ATTENDS, *MIXES, *FEEDS})
    allowed += "R" * (mixer is not None and not set(allowed) & MIXES) + "A" * (not set(allowed) & ATTENDS)
    if unknown := set(layers) - {*ATTENDS, *MIXES, *FEEDS}:
        rule = f"has the letter {min(unknown)!r}; known are A, G, R, B, *, M, - and E"
        yield Problem("model.layers", spec.layers, rule, allowed)
    elif not set(layers) & ATTENDS:
        yield Problem("model.layers", spec.layers, "has no layer with attention (A, G, B or *)", allowed)
    if mixer is None and set(layers) & MIXES:
        yield Problem(at, None, f"is missing: layers {layers[:20]!r} have one", "mamba-2")
    elif mixer is not None and not set(layers) & MIXES:
        yield Problem("model.layers", spec.layers, "has no layer with the mixer (R, B or M)", allowed)
    if "G" in layers and spec.attention.window is None:
        yield Problem("model.layers", spec.layers, "without a window all layers are global", layers.replace("G", "A"))
    if "E" in layers and spec.experts is None:
        yield Problem("model.feed_forward", spec.feed_forward.kind, "layers E have experts", "experts")
    if spec.block != "serial":
        yield Problem("model.block", spec.block, "cannot be combined with model.layers", "serial")
    if isinstance(mixer, Mamba2) and mixer.n_heads % mixer.n_groups:
        near = nearest_divisor(mixer.n_heads, mixer.n_groups)
        yield Problem(f"{at}.n_groups", mixer.n_groups, f"must divide n_heads = {mixer.n_heads}", near)
    if isinstance(mixer, GatedDelta) and mixer.n_heads % mixer.n_key_heads:
        near = nearest_divisor(mixer.n_heads, mixer.n_key_heads)
        yield Problem(f"{at}.n_key_heads", mixer.n_key_heads, f"must divide n_heads = {mixer.n_heads}", near)


def _heads(spec: ModelSpec, heads: MultiHead) -> Iterator[Problem]:
    at, n_heads = "model.attention", heads.n_heads
    if heads.head_dim is None and spec.d_model % n_heads:
        rule = f"must divide d_model = {spec.d_model} where head_dim is not given"
        yield Problem(f"{at}.n_heads", n_heads, rule, nearest := _nearest_heads(spec, heads))
        n_heads = nearest or n_heads
    elif spec.rope is not None and spec.rope.dim is None and spec.head_size % 2:
        rule = "rotary positions turn pairs, so the head width must be even"
        if heads.head_dim is not None:
            yield Problem(f"{at}.head_dim", heads.head_dim, rule, heads.head_dim + 1)
        else:
            nearest = _nearest_heads(spec, heads)
            yield Problem(f"{at}.n_heads", n_heads, f"{rule}, not {spec.head_size}", nearest)
            n_heads = nearest or n_heads
    if heads.n_kv_heads is not None and n_heads % heads.n_kv_heads:
        kv = nearest_divisor(n_heads, heads.n_kv_heads)
        yield Problem(f"{at}.n_kv_heads", heads.n_kv_heads, f"must divide n_heads = {n_heads}", kv)
    if heads.chunked and heads.window is None:
        yield Problem(f"{at}.chunked", True, "without a window there are no chunks", False)
    if heads.qk_norm == "turned" and spec.rope is None:
        yield Problem(f"{at}.qk_norm", "turned", "without rotary positions no head is turned", "head")
    for name in ("global_every", "in_global"):
        if (value := getattr(heads, name)) is not None and heads.window is None:
            shown = value if name == "global_every" else "a table"
            yield Problem(f"{at}.{name}", shown, "without a window all layers are global", "none")
    if heads.v_head_dim is not None and (heads.keys_as_values or heads.gated):
        rule = "must be absent: values are keys here" if heads.keys_as_values else "must be absent with a gate"
        yield Problem(f"{at}.v_head_dim", heads.v_head_dim, rule, "none")
    if heads.in_global is not None:
        yield from _global_heads(spec, heads, heads.in_global)


def _global_heads(spec: ModelSpec, heads: MultiHead, own: GlobalHeads) -> Iterator[Problem]:
    at, n_heads = "model.attention.in_global", own.n_heads or heads.n_heads
    kv = own.n_kv_heads or heads.n_kv_heads
    if own.n_heads is not None and (heads.head_dim is None or spec.positions.kind == "alibi"):
        rule = "ALiBi has one slope for each head" if heads.head_dim is not None else "needs model.attention.head_dim"
        yield Problem(f"{at}.n_heads", own.n_heads, rule, "none")
    if kv is not None and n_heads % kv:
        yield Problem(f"{at}.n_kv_heads", kv, f"must divide n_heads = {n_heads}", nearest_divisor(n_heads, kv))
    if own.head_dim is not None and spec.rope is not None:
        if spec.rope.local_theta is None:
            rule = "rotary angles of other heads need a base in local layers (model.positions.local_theta)"
            yield Problem(f"{at}.head_dim", own.head_dim, rule, "none")
        elif own.head_dim % 2 and spec.rope.dim is None:
            yield Problem(f"{at}.head_dim", own.head_dim, _ODD, own.head_dim + 1)
        elif own.head_dim < spec.rotary_size and spec.rope.dim is not None:
            rule = f"must be at least positions.dim = {spec.rope.dim}, which is turned"
            yield Problem(f"{at}.head_dim", own.head_dim, rule, spec.rope.dim)


def _latent(spec: ModelSpec, latent: Latent) -> Iterator[Problem]:
    if latent.rope_head_dim % 2:
        yield Problem("model.attention.rope_head_dim", latent.rope_head_dim, _ODD, latent.rope_head_dim + 1)
    if spec.positions.kind in ("learned", "alibi"):
        yield Problem("model.positions", spec.positions.kind, "latent attention has rotary positions or none", "rope")
    if latent.indexer is not None:
        at, width = "model.attention.indexer", latent.indexer.head_dim
        if latent.q_rank is None:
            yield Problem(at, "a table", "reads the latent of the queries: model.attention.q_rank must be set", "none")
        if spec.rope is None:
            yield Problem(at, "a table", "has rotary heads, so model.positions must be rope", "none")
        if width < latent.rope_head_dim:
            rule = f"must be at least rope_head_dim = {latent.rope_head_dim}, which is turned"
            yield Problem(f"{at}.head_dim", width, rule, latent.rope_head_dim)
    if spec.rope is None:
        return
    for name in ("dim", "skip_every"):
        value = getattr(spec.rope, name)
        if value is not None:
            yield Problem(f"model.positions.{name}", value, "cannot be combined with latent attention", "none")


def _rope(spec: ModelSpec, rope: Rope) -> Iterator[Problem]:
    if rope.dim is not None and spec.latent is None:
        most = spec.head_size - spec.head_size % 2
        if rope.dim > spec.head_size:
            rule = f"is more than the head width of {spec.head_size}"
            yield Problem("model.positions.dim", rope.dim, rule, most or "none")
        elif rope.dim % 2:
            yield Problem("model.positions.dim", rope.dim, _ODD, rope.dim - 1)
    if rope.local_dim is not None:
        rule = "without local_theta all layers turn alike" if rope.local_theta is None else ""
        rule = rule or (_ODD if rope.local_dim % 2 else "")
        if rule or rope.local_dim > spec.head_size:
            rule = rule or f"is more than the head width of {spec.head_size}"
            yield Problem("model.positions.local_dim", rope.local_dim, rule, "none")
    if rope.local_theta is not None and spec.attention.window is None:
        rule = "without a window all layers are global"
        yield Problem("model.positions.local_theta", rope.local_theta, rule, "none")
    scaling, at = rope.scaling, "model.positions.scaling"
    # The ends of yarn's ramp are rounded apart even where the two are equal (Kimi K2).
    if isinstance(scaling, Yarn) and scaling.beta_fast < scaling.beta_slow:
        rule = f"must be above beta_slow = {scaling.beta_slow}"
        yield Problem(f"{at}.beta_fast", scaling.beta_fast, rule, 4 * scaling.beta_slow)
    elif isinstance(scaling, Llama3) and (scaling.high_freq_factor < scaling.low_freq_factor):
        rule = f"must be at least low_freq_factor = {scaling.low_freq_factor}"
        yield Problem(f"{at}.high_freq_factor", scaling.high_freq_factor, rule, 4 * scaling.low_freq_factor)


def _experts(experts: Experts, n_layers: int) -> Iterator[Problem]:
    count, router, at = experts.n_experts, experts.router, "model.feed_forward"
    in_groups = count // router.groups * min(router.groups, router.top_groups)
    if experts.per_token > count:
        most = count if count % router.groups else in_groups
        yield Problem(f"{at}.per_token", experts.per_token, f"is more than n_experts = {count}", most)
    if count % router.groups:
        groups = nearest_divisor(count, router.groups)
        yield Problem(f"{at}.router.groups", router.groups, f"must divide n_experts = {count}", groups)
    elif router.top_groups > router.groups:
        rule = f"is more than router.groups = {router.groups}"
        yield Problem(f"{at}.router.top_groups", router.top_groups, rule, router.groups)
    elif count >= experts.per_token > in_groups:
        rule = f"is more than the {in_groups} experts in the chosen groups"
        yield Problem(f"{at}.per_token", experts.per_token, rule, in_groups)
    if experts.shared_gate and (experts.own_norms or not experts.n_shared):
        rule = "there is no shared expert (n_shared)" if not experts.n_shared else "cannot be combined with own_norms"
        yield Problem(f"{at}.shared_gate", True, rule, False)
    if experts.shared_d_ff is not None and not experts.n_shared:
        yield Problem(f"{at}.shared_d_ff", experts.shared_d_ff, "there is no shared expert (n_shared)", "none")
    if experts.n_dense_layers > n_layers:
        rule = f"is more than n_layers = {n_layers}"
        yield Problem(f"{at}.n_dense_layers", experts.n_dense_layers, rule, n_layers)


def _nearest_heads(spec: ModelSpec, heads: MultiHead) -> int | None:
    """The number of heads nearest to ``n_heads`` that d_model allows, or None where d_model is odd.

    One that the key-value heads divide, if there is any.
    """
    pairs = 1 if spec.rope is None or spec.rope.dim is not None else 2
    if spec.d_model % pairs:
        return None
    whole = spec.d_model // pairs
    kv = heads.n_kv_heads or 1
    return nearest_divisor(whole, heads.n_heads, multiple_of=1 if whole % kv else kv)


def nearest_divisor(whole: int, wanted: int, *, multiple_of: int = 1) -> int:
    """The divisor of ``whole`` nearest to ``wanted`` (the larger of two equally near).

    ``multiple_of`` is a divisor of ``whole`` too.

    >>> nearest_divisor(64, 7), nearest_divisor(4096, 24, multiple_of=8)
    (8, 32)
    """
    rest = whole // multiple_of
    small = [divisor for divisor in range(1, isqrt(rest) + 1) if rest % divisor == 0]
    found = (multiple_of * each for each in (*small, *(rest // divisor for divisor in small)))
    return min(found, key=lambda each: (abs(each - wanted), -each))
