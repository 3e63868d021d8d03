"""Causal self-attention with query, key and value heads: multi-head, grouped-query and multi-query.

Shapes: B sequences, T tokens, D d_model, H query heads, G key-value heads, K head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainledger.nn.attend import attend, heads, refusals, scores_of
from trainledger.nn.cache import LayerCache
from trainledger.nn.norm import norm_of
from trainledger.nn.rotary import Angles, rotate
from trainledger.spec.layers import LayerKind
from trainledger.spec.model import ModelSpec
from trainledger.spec.problem import InvalidInput

Shared = tuple[Angles | None, Tensor | None]  # what all layers of a kind share: rotary angles, and a mask


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query attention.

    ``implementation`` is ``sdpa``, ``math``, ``flash`` or ``efficient``; `InvalidInput` where it cannot do what the
    spec asks for on the device of the weights.
    """

    def __init__(self, spec: ModelSpec, kind: LayerKind, implementation: str, dropout: float = 0.0) -> None:
        super().__init__()
        D, K = spec.d_model, spec.head_size
        self.head_size, self.qk_norm = K, spec.attention.qk_norm
        self.interleaved = spec.rope is not None and spec.rope.interleaved
        self.dropout = dropout
        self.cache: LayerCache | None = None
        self.scores = scores_of(spec, implementation, 0.0)
        self.scores_in_training = scores_of(spec, implementation, dropout)
        self.sinks = nn.Parameter(torch.zeros(spec.attention.n_heads)) if spec.attention.sinks else None
        self.q_proj = nn.Linear(D, spec.attention.n_heads * K, bias=spec.attention.bias)
        self.k_proj = nn.Linear(D, spec.kv_heads * K, bias=spec.attention.bias)
        self.v_proj = nn.Linear(D, spec.kv_heads * K, bias=spec.attention.bias)
        self.o_proj = nn.Linear(spec.attention.n_heads * K, D, bias=spec.output_bias)
        wide = spec.attention.qk_norm == "width"
        self.q_norm = norm_of(spec, spec.attention.n_heads * K if wide else K) if spec.attention.qk_norm else None
        self.k_norm = norm_of(spec, spec.kv_heads * K if wide else K) if spec.attention.qk_norm else None
        refuse(spec, implementation, self.q_proj.weight)

    def forward(self, x_BTD: Tensor, shared: Shared) -> Tensor:
        """Each token's mixture of the values that it sees; [B, T, D] in and out."""
        angles, mask = shared
        q_BTHK = self._heads(self.q_proj(x_BTD), self.q_norm)
        k_BTGK = self._heads(self.k_proj(x_BTD), self.k_norm)
        v_BTGK = heads(self.v_proj(x_BTD), self.head_size)
        if angles is not None:
            q_BTHK = rotate(q_BTHK, angles, interleaved=self.interleaved)
            k_BTGK = rotate(k_BTGK, angles, interleaved=self.interleaved)
        if self.cache is not None:
            k_BTGK, v_BTGK = self.cache.remember(k_BTGK, v_BTGK)
        scores = self.scores_in_training if self.training else self.scores
        y_BTC = attend(q_BTHK, k_BTGK, v_BTGK, mask, scores, self.sinks)
        if self.cache is not None and y_BTC.shape[1] == 1:
            y_BTC = y_BTC[:, 0][:, None]  # with the strides of a row, else the product would be a batch of small ones
        y_BTD: Tensor = self.o_proj(y_BTC)
        return y_BTD

    def _heads(self, x_BTC: Tensor, norm: nn.Module | None) -> Tensor:
        """[B, T, H K] to heads, normalized: the whole width before they are split, or each of them."""
        if norm is not None and self.qk_norm == "width":
            x_BTC = norm(x_BTC).type_as(x_BTC)
        x_BTHK = heads(x_BTC, self.head_size)
        if norm is not None and self.qk_norm == "head":
            x_BTHK = norm(x_BTHK).type_as(x_BTHK)
        return x_BTHK


def refuse(spec: ModelSpec, implementation: str, weight: Tensor) -> None:
    """Raise `InvalidInput` where this implementation cannot run on the weight's device; none runs on ``meta``."""
    problems = [] if weight.is_meta else list(refusals(spec, implementation, weight.device.type))
    if problems:
        raise InvalidInput(problems)
