"""What tensor ranks must divide, each rule with the nearest number of them that obeys all."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.spec.precision import TILE
from trainledger.spec.problem import Problem
from trainledger.spec.run import Run

_FARTHEST = 4096  # ranks from those that are asked for, among which the nearest is searched


def tensor_problems(run: Run) -> Iterator[Problem]:
    """What the tensor ranks of a layout break."""
    spec, ranks = run.model, run.layout.tensor
    if ranks == 1:
        if run.layout.sequence_parallel:
            yield Problem("layout.sequence_parallel", True, "needs layout.tensor above 1", False)
        return
    rule = _broken(run, ranks)
    if rule:
        yield Problem("layout.tensor", ranks, rule, _nearest(run, ranks))
    if run.recipe.loss.kind != "full" and not run.recipe.of_megatron:
        rule = "tensor ranks compute the loss of all logits at once, each over its columns"
        if run.recipe.loss.kind == "compiled":
            rule = "tensor ranks each compute the loss over their columns, which is not accounted for when compiled"
        yield Problem("recipe.loss", run.recipe.loss.kind, rule, "full")
    if spec.attention.qk_norm == "width":
        yield Problem("layout.tensor", ranks, "norms over the width of all heads (qk_norm) cannot be split by heads", 1)


def _broken(run: Run, ranks: int) -> str:
    """The first rule that so many ranks break; empty where they obey all."""
    spec = run.model
    split = {"model.attention.n_heads": spec.attention.n_heads, "the embedding's rows": spec.padded_vocab}
    if spec.experts is None or spec.experts.n_dense_layers or spec.experts.every > 1:
        split["model.feed_forward.d_ff"] = spec.feed_forward.d_ff
    if spec.experts is not None:
        split["an expert's width"] = spec.experts.width
        if spec.experts.shared_d_ff is not None:
            split["model.feed_forward.shared_d_ff"] = spec.experts.shared_d_ff
    for name, size in split.items():
        if size % ranks:
            return f"must divide {name} = {size}"
    kv = spec.kv_heads
    if not spec.latent and kv % ranks and ranks % kv:
        return f"must divide model.attention.n_kv_heads = {kv}, or be a multiple of it"
    tokens = run.rank_tokens
    if run.layout.sequence_parallel and tokens % ranks:
        return f"sequence parallelism splits the {tokens} tokens of a rank, so it must divide them"
    return "" if run.recipe.precision.float8 is None else _untiled(run, ranks)


def _untiled(run: Run, ranks: int) -> str:
    """What each rank would have of a size that can be tiled whole, and not in parts."""
    spec = run.model
    kv = spec.kv_heads if spec.kv_heads % ranks == 0 else ranks  # of fewer heads than ranks each rank has one
    sizes = {
        "d_ff": spec.feed_forward.d_ff,
        "n_heads x head_dim": spec.attention.n_heads * spec.head_size,
        "n_kv_heads x head_dim": kv * spec.head_size,
    }
    if any(each % TILE or each % ranks for each in sizes.values()):
        return ""
    for name, size in sizes.items():
        if size // ranks % TILE:
            has = f"each tensor rank has {size // ranks} of {name} = {size}"
            return f"8-bit matmuls need multiples of {TILE}, and {has}"
    return ""


def _nearest(run: Run, wanted: int) -> int:
    """The number nearest to ``wanted`` (the smaller of two equally near) that breaks no rule; 1 never does."""
    for distance in range(min(wanted, _FARTHEST)):
        for each in (wanted - distance, wanted + distance):
            if each >= 1 and not _broken(run, each):
                return each
    return 1
