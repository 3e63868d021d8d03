"""Causal self-attention with grouped key-value heads.

Shapes: B sequences, T tokens, D d_model, H query heads, G key-value heads, K head width, S = T keys.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainledger.nn.rotary import rotate
from trainledger.spec.model import ModelSpec

Angles = tuple[Tensor, Tensor]  # cosines and sines, each [T, 1, K / 2]


class Attention(nn.Module):
    """Multi-head or grouped-query attention; ``implementation`` is ``sdpa`` or ``math``."""

    def __init__(self, spec: ModelSpec, implementation: str) -> None:
        super().__init__()
        self.head_size = spec.head_size
        self.implementation = implementation
        bias = spec.attention_bias
        self.q_proj = nn.Linear(spec.d_model, spec.n_heads * spec.head_size, bias=bias)
        self.k_proj = nn.Linear(spec.d_model, spec.kv_heads * spec.head_size, bias=bias)
        self.v_proj = nn.Linear(spec.d_model, spec.kv_heads * spec.head_size, bias=bias)
        self.o_proj = nn.Linear(spec.n_heads * spec.head_size, spec.d_model, bias=bias)

    def forward(self, x_BTD: Tensor, angles: Angles | None) -> Tensor:
        """Each token's mixture of the values before it; [B, T, D] in and out."""
        q_BTHK = self.q_proj(x_BTD).unflatten(-1, (-1, self.head_size))
        k_BTGK = self.k_proj(x_BTD).unflatten(-1, (-1, self.head_size))
        v_BTGK = self.v_proj(x_BTD).unflatten(-1, (-1, self.head_size))
        if angles is not None:
            q_BTHK, k_BTGK = rotate(q_BTHK, *angles), rotate(k_BTGK, *angles)
        attend = scaled_dot_product if self.implementation == "sdpa" else written_out
        y_BHTK = attend(q_BTHK.transpose(1, 2), k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2))
        y_BTD: Tensor = self.o_proj(y_BHTK.transpose(1, 2).flatten(-2))
        return y_BTD


def scaled_dot_product(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
    """PyTorch's fused causal attention; scores are never stored."""
    grouped = q_BHTK.shape[1] != k_BGTK.shape[1]
    return F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=grouped)


def written_out(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
    """The same, one operation after the other, with scores and probabilities as tensors of [B, H, T, S]."""
    repeats = q_BHTK.shape[1] // k_BGTK.shape[1]
    if repeats > 1:
        k_BGTK, v_BGTK = (x.repeat_interleave(repeats, dim=1) for x in (k_BGTK, v_BGTK))
    n_tokens = q_BHTK.shape[2]
    later_TS = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=q_BHTK.device).triu(1)
    scores_BHTS = (q_BHTK @ k_BGTK.transpose(-1, -2)) * (1 / math.sqrt(q_BHTK.shape[-1]))
    weights_BHTS = scores_BHTS.masked_fill(later_TS, float("-inf")).softmax(dim=-1)
    return weights_BHTS @ v_BGTK
