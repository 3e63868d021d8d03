"""Positions: rotary with its scalings, learned, ALiBi, or none."""

from __future__ import annotations

from typing import ClassVar

from trainledger.spec.frozen import frozen
from trainledger.spec.parts import part
from trainledger.spec.setting import setting


@frozen(kw_only=True)
class Llama3:
    """Long wavelengths are stretched, short ones kept, those between blended (Llama 3.1)."""

    kind: ClassVar[str] = "llama3"

    factor: float = setting("factor by which long rotary wavelengths are stretched", quantity="number", at_least=1)
    low_freq_factor: float = setting(
        "wavelengths above original_seq_len over this are stretched in full", quantity="number", default=1.0, above=0
    )
    high_freq_factor: float = setting(
        "wavelengths below original_seq_len over this are kept", quantity="number", default=4.0, above=0
    )
    original_seq_len: int = setting("longest sequence before the scaling", default=8192, at_least=1, at_most=10**9)


@frozen(kw_only=True)
class Linear:
    """All wavelengths are stretched (Chen et al. 2023, Position Interpolation, arXiv 2306.15595)."""

    kind: ClassVar[str] = "linear"

    factor: float = setting("factor by which rotary wavelengths are stretched", quantity="number", at_least=1)


@frozen(kw_only=True)
class Yarn:
    """Long wavelengths are stretched, short ones kept, a ramp between (Peng et al. 2023, YaRN, arXiv 2309.00071)."""

    kind: ClassVar[str] = "yarn"

    factor: float = setting("factor by which long rotary wavelengths are stretched", quantity="number", at_least=1)
    beta_slow: float = setting(
        "wavelengths that fit at most this often into original_seq_len are stretched in full",
        quantity="number", default=1.0, above=0,
    )  # fmt: skip
    beta_fast: float = setting(
        "wavelengths that fit at least this often into original_seq_len are kept", quantity="number",
        default=32.0, above=0,
    )  # fmt: skip
    original_seq_len: int = setting("longest sequence before the scaling", default=8192, at_least=1, at_most=10**9)
    attention_factor: float = setting("factor of cosines and sines", quantity="number", default=1.0, above=0)
    truncate: bool = setting(
        "the ends of the ramp are rounded outwards to whole pairs of dims", quantity="flag", default=True
    )


@frozen(kw_only=True)
class LongRope:
    """A factor for each wavelength, which is not kept here (Ding et al. 2024, LongRoPE, arXiv 2402.13753)."""

    kind: ClassVar[str] = "longrope"

    factor: float = setting(
        "factor by which the longest rotary wavelengths are stretched", quantity="number", at_least=1
    )
    original_seq_len: int = setting("longest sequence before the scaling", default=8192, at_least=1, at_most=10**9)
    attention_factor: float = setting("factor of cosines and sines", quantity="number", default=1.0, above=0)


@frozen(kw_only=True)
class Rope:
    """Rotary positions (Su et al. 2021, RoFormer, arXiv 2104.09864)."""

    kind: ClassVar[str] = "rope"

    theta: float = setting("base of the rotary frequencies", quantity="number", default=10000.0, above=0)
    local_theta: float | None = setting(
        "base of the rotary frequencies in local layers, without scaling; absent = as in all layers",
        quantity="number", default=None, above=0,
    )  # fmt: skip
    dim: int | None = setting(
        "leading dims of a head that rotate; absent = all", default=None, at_least=2, at_most=10**6
    )
    interleaved: bool = setting(
        "pairs are neighbouring dims instead of dims of the two halves", quantity="flag", default=False
    )
    skip_every: int | None = setting(
        "every n-th layer has no positions; absent = all have", default=None, at_least=1, at_most=10**5
    )
    scaling: Llama3 | Linear | Yarn | LongRope | None = part(
        "how rotary wavelengths are stretched for longer sequences; absent = not",
        Llama3,
        Linear,
        Yarn,
        LongRope,
        default=None,
    )


@frozen(kw_only=True)
class Learned:
    """A learned vector for each position."""

    kind: ClassVar[str] = "learned"

    extra_rows: int = setting("unused rows before the learned positions (OPT has 2)", default=0, at_least=0)


@frozen(kw_only=True)
class Alibi:
    """Scores fall linearly with the distance, with one slope per head (Press et al. 2022, ALiBi, arXiv 2108.12409)."""

    kind: ClassVar[str] = "alibi"


@frozen(kw_only=True)
class NoPositions:
    """No positions: only the causal mask orders the tokens."""

    kind: ClassVar[str] = "none"
