"""Parts of a block that mix tokens without attention: a state of fixed size that each token changes, or a convolution.

All begin with one projection, run a causal convolution over some of its outputs, and end with another projection.
"""

from __future__ import annotations

from math import prod
from typing import ClassVar

from trainledger.spec.frozen import frozen
from trainledger.spec.setting import setting

DELTA_CHUNK = 64  # tokens of a chunk in the kernels of flash-linear-attention


@frozen
class MixerSizes:
    """The widths of a mixer in a model.

    ``inward`` are the parts of the first projection's output in order, ``raised`` (name, in, out) projections of two of
    these, ``vectors`` the learned vectors, ``norm`` the width of a norm (0: there is none), ``outward`` what the last
    projection reads, ``state`` the shape of what a sequence keeps besides the last tokens of the convolution.
    """

    inward: tuple[tuple[str, int], ...]
    outward: int
    vectors: tuple[tuple[str, int], ...] = ()
    raised: tuple[tuple[str, int, int], ...] = ()
    norm: int = 0
    state: tuple[int, ...] = ()

    @property
    def state_size(self) -> int:
        """Elements of the state of a sequence."""
        return prod(self.state) if self.state else 0

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return dict(self.inward)["conv"]


@frozen(kw_only=True)
class Mamba2:
    """A state space with one decay for each head (Dao and Gu 2024, Mamba-2, arXiv 2405.21060)."""

    kind: ClassVar[str] = "mamba-2"

    n_heads: int = setting("heads", at_least=1, at_most=10**6)
    head_dim: int = setting("head size", 64, at_least=1, at_most=10**6)
    state: int = setting("width of the state of a channel", 128, at_least=1, at_most=10**6)
    n_groups: int = setting("groups of heads that share B and C", 1, at_least=1, at_most=10**6)
    conv_width: int = setting("tokens that the convolution sees", 4, at_least=2, at_most=100)
    conv_bias: bool = setting("a bias in the convolution", True)
    bias: bool = setting("biases in the projections", False)
    norm: bool = setting("a gated norm before the last projection; else the gate alone", True)
    chunk: int = setting("tokens of a chunk", 256, at_least=1, at_most=10**6)

    def sizes(self, d_model: int) -> MixerSizes:
        """The widths in a model of this hidden size."""
        H, inner = self.n_heads, self.n_heads * self.head_dim
        return MixerSizes(
            inward=(("gate", inner), ("conv", inner + 2 * self.n_groups * self.state), ("step", H)),
            outward=inner,
            vectors=(("A_log", H), ("D", H), ("dt_bias", H)),
            norm=inner if self.norm else 0,
            state=(H, self.head_dim, self.state),
        )


@frozen(kw_only=True)
class GatedDelta:
    """The gated delta rule, one decay for each head (Yang et al. 2024, Gated Delta Networks, arXiv 2412.06464)."""

    kind: ClassVar[str] = "gated-delta"
    bias: ClassVar[bool] = False
    conv_bias: ClassVar[bool] = False

    n_heads: int = setting("value heads", at_least=1, at_most=10**6)
    n_key_heads: int = setting("query and key heads", at_least=1, at_most=10**6)
    key_dim: int = setting("width of a query and key head", 128, at_least=1, at_most=10**6)
    value_dim: int = setting("width of a value head", 128, at_least=1, at_most=10**6)
    conv_width: int = setting("tokens that the convolution sees", 4, at_least=2, at_most=100)

    def sizes(self, d_model: int) -> MixerSizes:
        """The widths in a model of this hidden size."""
        H, keys, values = self.n_heads, self.n_key_heads * self.key_dim, self.n_heads * self.value_dim
        return MixerSizes(
            inward=(("conv", 2 * keys + values), ("gate", values), ("rate", H), ("decay", H)),
            outward=values,
            vectors=(("A_log", H), ("dt_bias", H)),
            norm=self.value_dim,
            state=(H, self.key_dim, self.value_dim),
        )


@frozen(kw_only=True)
class KimiDelta:
    """The delta rule with a decay for each channel (Kimi Team 2025, Kimi Linear, arXiv 2510.26692)."""

    kind: ClassVar[str] = "kimi-delta"
    bias: ClassVar[bool] = False
    conv_bias: ClassVar[bool] = False

    n_heads: int = setting("heads", at_least=1, at_most=10**6)
    head_dim: int = setting("width of a head", 128, at_least=1, at_most=10**6)
    conv_width: int = setting("tokens that the convolution sees", 4, at_least=2, at_most=100)

    @property
    def key_dim(self) -> int:
        """Width of a query and key head."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.head_dim

    @property
    def n_key_heads(self) -> int:
        """Query and key heads."""
        return self.n_heads

    def sizes(self, d_model: int) -> MixerSizes:
        """The widths in a model of this hidden size."""
        H, K, inner = self.n_heads, self.head_dim, self.n_heads * self.head_dim
        return MixerSizes(
            inward=(("conv", 3 * inner), ("gate", K), ("rate", H), ("decay", K)),
            outward=inner,
            vectors=(("A_log", H), ("dt_bias", inner)),
            raised=(("gate_proj", K, inner), ("decay_proj", K, inner)),
            norm=K,
            state=(H, K, K),
        )


@frozen(kw_only=True)
class ShortConv:
    """A convolution over a few tokens between two gates (Liquid AI 2025, LFM2, arXiv 2511.23404)."""

    kind: ClassVar[str] = "short-conv"

    conv_width: int = setting("tokens that the convolution sees", 3, at_least=2, at_most=100)
    bias: bool = setting("biases in the projections and the convolution", False)

    @property
    def conv_bias(self) -> bool:
        """A bias in the convolution."""
        return self.bias

    def sizes(self, d_model: int) -> MixerSizes:
        """The widths in a model of this hidden size."""
        return MixerSizes(inward=(("before", d_model), ("after", d_model), ("conv", d_model)), outward=d_model)


Mixer = Mamba2 | GatedDelta | KimiDelta | ShortConv
