"""How positions enter: rotary with its scalings, learned, ALiBi, or not at all."""

from __future__ import annotations

from typing import ClassVar

from trainledger.frozen import frozen
from trainledger.spec.parts import part
from trainledger.spec.setting import setting


@frozen(kw_only=True)
class Llama3:
    """Long waves are stretched, short ones left, those between blended (Llama 3.1)."""

    kind: ClassVar[str] = "llama3"

    factor: float = setting("long rotary waves are stretched this many times", quantity="number", at_least=1)
    low_freq_factor: float = setting(
        "waves longer than original_seq_len over this are stretched in full", quantity="number", default=1.0, above=0
    )
    high_freq_factor: float = setting(
        "waves shorter than original_seq_len over this are left as they are", quantity="number", default=4.0, above=0
    )
    original_seq_len: int = setting("longest sequence before the scaling", default=8192, at_least=1, at_most=10**9)


@frozen(kw_only=True)
class Linear:
    """Every wave is stretched (Chen et al. 2023, Position Interpolation, arXiv 2306.15595)."""

    kind: ClassVar[str] = "linear"

    factor: float = setting("rotary waves are stretched this many times", quantity="number", at_least=1)


@frozen(kw_only=True)
class Yarn:
    """Long waves are stretched, short ones left, with a ramp between (Peng et al. 2023, YaRN, arXiv 2309.00071)."""

    kind: ClassVar[str] = "yarn"

    factor: float = setting("long rotary waves are stretched this many times", quantity="number", at_least=1)
    beta_slow: float = setting(
        "waves that fit at most so often into original_seq_len are stretched in full", quantity="number", default=1.0,
        above=0,
    )  # fmt: skip
    beta_fast: float = setting(
        "waves that fit so often into original_seq_len, or oftener, are left as they are", quantity="number",
        default=32.0, above=0,
    )  # fmt: skip
    original_seq_len: int = setting("longest sequence before the scaling", default=8192, at_least=1, at_most=10**9)
    attention_factor: float = setting(
        "cosines and sines are multiplied by this", quantity="number", default=1.0, above=0
    )
    truncate: bool = setting("the ends of the ramp are rounded outwards to whole pairs", quantity="flag", default=True)


@frozen(kw_only=True)
class LongRope:
    """Each wave has a factor of its own, which is not held here (Ding et al. 2024, LongRoPE, arXiv 2402.13753)."""

    kind: ClassVar[str] = "longrope"

    factor: float = setting("the longest rotary waves are stretched this many times", quantity="number", at_least=1)
    original_seq_len: int = setting("longest sequence before the scaling", default=8192, at_least=1, at_most=10**9)
    attention_factor: float = setting(
        "cosines and sines are multiplied by this", quantity="number", default=1.0, above=0
    )


@frozen(kw_only=True)
class Rope:
    """Rotary positions (Su et al. 2021, RoFormer, arXiv 2104.09864)."""

    kind: ClassVar[str] = "rope"

    theta: float = setting("base of the rotary frequencies", quantity="number", default=10000.0, above=0)
    local_theta: float | None = setting(
        "base of the rotary frequencies in local layers, unscaled; absent = as in all", quantity="number", default=None,
        above=0,
    )  # fmt: skip
    dim: int | None = setting(
        "leading part of a head that is turned; absent = all of it", default=None, at_least=2, at_most=10**6
    )
    interleaved: bool = setting("neighbours are turned, not the two halves", quantity="flag", default=False)
    skip_every: int | None = setting(
        "every so many-th layer has no positions; absent = all have", default=None, at_least=1, at_most=10**5
    )
    scaling: Llama3 | Linear | Yarn | LongRope | None = part(
        "how rotary waves are stretched to longer sequences; absent = not", Llama3, Linear, Yarn, LongRope, default=None
    )


@frozen(kw_only=True)
class Learned:
    """A learned vector for each position."""

    kind: ClassVar[str] = "learned"

    extra_rows: int = setting("unused rows before the learned positions (OPT has 2)", default=0, at_least=0)


@frozen(kw_only=True)
class Alibi:
    """Scores fall with the distance, in each head at its own slope (Press et al. 2022, ALiBi, arXiv 2108.12409)."""

    kind: ClassVar[str] = "alibi"


@frozen(kw_only=True)
class NoPositions:
    """None: causality alone tells tokens apart."""

    kind: ClassVar[str] = "none"
