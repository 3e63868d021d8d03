"""Whose kernels run a step, where devices differ in what they keep, allocate or take time for."""

from __future__ import annotations

# A CPU's; CUDA's, for any accelerator; CUDA's where PyTorch takes cuDNN's attention before FlashAttention.
KERNELS = ("cpu", "cuda", "sm90", "sm100")
_CUDNN_FIRST = {9: "sm90", 10: "sm100"}  # generations: Hopper, and Blackwell but for GeForce


def kernels_of_capability(compute_capability: float | None) -> str:
    """The kernels of an accelerator, by its NVIDIA compute capability (None: it is another's).

    On 9.x and 10.x ``F.scaled_dot_product_attention`` takes cuDNN's kernel first where cuDNN is newer than 9.15, as in
    PyTorch's builds for CUDA 13 since torch 2.11 (check_prefer_cudnn_attention in
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). Left out: TORCH_CUDNN_SDPA_DEPRIORITIZED and builds with an
    older cuDNN, whose kernels are ``cuda``'s.

    >>> [kernels_of_capability(each) for each in (8.0, 9.0, 10.3, 12.0, None)]
    ['cuda', 'sm90', 'sm100', 'cuda', 'cuda']
    """
    return "cuda" if compute_capability is None else _CUDNN_FIRST.get(int(compute_capability), "cuda")


def cudnn_takes(kernels: str, dtype: str, head_dim: int, value_dim: int, *, deterministic: bool = False) -> bool:
    """Whether sdpa takes cuDNN's attention for a training: of 16 bits, in heads of steps of 8 that are not too wide.

    That is 256 on Hopper, and 128 on Blackwell, or 192 with values of 128. Masks, dropout and heads that queries share
    it has; the same bits each time it does not promise, so that a ``deterministic`` step takes another (the same file
    as above, check_cudnn_tensor_shapes and check_cudnn_deterministic of torch 2.11 to 2.13). Left out: a sequence of
    one token, which it does not take either.

    >>> cudnn_takes("sm90", "bf16", 256, 256), cudnn_takes("sm100", "bf16", 256, 256)
    (True, False)
    >>> cudnn_takes("sm100", "bf16", 192, 128), cudnn_takes("sm90", "fp16", 64, 64, deterministic=True)
    (True, False)
    """
    if kernels not in _CUDNN_FIRST.values() or dtype not in ("bf16", "fp16") or deterministic:
        return False
    if head_dim % 8 or value_dim % 8:
        return False
    widest = 256 if kernels == "sm90" else 128
    return max(head_dim, value_dim) <= widest or (head_dim, value_dim) == (192, 128)
