"""What the fields of a model must obey together, each rule with the nearest value that obeys it."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt, lcm

from trainledger.spec.model import ModelSpec
from trainledger.spec.problem import Problem

LONGEST_PATTERN = 1000


def model_problems(spec: ModelSpec) -> Iterator[Problem]:
    """Everything that the fields of a model say against each other."""
    yield from _norms(spec)
    if spec.latent:
        yield from _latent(spec)
    else:
        yield from _heads(spec)
    yield from _positions(spec)
    if spec.window is None:
        local = ("global_every", "rope_local_theta") if spec.positions == "rope" else ("global_every",)
        for name in local:
            if getattr(spec, name) is not None:
                yield Problem(f"model.{name}", getattr(spec, name), "without a window all layers are global", "none")
    if spec.activation == "clamped_swish" and not spec.gated:
        yield Problem("model.activation", spec.activation, "belongs to a gated MLP", "silu")
    yield from _experts(spec)
    yield from _pattern(spec)


def _pattern(spec: ModelSpec) -> Iterator[Problem]:
    """Every layer of a pattern is followed by itself, so a pattern may not be as long as a model."""
    experts = spec.expert_every if spec.n_experts is not None else 1
    period = lcm(spec.global_every or 1, spec.rope_skip_every or 1, experts)
    if min(period, spec.n_layers) > LONGEST_PATTERN:
        rule = f"repeats after {period:,} layers; at most {LONGEST_PATTERN:,} kinds of layers are told apart"
        yield Problem("model's pattern of layers", None, rule)


def _norms(spec: ModelSpec) -> Iterator[Problem]:
    if spec.norm == "rmsnorm":
        if spec.norm_bias:
            yield Problem("model.norm_bias", True, "rmsnorm has no bias", False)
        if not spec.norm_weight:
            yield Problem("model.norm_weight", False, "rmsnorm has a weight here; layernorm may be without", True)
    else:
        if spec.norm_plus_one:
            yield Problem("model.norm_plus_one", True, "only rmsnorm multiplies by 1 + its weight", False)
        if spec.norm_bias and not spec.norm_weight:
            yield Problem("model.norm_bias", True, "a norm without weight has no bias", False)
    if spec.block != "serial" and spec.norm_place != "pre":
        yield Problem("model.norm_place", spec.norm_place, f"a {spec.block} block has its norms before", "pre")


def _heads(spec: ModelSpec) -> Iterator[Problem]:
    if spec.head_dim is None and spec.d_model % spec.n_heads:
        rule = f"must divide d_model = {spec.d_model} where head_dim is not given"
        yield Problem("model.n_heads", spec.n_heads, rule, _nearest_heads(spec))
    elif spec.positions == "rope" and spec.rotary_dim is None and spec.head_size % 2:
        rule = "rotary positions turn pairs, so the head width must be even"
        if spec.head_dim is not None:
            yield Problem("model.head_dim", spec.head_dim, rule, spec.head_dim + 1)
        else:
            yield Problem("model.n_heads", spec.n_heads, f"{rule}, not {spec.head_size}", _nearest_heads(spec))
    if spec.n_heads % spec.kv_heads:
        kv = nearest_divisor(spec.n_heads, spec.kv_heads)
        yield Problem("model.n_kv_heads", spec.kv_heads, f"must divide n_heads = {spec.n_heads}", kv)
    for name in ("q_rank", "nope_head_dim", "rope_head_dim", "v_head_dim"):
        if getattr(spec, name) is not None:
            yield Problem(
                f"model.{name}", getattr(spec, name), "belongs to latent attention, which needs kv_rank", "none"
            )


def _latent(spec: ModelSpec) -> Iterator[Problem]:
    for name in ("nope_head_dim", "rope_head_dim", "v_head_dim"):
        if getattr(spec, name) is None:
            yield Problem(f"model.{name}", None, "is missing: latent attention (kv_rank) needs it")
    if spec.rope_head_dim is not None and spec.rope_head_dim % 2:
        rule = "rotary positions turn pairs, so the width must be even"
        yield Problem("model.rope_head_dim", spec.rope_head_dim, rule, spec.rope_head_dim + 1)
    if spec.n_kv_heads not in (None, spec.n_heads):
        rule = "latent attention has a key and a value for every query head"
        yield Problem("model.n_kv_heads", spec.n_kv_heads, rule, spec.n_heads)
    unbuilt: tuple[tuple[str, object], ...] = (
        ("head_dim", None), ("rotary_dim", None), ("qk_norm", None), ("attention_sinks", False), ("window", None),
        ("rope_skip_every", None), ("attention_softcap", None),
    )  # fmt: skip
    for name, absent in unbuilt:
        if getattr(spec, name) != absent:
            given = "none" if absent is None else absent
            yield Problem(f"model.{name}", getattr(spec, name), "does not go with latent attention (kv_rank)", given)
    if spec.positions != "rope":
        yield Problem("model.positions", spec.positions, "latent attention has rotary positions", "rope")


def _positions(spec: ModelSpec) -> Iterator[Problem]:
    if spec.rotary_dim is not None and spec.positions == "rope" and not spec.latent:
        most = spec.head_size - spec.head_size % 2
        if spec.rotary_dim > spec.head_size:
            rule = f"is more than the head width of {spec.head_size}"
            yield Problem("model.rotary_dim", spec.rotary_dim, rule, most or "none")
        elif spec.rotary_dim % 2:
            rule = "rotary positions turn pairs, so the width must be even"
            yield Problem("model.rotary_dim", spec.rotary_dim, rule, spec.rotary_dim - 1)
    if spec.positions != "rope" and not spec.latent:
        for name in ("rotary_dim", "rope_skip_every", "rope_factor", "rope_local_theta"):
            if getattr(spec, name) is not None:
                yield Problem(f"model.{name}", getattr(spec, name), f"positions are {spec.positions}, not rope", "none")
    if spec.extra_positions and spec.positions != "learned":
        yield Problem("model.extra_positions", spec.extra_positions, "only learned positions have rows", 0)
    low, high = spec.rope_low_freq_factor, spec.rope_high_freq_factor
    # The ends of yarn's ramp are rounded apart even where the two are equal (Kimi K2).
    if spec.rope_factor is not None and (high < low or (high == low and spec.rope_scaling != "yarn")):
        rule = f"must be above rope_low_freq_factor = {low}"
        yield Problem("model.rope_high_freq_factor", high, rule, 4 * low)


def _experts(spec: ModelSpec) -> Iterator[Problem]:
    if spec.n_experts is None:
        defaults: tuple[tuple[str, object], ...] = (
            ("expert_d_ff", None), ("n_shared_experts", 0), ("n_dense_layers", 0), ("expert_every", 1),
            ("shared_expert_gate", False), ("router_bias", False), ("router_correction", False), ("router_groups", 1),
            ("router_top_groups", 1),
        )  # fmt: skip
        for name, absent in defaults:
            if getattr(spec, name) != absent:
                given = "none" if absent is None else absent
                yield Problem(f"model.{name}", getattr(spec, name), "needs n_experts", given)
        return
    in_groups = spec.n_experts // spec.router_groups * min(spec.router_groups, spec.router_top_groups)
    if spec.experts_per_token > spec.n_experts:
        rule = f"is more than n_experts = {spec.n_experts}"
        most = spec.n_experts if spec.n_experts % spec.router_groups else in_groups
        yield Problem("model.experts_per_token", spec.experts_per_token, rule, most)
    if spec.n_experts % spec.router_groups:
        groups = nearest_divisor(spec.n_experts, spec.router_groups)
        yield Problem("model.router_groups", spec.router_groups, f"must divide n_experts = {spec.n_experts}", groups)
    elif spec.router_top_groups > spec.router_groups:
        rule = f"is more than router_groups = {spec.router_groups}"
        yield Problem("model.router_top_groups", spec.router_top_groups, rule, spec.router_groups)
    elif spec.n_experts >= spec.experts_per_token > in_groups:
        rule = f"is more than the {in_groups} experts in the chosen groups"
        yield Problem("model.experts_per_token", spec.experts_per_token, rule, in_groups)
    if spec.shared_expert_gate and not spec.n_shared_experts:
        yield Problem("model.shared_expert_gate", True, "there is no shared expert (n_shared_experts)", False)
    if spec.n_dense_layers > spec.n_layers:
        rule = f"is more than n_layers = {spec.n_layers}"
        yield Problem("model.n_dense_layers", spec.n_dense_layers, rule, spec.n_layers)


def _nearest_heads(spec: ModelSpec) -> int | None:
    """The number of heads nearest to ``n_heads`` that d_model allows, or None where d_model is odd."""
    if spec.positions != "rope" or spec.rotary_dim is not None:
        return nearest_divisor(spec.d_model, spec.n_heads)
    return None if spec.d_model % 2 else nearest_divisor(spec.d_model // 2, spec.n_heads)


def nearest_divisor(whole: int, wanted: int) -> int:
    """The divisor of ``whole`` nearest to ``wanted`` (the larger of two equally near).

    >>> nearest_divisor(64, 7)
    8
    """
    small = [each for each in range(1, isqrt(whole) + 1) if whole % each == 0]
    return min((*small, *(whole // each for each in small)), key=lambda each: (abs(each - wanted), -each))
