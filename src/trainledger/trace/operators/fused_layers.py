"""The kernels that torch runs whole layers of attention in for inference: their products, and what they allocate.

x: [B, T, D], H heads, the MLP F wide. Bytes as `scratch` has them, found in the same way in fp32 and
fp64; in half precision the kernels of the products take more, which is not here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trainledger.ledger import rules
from trainledger.trace.operators.scratch import Scratch

Args = tuple[Any, ...]

_ATTENTION = "aten::_native_multi_head_attention"
_LAYER = "aten::_transformer_encoder_layer_fwd"


def _attention_flops(x_BTD: Tensor, heads: int, qkv: Tensor, proj: Tensor) -> int:
    """The four projections, and scores and their sums over all keys: a mask saves nothing."""
    B, T, D = x_BTD.shape
    projections: int = sum(rules.matmul_flops(B * T, *each.shape) for each in (qkv, proj))
    return projections + int(rules.attention_flops(B, heads, T, T, D // heads, D // heads))


def _of_attention(args: Args, out: Any) -> tuple[int, int]:
    flops = _attention_flops(args[0], args[4], args[5], args[7])
    return flops, flops


def _of_layer(args: Args, out: Any) -> tuple[int, int]:
    x_BTD = args[0]
    flops = _attention_flops(x_BTD, args[2], args[3], args[5])
    flops += sum(rules.matmul_flops(x_BTD.shape[0] * x_BTD.shape[1], *each.shape) for each in (args[14], args[16]))
    return flops, flops


def _attention_nbytes(
    x_BTD: Tensor, heads: int, mask: Tensor | None, mask_type: int, *, weights: bool = False, average: bool = False
) -> int:
    """The most at once, its results with it: queries, keys and values twice, or beside them the scores.

    With a mask the scores are copied, and it is made one of bools; one of queries (``mask_type`` 0) for each score.
    """
    x, scored = x_BTD.nbytes, x_BTD.numel() // max(1, x_BTD.shape[2]) * heads * x_BTD.shape[1]
    scores = scored * x_BTD.element_size()
    masked = 0 if mask is None else scores + (scored if mask_type == 0 else mask.numel())
    most = max(6 * x, 3 * x + scores + masked)
    if not weights:
        return most
    return max(most, 5 * x + scores, 4 * x + scores + (scores // heads if average else 0))


def _scratch_of_attention(args: Args, out: Any) -> int:
    mask, weights, average, mask_type = (*args, *(None, True, True, None)[len(args) - 9 :])[9:13]
    most = _attention_nbytes(args[0], args[4], mask, mask_type or 0, weights=weights, average=average)
    return int(most - out[0].nbytes - (out[1].nbytes if weights and isinstance(out[1], Tensor) else 0))


def _scratch_of_layer(args: Args, out: Tensor) -> int:
    """Attention, or the MLP's wide values between two of x; norms in front keep one more of x."""
    x_BTD, heads, norm_first, up = args[0], args[2], args[8], args[14]
    mask, mask_type = (*args, *(None, None)[len(args) - 18 :])[18:20]
    x, wide = x_BTD.nbytes, x_BTD.nbytes // max(1, x_BTD.shape[2]) * up.shape[0]
    most = max(_attention_nbytes(x_BTD, heads, mask, mask_type or 0), 2 * x + wide) + (x if norm_first else 0)
    return int(most - out.nbytes)


RULES = {_ATTENTION: ("matmul", _of_attention), _LAYER: ("matmul", _of_layer)}
FUSED_SCRATCH: dict[str, Scratch] = {_ATTENTION: _scratch_of_attention, _LAYER: _scratch_of_layer}
