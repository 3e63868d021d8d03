"""How training FLOPs are counted: the conventions in use, each by name, of one and the same step.

N parameters that a token passes through, T sequence length, L layers, H heads, K head width.
"""

from __future__ import annotations

from collections.abc import Callable

from trainledger.ledger import rules_of_thumb as thumb
from trainledger.ledger.entry import Entry, Int
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.model.parameters import parameters
from trainledger.ledger.rules import attended_pairs
from trainledger.spec.frozen import frozen
from trainledger.spec.layers import segments
from trainledger.spec.run import Run

# Kernels that skip the pairs above the diagonal.
CAUSAL = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention")
DAO_2 = "the benchmarks of Dao 2023, FlashAttention-2 (arXiv 2307.08691), section 4.1"


@frozen
class Convention:
    """A way to count the FLOPs of a step: its name, its formula, who counts so, and the count."""

    name: str
    formula: str
    source: str
    flops: Callable[[Run, Ledger], Int]


def attended_share(run: Run) -> float:
    """The part that the masks leave, over all layers, of the query-key pairs that the ledger counts."""
    tokens, left, counted = run.recipe.seq_len, 0, 0
    for segment in segments(run.model):
        for kind in segment.kinds:
            left += segment.count * attended_pairs(tokens, kind.window)
            known = kind.window if run.recipe.attention == "flash" else None
            counted += segment.count * attended_pairs(tokens, known, causal=False)
    return float(left / counted)


def _six_n(run: Run, ledger: Ledger) -> Int:
    return thumb.training_flops(parameters(run.model).active, ledger.tokens)


def _six_n_and_attention(run: Run, ledger: Ledger) -> Int:
    spec = run.model
    per_token = thumb.attention_flops_per_token(
        spec.n_layers, spec.attention.n_heads * spec.head_size, run.recipe.seq_len
    )
    return _six_n(run, ledger) + per_token * ledger.tokens


def _dense(run: Run, ledger: Ledger) -> Int:
    return ledger.model_flops


def _causal(run: Run, ledger: Ledger) -> Int:
    attention = ledger.filter(is_attention).model_flops
    return round(ledger.model_flops - attention * (1 - attended_share(run)))


def _kernels(run: Run, ledger: Ledger) -> Int:
    causal = ledger.filter(lambda each: each.kind == "attention" and each.name.startswith(CAUSAL) and not _masked(each))
    tokens, share = run.recipe.seq_len, attended_share(run)
    if run.recipe.attention != "flash":  # which knows windows itself; others have a mask in those layers
        share = attended_pairs(tokens, None) / attended_pairs(tokens, None, causal=False)
    return round(ledger.matmul_flops - causal.flops * (1 - share))


def _masked(attention: Entry) -> bool:
    """Whether a fused kernel is given a mask, under which it computes every pair."""
    return bool(attention.shape) and not attention.shape[-1]


def is_attention(entry: Entry) -> bool:
    """Whether an entry multiplies queries with keys or probabilities with values, in one kernel or unfused."""
    return entry.kind == "attention" or (entry.kind == "matmul" and entry.path.endswith(".self_attn"))


CONVENTIONS = {
    each.name: each
    for each in (
        Convention("6nd", "6 N", thumb.KAPLAN, _six_n),
        Convention("6nd+attention", "6 N + 12 L H K T", thumb.PALM, _six_n_and_attention),
        Convention("dense", "matmuls of forward and backward, every query against every key", thumb.PALM, _dense),
        Convention("causal", "the same, but only the unmasked query-key pairs of attention", DAO_2, _causal),
        Convention("kernels", "what the kernels run: recomputation too, flash kernels without masked pairs",
                   "Dao et al. 2022, FlashAttention (arXiv 2205.14135)", _kernels),
    )
}  # fmt: skip
