"""Which kernels a trace accounts for: those of a CPU, or of CUDA where they keep or allocate something else.

q, k, v: [B, H, T, head_dim]. What torch decides by the device of real tensors is decided here for fake ones on the
CPU, by the rules in ATen/native/transformers/cuda/sdp_utils.cpp and torch/optim/optimizer.py. Left out: autocast's list
of operators for CUDA, which keeps norms and losses in fp32 that the list for CPUs does not, and cuDNN's recurrent nets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

import torch
import torch.nn.functional as F
import torch.utils._foreach_utils
from torch import Tensor

from trainledger.trace.replaced import replaced

KERNELS = ("cpu", "cuda")
_HALVES = (torch.float16, torch.bfloat16)
_WIDEST_HEAD = 256  # of a flash attention kernel


@contextmanager
def kernels_of(backend: str) -> Iterator[None]:
    """Inside, attention, RMS norms, dropout and the optimizers' defaults are those of a backend of `KERNELS`."""
    if backend not in KERNELS:
        raise ValueError(f"kernels must be one of {', '.join(KERNELS)}, not {backend!r}")
    if backend == "cpu":
        yield
        return
    # Where optimizers and clipping take lists of tensors at once unless told otherwise.
    everywhere = "_get_foreach_kernels_supported_devices"
    with (
        replaced(F, "scaled_dot_product_attention", lambda _: attention_on_cuda),
        replaced(F, "rms_norm", lambda _: rms_norm_on_cuda),
        replaced(F, "dropout", _dropout_on_cuda),
        replaced(import_module("torch.optim.optimizer"), everywhere, lambda _: lambda: ["cpu", "cuda"]),
        replaced(torch.utils._foreach_utils, everywhere, lambda _: lambda: ["cpu", "cuda"]),
    ):
        yield


def attention_on_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What ``F.scaled_dot_product_attention`` runs on CUDA: flash, else memory-efficient, else its parts one by one."""
    aten = torch.ops.aten
    if _flash_takes(query, key, value, attn_mask, is_causal, enable_gqa):
        run = aten._scaled_dot_product_flash_attention
        out = run(query, key, value, dropout_p, is_causal, False, scale=scale)
    elif _efficient_takes(query, key, value):
        keeps = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
            attn_mask = attn_mask.expand(*query.shape[:2], query.shape[-2], key.shape[-2])
        run = aten._scaled_dot_product_efficient_attention
        out = run(query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale)
    else:
        run = aten._scaled_dot_product_attention_math
        out = run(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    first: Tensor = out[0]
    return first


def _flash_takes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, grouped: bool) -> bool:
    if mask is not None or q.dim() != 4 or q.dtype not in _HALVES or not q.dtype == k.dtype == v.dtype:
        return False
    width = q.shape[-1]
    if width != v.shape[-1] or width > _WIDEST_HEAD or width % 8:
        return False
    return (_same_heads(q, k, v) or grouped) and (not causal or q.shape[-2] == k.shape[-2])


def _efficient_takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if q.dim() != 4 or q.dtype not in (*_HALVES, torch.float32) or not q.dtype == k.dtype == v.dtype:
        return False
    aligned = 8 if q.dtype in _HALVES else 4
    return _same_heads(q, k, v) and q.shape[-1] % aligned == 0 and v.shape[-1] % aligned == 0


def _same_heads(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return bool(q.shape[1] == k.shape[1] == v.shape[1])


def rms_norm_on_cuda(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """One kernel, which keeps the reciprocal root alone."""
    out: Tensor = torch.ops.aten._fused_rms_norm(input, list(normalized_shape), weight, eps)[0]
    return out


def _dropout_on_cuda(before: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or inplace or not 0 < p < 1:
            return before(input, p, training, inplace)
        out: Tensor = torch.native_dropout(input, p, True)[0]  # keeps a mask of one byte an element
        return out

    return dropout
