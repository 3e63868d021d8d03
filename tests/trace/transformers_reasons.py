"""Why transformers' own modules keep more for backward than the closed form: each reason with its bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from transformers_compared import Comparison, Row

from trainledger.spec.layers import kind_of, rotary_modules

NUMBER = 4  # bytes of fp32
INDEX = 8  # bytes of int64


@dataclass(frozen=True)
class Reason:
    """Why a place keeps more in transformers, and how many bytes that is, computed from the sizes alone."""

    place: str
    name: str
    why: str
    nbytes: Callable[[Comparison], int]


def angles(c: Comparison) -> int:
    """Cosines and sines for every pair of dims, twice each but where the type has them once."""
    if c.spec.positions.kind != "rope" or c.kind == "gptj":
        return 0
    copies = 1 if c.kind in ("gpt_oss", "deepseek_v2") else 2
    return len(rotary_modules(c.spec)) * copies * c.T * c.spec.rotary_size * NUMBER


def angles_of_layers(c: Comparison) -> int:
    """Cosines and sines in each layer, twice each, for queries and for keys."""
    return 4 * c.spec.n_layers * c.T * c.spec.rotary_size * NUMBER if c.kind == "gptj" else 0


def windows(c: Comparison) -> int:
    """Layers whose mask a fused kernel is given."""
    return sum(kind_of(c.spec, each).window is not None for each in range(c.spec.n_layers)) if c.fused else 0


def masks_of_layers(c: Comparison) -> int:
    """A mask as numbers for each layer and sequence, where ours has one for all, or none."""
    if c.kind == "falcon" and c.fused:  # by torch 2.14 and newer
        return c.spec.n_layers * c.B * c.T * c.T * NUMBER
    return (windows(c) * c.B - 1) * c.T * c.T * NUMBER if windows(c) else 0


def repeated_heads(c: Comparison) -> int:
    """Keys and values, for each query head instead of each of their own."""
    return 2 * windows(c) * (c.spec.attention.n_heads - c.spec.kv_heads) * c.B * c.T * c.spec.head_size * NUMBER


def copied_mixtures(c: Comparison) -> int:
    """The kernel's output once more."""
    copied = c.kind in ("gpt_neox", "phi", "phi3")
    return c.spec.n_layers * c.B * c.T * c.spec.attention.n_heads * c.spec.head_size * NUMBER if copied else 0


def whole_projections(c: Comparison) -> int:
    """Queries and keys as they were before rotation."""
    whole = c.kind == "gpt_neox"
    return 2 * c.spec.n_layers * c.B * c.T * c.spec.attention.n_heads * c.spec.head_size * NUMBER if whole else 0


def places_of_highest(c: Comparison) -> int:
    """An index for each query of each head."""
    return c.spec.n_layers * c.B * c.spec.attention.n_heads * c.T * INDEX if c.kind == "gpt_oss" else 0


def index_tensors(c: Comparison) -> int:
    """Two numbers in each layer."""
    return 2 * c.spec.n_layers * INDEX if c.kind == "falcon" else 0


def bool_masks(c: Comparison) -> int:
    """One byte for each query and key of each sequence."""
    return c.B * c.T * c.T if c.kind == "mpt" else 0


def written_out_gelu(c: Comparison) -> int:
    """Four tensors as wide as the MLP instead of one."""
    return 3 * c.spec.n_layers * c.B * c.T * c.spec.feed_forward.d_ff * NUMBER if c.activation == "gelu_new" else 0


def position_ids(c: Comparison) -> int:
    """The ids of positions, for each sequence where the type makes them so."""
    return {"gpt2": 1, "opt": c.B}.get(c.kind, 0) * c.T * INDEX


def routing(c: Comparison) -> int:
    """An index for each route, less the ends of experts as int64 instead of int32."""
    sparse = sum(kind_of(c.spec, each).experts for each in range(c.spec.n_layers))
    if not sparse:
        return 0
    if c.spec.experts is None:
        return 0
    return sparse * (c.spec.experts.per_token * c.B * c.T * INDEX - c.spec.experts.n_experts * (INDEX - 4))


REASONS = (
    Reason(
        "angles", "angles recomputed",
        "Cosines and sines of the rotation are computed in every forward and kept, each of them twice (once in gpt_oss"
        " and, as one complex number, in deepseek_v2). Ours are a table that is made once; it is counted in the "
        "resident bytes.",
        angles,
    ),
    Reason(
        "attention", "angles of each layer",
        "gptj looks cosines and sines up by position ids in each layer and repeats them for both dims of a pair, once"
        " for queries and once for keys.",
        angles_of_layers,
    ),
    Reason(
        "attention", "heads repeated",
        "A fused kernel with a mask gets keys and values copied for every query head. In ours the kernel shares them.",
        repeated_heads,
    ),
    Reason(
        "mask", "mask of each layer",
        "The mask of a window is boolean for each sequence, and each layer converts it to numbers for the kernel, "
        "which keeps them. Ours converts it once for all layers and sequences.",
        masks_of_layers,
    ),
    Reason(
        "attention", "output copied",
        "Where only a part of each head rotates, the parts are joined heads first, the kernel's output takes that "
        "order,"
        " and it is copied to tokens first for the projection that follows. Kernel and projection each keep theirs.",
        copied_mixtures,
    ),
    Reason(
        "attention", "whole projection",
        "Values are a view of the one projection of queries, keys and values, so all of it is kept; ours projects "
        "values separately.",
        whole_projections,
    ),
    Reason(
        "attention", "places of the highest scores",
        "The highest score is subtracted before softmax, and its position is kept for its gradient; softmax "
        "subtracts it internally and keeps none.",
        places_of_highest,
    ),
    Reason(
        "attention", "numbers as indices",
        "Keys and values are taken out of their projection by [-2] and [-1], which become tensors that are kept.",
        index_tensors,
    ),
    Reason(
        "mask", "mask as bytes",
        "masked_fill keeps its mask, one byte for each pair of tokens of each sequence; adding numbers keeps nothing.",
        bool_masks,
    ),
    Reason(
        "mlp", "unfused GELU",
        "GELU's tanh form runs as eight operations, of which four results are kept in addition to the input; ours is "
        "one"
        " kernel that keeps one.",
        written_out_gelu,
    ),
    Reason(
        "stream|embedding", "position ids",
        "Learned positions are looked up by ids, which the lookup keeps; ours takes the first rows of the table.",
        position_ids,
    ),
    Reason(
        "experts", "order of routes",
        "The token of each place is one more index that is kept, since gradients are added up by it; ours uses the "
        "inverse order. Where experts end is int32, ours int64.",
        routing,
    ),
)  # fmt: skip


def reasons_of(row: Row) -> tuple[tuple[Reason, int], ...]:
    """Each reason that applies to a row with the bytes that it explains."""
    found = ((each, each.nbytes(row.of)) for each in REASONS if re.fullmatch(each.place, row.place))
    return tuple((reason, nbytes) for reason, nbytes in found if nbytes)
