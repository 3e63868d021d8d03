"""Whose kernels run a step, where devices differ in what they keep, allocate or take time for."""

from __future__ import annotations

# A CPU's; CUDA's, which stand for any accelerator; CUDA's where PyTorch takes cuDNN's attention before FlashAttention.
KERNELS = ("cpu", "cuda", "sm90")
_CUDNN_FIRST = (9, 10)  # generations: Hopper, and Blackwell but for GeForce


def kernels_of_capability(compute_capability: float | None) -> str:
    """The kernels of an accelerator, by its NVIDIA compute capability (None: it is another's).

    On 9.x and 10.x ``F.scaled_dot_product_attention`` takes cuDNN's kernel first since cuDNN 9.15.1, which PyTorch's
    builds for CUDA 13 have since torch 2.11 (check_prefer_cudnn_attention in
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). Left out: TORCH_CUDNN_SDPA_DEPRIORITIZED and builds with an
    older cuDNN, whose kernels are ``cuda``'s.

    >>> [kernels_of_capability(each) for each in (8.0, 9.0, 10.3, 12.0, None)]
    ['cuda', 'sm90', 'sm90', 'cuda', 'cuda']
    """
    return "sm90" if compute_capability is not None and int(compute_capability) in _CUDNN_FIRST else "cuda"


def cudnn_takes(dtype: str, head_dim: int, value_dim: int, dropout: float) -> bool:
    """Whether cuDNN's attention can do a training's: 16 bits, heads of up to 128 in steps of 8, or of 192 and 128.

    Dropout must be a multiple of 1/16. Masks and heads that queries share it has (the same file as above,
    can_use_cudnn_attention). Left out: heads of 256, which want cuDNN 9.22, newer than what torch 2.13 comes with.

    >>> cudnn_takes("bf16", 128, 128, 0.0), cudnn_takes("bf16", 192, 128, 0.0), cudnn_takes("bf16", 192, 192, 0.0)
    (True, True, False)
    >>> cudnn_takes("fp32", 64, 64, 0.0), cudnn_takes("fp16", 64, 64, 0.1), cudnn_takes("fp16", 64, 64, 0.125)
    (False, False, True)
    """
    if dtype not in ("bf16", "fp16") or (dropout * 16) % 1:
        return False
    narrow = max(head_dim, value_dim) <= 128 and head_dim % 8 == value_dim % 8 == 0
    return narrow or (head_dim, value_dim) == (192, 128)
