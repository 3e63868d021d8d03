"""Normalizations over the last dim (Ba et al. 2016; Zhang and Sennrich 2019), and the formats of autocast.

Shapes: B sequences, T tokens, D width of the last dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainledger.spec.model import ModelSpec


def norm_of(spec: ModelSpec, width: int | None = None) -> nn.Module:
    """The normalization of a spec over a last dim of ``width`` (absent: d_model)."""
    width = spec.d_model if width is None else width
    if spec.norm.kind == "layernorm":
        return LayerNorm(width, eps=spec.norm.eps, elementwise_affine=spec.norm.weight, bias=spec.norm.bias)
    return PlusOneRMSNorm(width, spec.norm.eps) if spec.norm.plus_one else RMSNorm(width, eps=spec.norm.eps)


def normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    """x through a norm, where there is one."""
    return x if norm is None else norm(x)


class LayerNorm(nn.LayerNorm):
    """torch's layer norm, in fp32 under autocast on every device."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] in and out."""
        return super().forward(widened(x))


class RMSNorm(nn.RMSNorm):
    """torch's RMS norm, in fp32 under autocast on every device."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] in and out."""
        return super().forward(widened(x))


# Llama does x.to(float16) * w, Gemma (x * w).to(float16) (huggingface/transformers pull request 29402).
class PlusOneRMSNorm(nn.Module):
    """RMS norm times (1 + weight), all of it in fp32 and then in the input's format (Gemma Team 2024)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] in and out."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.float())).type_as(x)


# Under a CPU's autocast layer_norm and rms_norm of bf16 give bf16 (torch 2.13, tried), under CUDA's fp32: so that the
# same model gives the same formats on both.
def widened(x: Tensor) -> Tensor:
    """x as CUDA's autocast gives it to a norm: in fp32. A CPU's leaves a branch's output in low precision."""
    return x.float() if torch.is_autocast_enabled(x.device.type) else x


def compute_dtype(x: Tensor) -> torch.dtype:
    """What matmuls produce here: autocast's format where it is on, else the tensor's own."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
