"""Rotary positions (Su et al. 2021, RoFormer, section 3.4), in the half-split layout of Llama.

Shapes: B sequences, T tokens, H heads, K head width, J = K / 2 pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from trainledger.spec.model import ModelSpec


class Rotary(nn.Module):
    """The cosines and sines of each position, made once: two fp32 buffers of max_seq_len x head_dim / 2."""

    cos_TJ: Tensor
    sin_TJ: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        angle_TJ = torch.outer(torch.arange(spec.max_seq_len, dtype=torch.float32), frequencies(spec))
        self.register_buffer("cos_TJ", angle_TJ.cos(), persistent=False)
        self.register_buffer("sin_TJ", angle_TJ.sin(), persistent=False)

    def forward(self, n_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the first ``n_tokens`` positions, each [T, 1, J] in ``dtype``."""
        return self.cos_TJ[:n_tokens, None].to(dtype), self.sin_TJ[:n_tokens, None].to(dtype)


def frequencies(spec: ModelSpec) -> Tensor:
    """Radians per position of each pair of a head, [J], fp32: theta ** (-2j / K), or slower with ``rope_factor``.

    The slowing is Llama 3.1's: waves that fit at most ``rope_low_freq_factor`` times into
    ``rope_original_seq_len`` turn ``rope_factor`` times slower, those that fit ``rope_high_freq_factor``
    times or more stay, and those between are blended linearly in how often they fit.
    """
    pair_J = torch.arange(0, spec.head_size, 2, dtype=torch.float32)
    frequency_J = 1.0 / spec.rope_theta ** (pair_J / spec.head_size)
    if spec.rope_factor is None:
        return frequency_J
    fits_J = spec.rope_original_seq_len * frequency_J / (2 * math.pi)
    low, high = spec.rope_low_freq_factor, spec.rope_high_freq_factor
    kept_J = ((fits_J - low) / (high - low)).clamp(0, 1)
    return (1 - kept_J) * (frequency_J / spec.rope_factor) + kept_J * frequency_J


def rotate(x_BTHK: Tensor, cos_T1J: Tensor, sin_T1J: Tensor) -> Tensor:
    """Each pair (x[j], x[j + J]) of a head turned by its position's angle; [B, T, H, K] in and out."""
    a_BTHJ, b_BTHJ = x_BTHK.chunk(2, dim=-1)
    return torch.cat((a_BTHJ * cos_T1J - b_BTHJ * sin_T1J, b_BTHJ * cos_T1J + a_BTHJ * sin_T1J), dim=-1)
