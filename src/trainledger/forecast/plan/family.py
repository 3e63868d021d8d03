"""Models of one family, from small to large: what a published model would be at another size.

The usual ways: the width of a head stays, width and number of heads grow together, the MLP keeps its ratio to the
width and its multiple, key-value heads are unchanged (Llama 3 has 8 from 8B to 405B; smaller models keep the
ratio), and depth follows width: d_model / n_layers stays within a quarter of the base model's. Published models keep
that within bounds (Llama 3 8B, 70B, 405B: 128, 102, 130; GPT-3 175B: 128; three of four dense models of the catalog lie
between 40 and 140), and Kaplan et al. 2020 (arXiv 2001.08361, section 3.1) find that the loss depends on it weakly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil

from trainledger.ledger.model.parameters import parameters
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import with_fields

DEPTH_BAND = (0.8, 1.25)  # of the base model's ratio of depth to width
_HEAD_BITS = 3  # digits of a number of heads after its first, in binary (32, 36, 40 ... 64, 72), for ranks to share
_LARGEST = 10**13  # parameters
_LARGEST_MULTIPLE = 256
_WIDTH_MULTIPLE = 64


class Family(Sequence[ModelSpec]):
    """The members of a family in the order of their parameters; the base model is one of them."""

    def __init__(self, base: ModelSpec) -> None:
        self.base = base
        found = {
            (spec.d_model, depth): (size, spec, depth) for spec in _widths(base) for size, depth in _depths(spec, base)
        }
        self._members = sorted(found.values(), key=lambda each: (each[0], each[2]))
        self._sizes = [size for size, _, _ in self._members]

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, at: int) -> ModelSpec:  # type: ignore[override]
        _, spec, depth = self._members[at]
        if (spec.d_model, depth) == (self.base.d_model, self.base.n_layers):
            return self.base
        return replace(spec, n_layers=depth, name=f"{self.base.name} scaled")

    def __repr__(self) -> str:
        return f"Family of {self.base.name}: {len(self):,} members, {self._sizes[0]:.3g} to {self._sizes[-1]:.3g}"

    @property
    def rule(self) -> str:
        """What the members have in common."""
        base = self.base
        return (
            f"scaled from {base.name}: heads of {base.head_size}, "
            f"d_ff {base.feed_forward.d_ff / base.d_model:.3g} x d_model, "
            f"{_kv_words(base)}, d_model / n_layers within a quarter of its {base.d_model / base.n_layers:.0f}"
        )

    def nearest(self, count: float) -> int:
        """The place of the member whose parameters are nearest to a count."""
        at = bisect_left(self._sizes, count)
        if at == 0 or at == len(self):
            return max(0, at - 1)
        return at - 1 if count - self._sizes[at - 1] < self._sizes[at] - count else at


@lru_cache(maxsize=8)
def family_of(base: ModelSpec) -> Family:
    """The family that a model belongs to.

    >>> from trainledger.answers.load import model
    >>> family = family_of(model("llama-3-8b"))
    >>> near = family[family.nearest(12.6e9)]
    >>> near.d_model, near.n_layers, near.attention.n_heads, near.feed_forward.d_ff, model("llama-3-8b") in family
    (5120, 33, 40, 17920, True)
    """
    return Family(base)


def scaled(base: ModelSpec, factor: float) -> ModelSpec | None:
    """The base model with so many times its heads, and its depth in proportion to its width.

    None where so many heads cannot share its key-value heads.

    >>> from trainledger.answers.load import model
    >>> half = scaled(model("llama-3-8b"), 0.5)
    >>> half.d_model, half.n_layers, half.attention.n_heads, half.attention.n_kv_heads, half.feed_forward.d_ff
    (2048, 16, 16, 8, 7168)
    """
    n_heads = round(base.attention.n_heads * factor)
    if n_heads == base.attention.n_heads:
        return base
    if n_heads < 1 or not _kv_heads(base, n_heads):
        return None
    wide = _wide(base, n_heads)
    depth = max(_least_depth(base), round(base.n_layers * wide.d_model / base.d_model))
    return replace(wide, n_layers=depth, name=f"{base.name} scaled")


def _least_depth(base: ModelSpec) -> int:
    return base.experts.n_dense_layers + 1 if base.experts is not None else 1


def _depths(spec: ModelSpec, base: ModelSpec) -> Iterator[tuple[int, int]]:
    """The depths of a width within the band, each with its parameters (between the ends by a straight line)."""
    rule = base.n_layers * spec.d_model / base.d_model
    least = _least_depth(base)
    first, last = max(least, ceil(rule * DEPTH_BAND[0])), max(least, int(rule * DEPTH_BAND[1]), round(rule))
    if spec.d_model == base.d_model:
        first = min(first, base.n_layers)
    low = parameters(replace(spec, n_layers=first)).total
    high = parameters(replace(spec, n_layers=last)).total
    for depth in range(first, last + 1):
        yield low + (high - low) * (depth - first) // max(1, last - first), depth


def _widths(base: ModelSpec) -> Iterator[ModelSpec]:
    """A member for each width, at the base model's depth, the base model itself among them."""
    yield base
    n_heads = 0
    while True:
        n_heads += 2 ** max(0, (n_heads or 1).bit_length() - 1 - _HEAD_BITS)
        if n_heads == base.attention.n_heads or not _kv_heads(base, n_heads):
            continue
        spec = _wide(base, n_heads)
        yield spec
        if parameters(spec).total > _LARGEST:
            return


def _kv_heads(base: ModelSpec, n_heads: int) -> int:
    """As many as the base model has; where that does not divide, and the model is smaller, in its ratio; else 0."""
    if base.latent or base.kv_heads == base.attention.n_heads:
        return n_heads
    ratio = base.attention.n_heads // base.kv_heads
    if n_heads % base.kv_heads == 0:
        return base.kv_heads
    return n_heads // ratio if n_heads < base.attention.n_heads and n_heads % ratio == 0 else 0


def _wide(base: ModelSpec, n_heads: int) -> ModelSpec:
    multiple = _multiple(base.d_model, _WIDTH_MULTIPLE)
    d_model = _scaled(base.d_model, n_heads, base.attention.n_heads, multiple)
    own_width = not base.latent and (base.attention.head_dim is not None or d_model != n_heads * base.head_size)
    inner = None if base.experts is None else base.experts.expert_d_ff
    if inner is not None:
        inner = _scaled(inner, d_model, base.d_model, _multiple(inner, _LARGEST_MULTIPLE))
    return with_fields(
        base,
        {
            "d_model": d_model,
            "attention.n_heads": n_heads,
            "attention.n_kv_heads": None if base.attention.n_kv_heads is None else _kv_heads(base, n_heads),
            "attention.head_dim": base.head_size if own_width else base.attention.head_dim,
            "feed_forward.d_ff": _scaled(
                base.feed_forward.d_ff, d_model, base.d_model, _multiple(base.feed_forward.d_ff, _LARGEST_MULTIPLE)
            ),
            "feed_forward.expert_d_ff": inner,
        },
    )


def _scaled(size: int, by: int, over: int, multiple: int) -> int:
    """size x by / over, to the nearest multiple, at least one."""
    return max(1, round(size * by / over / multiple)) * multiple


def _multiple(size: int, most: int) -> int:
    """The largest power of two, up to ``most``, that divides a size."""
    while size % most:
        most //= 2
    return most


def _kv_words(base: ModelSpec) -> str:
    if base.latent:
        return "its latent widths"
    return (
        "a key-value head for each" if base.kv_heads == base.attention.n_heads else f"{base.kv_heads} key-value heads"
    )
