"""FlashAttention's own functions on fake tensors, as `get_kernel` of Hugging Face's ``kernels`` gives them.

The compiled kernels are fetched from a hub and run on a GPU alone. Shapes, what is saved for backward and FLOPs are
known without them: those of every query with every key of the longest sequence, or of its window. How long sequences
are that lie behind each other depends on values, so that this is an upper bound.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainledger.ledger import rules
from trainledger.trace.operators.custom import CUSTOM, Operator

FORWARD, BACKWARD = "trainledger::flash_attention", "trainledger::flash_attention_backward"


@torch.library.custom_op(FORWARD, mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, keys: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Queries [..., T, H, D] with ``keys`` keys each, and the logarithms of their sums in fp32."""
    raise NotImplementedError("of fake tensors alone")


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, keys: int, causal: bool) -> tuple[Tensor, Tensor]:
    sums = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), sums


@torch.library.custom_op(BACKWARD, mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, keys: int, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("of fake tensors alone")


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, keys: int, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _saved(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, ctx.keys, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, *others: Any) -> tuple[Any, ...]:
    return *_backward(grad, *ctx.saved_tensors, ctx.keys, ctx.causal), None, None


_forward.register_autograd(_gradients, setup_context=_saved)


def _sizes(q: Tensor, v: Tensor, keys: int) -> tuple[int, int, int, int, int, int]:
    queries, heads, width = q.shape[-3:]
    batch = q.numel() // max(1, queries * heads * width)
    return batch, heads, queries, keys, width, v.shape[-1]


def _shape(q: Tensor, v: Tensor, keys: int, causal: bool) -> tuple[int, ...]:
    batch, heads, *rest = _sizes(q, v, keys)
    return batch * heads, *rest, int(causal)


CUSTOM[FORWARD] = Operator(
    "flash_attention", "attention", lambda args, out: rules.attention_flops(*_sizes(args[0], args[2], args[3])),
    assumed=True, shape=lambda args: _shape(args[0], args[2], args[3], args[4]),
)  # fmt: skip
CUSTOM[BACKWARD] = Operator(
    "flash_attention_backward", "attention",
    lambda args, out: rules.attention_backward_flops(*_sizes(args[1], args[3], args[6])),
    model_flops=lambda args, out: rules.attention_backward_model_flops(*_sizes(args[1], args[3], args[6])),
    assumed=True, shape=lambda args: _shape(args[1], args[3], args[6], args[7]),
)  # fmt: skip


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *args: Any, causal: bool = False, window_size: Any = (-1, -1), **options: Any
) -> Any:
    """FlashAttention of sequences of one length, [B, T, H, D]."""
    return _attended(q, k, v, k.shape[1], causal, window_size, options)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: Any = None,
    max_seqlen_k: Any = None, *args: Any, causal: bool = False, window_size: Any = (-1, -1), **options: Any,
) -> Any:  # fmt: skip
    """FlashAttention of sequences that lie behind each other, [T, H, D]."""
    longest = k.shape[0] if max_seqlen_k is None else min(int(max_seqlen_k), k.shape[0])
    return _attended(q, k, v, longest, causal, window_size, options)


def _attended(q: Tensor, k: Tensor, v: Tensor, keys: int, causal: bool, window: Any, options: dict[str, Any]) -> Any:
    before, after = (-1 if each is None else int(each) for each in window)
    after = 0 if causal and after < 0 else after
    if before >= 0 and after >= 0:
        keys = min(keys, before + 1 + after)
    out, sums = _forward(q, k, v, keys, causal)
    return (out, sums) if options.get("return_attn_probs") or options.get("return_softmax_lse") else out
