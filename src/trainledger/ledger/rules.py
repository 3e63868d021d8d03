"""Cost rules: what one operation computes and moves. Only this module has these formulas.

Plain arithmetic over the arguments, so that the same rule gives an int for one run, an array for many at
once and a formula when handed symbols. FLOPs count 2 per multiply-add; causal attention is counted dense
(every query against every key), as `torch.utils.flop_counter` and PaLM (Chowdhery et al. 2022, appendix B)
do: what a kernel skips above the diagonal is not taken off.
A window bounds the keys of a query only where the kernel knows it (`keys_seen`); a mask spares no work.
"""

from __future__ import annotations

from trainledger.ledger.core.sizes import smaller
from trainledger.ledger.entry import Int
from trainledger.spec.units import ceil_div

# Elementary operations per element that a normalization, a softmax or an update takes, one for each
# addition, multiplication, root, exponential or comparison in its definition; an `assumed` count, as
# libraries differ in how they arrange them.
FLOPS_PER_ELEMENT = {
    "elementwise": 1,
    "rmsnorm": 4,
    "layernorm": 7,
    "norm backward": 11,
    "softmax": 4,
    "softmax backward": 4,
    "reduction": 1,
    "gated rmsnorm": 8,
    "gated rmsnorm backward": 19,
}


def matmul_flops(m: Int, n: Int, k: Int, batch: Int = 1) -> Int:
    """FLOPs of ``batch`` matmuls [m, k] @ [k, n]: a multiplication and an addition per term.

    >>> matmul_flops(1024, 256, 512)
    268435456
    """
    return 2 * batch * m * n * k


def attention_flops(batch: Int, heads: Int, queries: Int, keys: Int, head_dim: Int, value_dim: Int) -> Int:
    """FLOPs of scores and mixture in a fused attention forward, dense (the softmax left out).

    >>> attention_flops(1, 1, 8, 8, 4, 4) == 2 * matmul_flops(8, 8, 4)
    True
    """
    return matmul_flops(queries, keys, head_dim, batch * heads) + matmul_flops(queries, value_dim, keys, batch * heads)


def attention_backward_flops(batch: Int, heads: Int, queries: Int, keys: Int, head_dim: Int, value_dim: Int) -> Int:
    """FLOPs of a fused attention backward: scores again, then the gradients of probabilities, v, q and k.

    Five matmuls where forward has two (Dao et al. 2022, FlashAttention, appendix B.4).
    """
    with_head = matmul_flops(queries, keys, head_dim, batch * heads)
    return 3 * with_head + 2 * matmul_flops(queries, value_dim, keys, batch * heads)


def attention_backward_model_flops(
    batch: Int, heads: Int, queries: Int, keys: Int, head_dim: Int, value_dim: Int
) -> Int:
    """The part of a fused attention backward that is not recomputation: twice its forward."""
    return 2 * attention_flops(batch, heads, queries, keys, head_dim, value_dim)


def index_flops(batch: Int, heads: Int, queries: Int, keys: Int, width: Int) -> Int:
    """FLOPs of the scores by which an indexer chooses keys, and of their weighted sum over heads, dense."""
    return batch * (heads * matmul_flops(queries, keys, width) + matmul_flops(queries, keys, heads))


def keys_seen(tokens: Int, window: Int | None) -> Int:
    """Keys that a kernel which knows the window computes for each query: ``window`` of them, or all.

    The convention of `attention_flops` with a window: dense within it, as without one, pairs above the diagonal are
    counted too. A mask hides keys but saves nothing, so masked and unfused attention computes all of them.

    >>> keys_seen(8, None), keys_seen(8, 3), keys_seen(8, 100)
    (8, 3, 8)
    """
    return tokens if window is None else smaller(tokens, window)


def attended_pairs(tokens: Int, window: Int | None, *, causal: bool = True) -> Int:
    """Pairs of a query and a key that count, in one head of one sequence of ``tokens``.

    ``causal``: what the masks leave (T (T + 1) / 2, or less with a window); else the dense count that `attention_flops`
    takes: every query against `keys_seen`.

    >>> attended_pairs(4, None), attended_pairs(4, 2), attended_pairs(4, 2, causal=False)
    (10, 7, 8)
    """
    keys = keys_seen(tokens, window)
    if not causal:
        return tokens * keys
    return keys * tokens - keys * (keys - 1) // 2


def state_space_flops(batch: Int, tokens: Int, heads: Int, groups: Int, width: Int, state: Int, chunk: int) -> Int:
    """FLOPs of Mamba-2's scan forward in chunks (Dao and Gu 2024, arXiv 2405.21060, section 6), dense.

    Within a chunk C B^T of each group and its product with x of each head; between chunks what a chunk adds to the
    state and reads of it. The last chunk is computed whole.

    >>> state_space_flops(1, 1, 1, 1, 4, 8, 64)  # one token: the dot product of B and C, x times that, the state twice
    152
    """
    length = smaller(tokens, chunk)
    padded = ceil_div(tokens, length) * length
    within = groups * matmul_flops(padded, length, state) + heads * matmul_flops(padded, width, length)
    return batch * (within + 2 * heads * matmul_flops(padded, width, state))


def delta_rule_flops(batch: Int, tokens: Int, heads: Int, key: Int, value: Int, chunk: int) -> Int:
    """FLOPs of the gated delta rule forward in chunks (Yang et al. 2024, arXiv 2412.06464, section 3.3), dense.

    Within a chunk keys times keys, queries times keys, the solution for keys and values, and its mixture; between
    chunks the state times keys, times queries, and what a chunk adds to it. The last chunk is computed whole.

    >>> delta_rule_flops(1, 1, 1, 4, 8, 64)
    248
    """
    length = smaller(tokens, chunk)
    padded = ceil_div(tokens, length) * length
    within = 3 * matmul_flops(padded, length, key) + 2 * matmul_flops(padded, value, length)
    return batch * heads * (within + 3 * matmul_flops(padded, key, value))


def expert_capacity(tokens: Int, per_token: int, n_experts: int, factor: float) -> Int:
    """Places of each expert: its even share of the routes times ``factor``, rounded up (Fedus et al. 2021, equation 3).

    >>> expert_capacity(10, 2, 4, 1.1)
    6
    """
    from fractions import Fraction

    exact = Fraction(str(factor))
    return ceil_div(tokens * per_token * exact.numerator, n_experts * exact.denominator)
