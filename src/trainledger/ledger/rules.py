"""Cost rules: what one operation computes and moves. The only home of these formulas.

Plain arithmetic over the arguments, so that the same rule gives an int for one run, an array for many at
once and a formula when handed symbols. FLOPs count 2 per multiply-add; causal attention is counted dense
(every query against every key), as `torch.utils.flop_counter` and PaLM (Chowdhery et al. 2022, appendix B)
do: what a kernel skips above the diagonal is not taken off.
"""

from __future__ import annotations

from typing import Any

Int = Any

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
}

# Elementary operations per parameter in each optimizer's own definition, weight decay left out.
UPDATE_FLOPS_PER_PARAMETER = {"sgd": 2, "momentum": 4, "adagrad": 6, "rmsprop": 7, "adam": 12, "adamw": 12}


def matmul_flops(m: Int, n: Int, k: Int, batch: Int = 1) -> Int:
    """FLOPs of ``batch`` products [m, k] @ [k, n]: a multiplication and an addition per term.

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

    Five products where forward has two (Dao et al. 2022, FlashAttention, appendix B.4).
    """
    with_head = matmul_flops(queries, keys, head_dim, batch * heads)
    with_value = matmul_flops(queries, value_dim, keys, batch * heads)
    return 3 * with_head + 2 * with_value


def attention_backward_model_flops(
    batch: Int, heads: Int, queries: Int, keys: Int, head_dim: Int, value_dim: Int
) -> Int:
    """The part of a fused attention backward that is not recomputation: twice its forward."""
    return 2 * attention_flops(batch, heads, queries, keys, head_dim, value_dim)
