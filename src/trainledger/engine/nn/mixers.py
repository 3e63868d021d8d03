"""Layers that mix tokens without attention: one class for each kind of `spec.mixers`.

Shapes: B sequences, T tokens, D d_model, H heads, P width of a head, G groups, N width of the state, K key, V value.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainledger.engine.nn.attention import heads
from trainledger.engine.nn.cache import MixerCache
from trainledger.engine.nn.scans import scan
from trainledger.spec.mixers import DELTA_CHUNK, GatedDelta, KimiDelta, Mamba2
from trainledger.spec.model import ModelSpec


class Convolution(nn.Linear):
    """A causal convolution of each channel alone; a row of the weight is the filter of a channel."""

    def __init__(self, channels: int, width: int, *, bias: bool, silu: bool) -> None:
        super().__init__(width, channels, bias=bias)
        self.silu = silu

    def run(self, x_BTC: Tensor, cache: MixerCache | None) -> Tensor:
        """[B, T, C] in and out."""
        given = (x_BTC, self.weight) if self.bias is None else (x_BTC, self.weight, self.bias)
        return scan("convolution", (float(self.silu),), *given, state=None if cache is None else cache.tail_BWC)


class GatedNorm(nn.RMSNorm):
    """An RMS norm with a weight, and a gate of its output."""

    def run(self, x: Tensor, gate: Tensor, *, sigmoid: bool) -> Tensor:
        """[..., D] in and out."""
        return scan("gated_norm", (self.eps or 0.0, float(sigmoid)), x, gate, self.weight)


class Mixer(nn.Module):
    """One of the kinds; `core` is what lies between the first projection and the last."""

    silu = True  # after the convolution
    A_log: Tensor
    dt_bias: Tensor
    D: Tensor
    decay_proj: nn.Linear
    gate_proj: nn.Linear

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        part = spec.mixer
        assert part is not None
        sizes = part.sizes(spec.d_model)
        self.cache: MixerCache | None = None
        self.names, self.widths = zip(*sizes.inward, strict=True)
        for name, size in sizes.vectors:
            self.register_parameter(name, nn.Parameter(torch.zeros(size)))
        self.in_proj = nn.Linear(spec.d_model, sum(self.widths), bias=part.bias)
        self.conv = Convolution(sizes.channels, part.conv_width, bias=part.conv_bias, silu=self.silu)
        for name, d_in, d_out in sizes.raised:
            setattr(self, name, nn.Linear(d_in, d_out, bias=False))
        self.norm = GatedNorm(sizes.norm, eps=spec.norm.eps) if sizes.norm else None
        self.out_proj = nn.Linear(sizes.outward, spec.d_model, bias=part.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] in and out."""
        parts = dict(zip(self.names, torch.split(self.in_proj(x_BTD), list(self.widths), dim=-1), strict=True))
        y_BTD: Tensor = self.out_proj(self.core(parts))
        if self.cache is not None:
            self.cache.past += x_BTD.shape[1]
        return y_BTD

    def core(self, parts: dict[str, Tensor]) -> Tensor:
        """The parts of the first projection to what the last one reads."""
        raise NotImplementedError

    def run(self, name: str, chunk: int, *inputs: Tensor) -> Tensor:
        """A scan, with this layer's state where it has one."""
        return scan(name, (float(chunk),), *inputs, state=None if self.cache is None else self.cache.state)


class StateSpace(Mixer):
    """Mamba-2 (Dao and Gu 2024)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        assert isinstance(spec.mixer, Mamba2)
        self.part = spec.mixer

    def core(self, parts: dict[str, Tensor]) -> Tensor:
        part = self.part
        mixed_BTC = self.conv.run(parts.pop("conv"), self.cache)
        shared = part.n_groups * part.state
        x_BTI, b_BTS, c_BTS = torch.split(mixed_BTC, [part.n_heads * part.head_dim, shared, shared], dim=-1)
        x_BTHP, b_BTGN, c_BTGN = heads(x_BTI, part.head_dim), heads(b_BTS, part.state), heads(c_BTS, part.state)
        vectors = (self.A_log, self.dt_bias)
        y_BTHP = self.run("state_space", part.chunk, x_BTHP, parts.pop("step"), *vectors, b_BTGN, c_BTGN, self.D)
        del mixed_BTC, x_BTI, b_BTS, c_BTS, x_BTHP, b_BTGN, c_BTGN
        y_BTI = y_BTHP.flatten(-2)
        del y_BTHP
        if self.norm is None:
            return F.silu(parts.pop("gate")) * y_BTI
        return self.norm.run(y_BTI, parts.pop("gate"), sigmoid=False)


class DeltaRule(Mixer):
    """The gated delta rule, with a decay for each head or, from a low rank, for each channel."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        assert isinstance(spec.mixer, GatedDelta | KimiDelta)
        self.part = spec.mixer

    def core(self, parts: dict[str, Tensor]) -> Tensor:
        part, by_channel = self.part, isinstance(self.part, KimiDelta)
        mixed_BTC = self.conv.run(parts.pop("conv"), self.cache)
        keys = part.n_key_heads * part.key_dim
        q_BTK, k_BTK, v_BTV = torch.split(mixed_BTC, [keys, keys, part.n_heads * part.value_dim], dim=-1)
        q_BTHK, k_BTHK, v_BTHV = heads(q_BTK, part.key_dim), heads(k_BTK, part.key_dim), heads(v_BTV, part.value_dim)
        decay, bias = parts.pop("decay"), self.dt_bias
        if by_channel:
            decay, bias = heads(self.decay_proj(decay), part.key_dim), bias.view(part.n_heads, part.key_dim)
        y_BTHV = self.run("delta_rule", DELTA_CHUNK, v_BTHV, q_BTHK, k_BTHK, parts.pop("rate"), decay, self.A_log, bias)
        del mixed_BTC, q_BTK, k_BTK, v_BTV, q_BTHK, k_BTHK, v_BTHV, decay
        gate = self.gate_proj(parts.pop("gate")) if by_channel else parts.pop("gate")
        assert self.norm is not None
        return self.norm.run(y_BTHV, heads(gate, part.value_dim), sigmoid=by_channel).flatten(-2)


class GatedConvolution(Mixer):
    """The short convolution of LFM2 between two gates."""

    silu = False

    def core(self, parts: dict[str, Tensor]) -> Tensor:
        y_BTD = self.conv.run(parts.pop("before") * parts.pop("conv"), self.cache)
        return parts.pop("after") * y_BTD


MIXERS: Mapping[str, type[Mixer]] = {
    "mamba-2": StateSpace,
    "gated-delta": DeltaRule,
    "kimi-delta": DeltaRule,
    "short-conv": GatedConvolution,
}


def mixer_of(spec: ModelSpec) -> Mixer:
    """The mixer of a spec."""
    assert spec.mixer is not None
    return MIXERS[spec.mixer.kind](spec)
