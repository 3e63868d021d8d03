"""Attention to the keys that an indexer chooses (DeepSeek-AI 2025, DeepSeek-V3.2, section 2.1): two operators.

A kernel of DeepSeek's is one operation that keeps its inputs, its output and a sum for each row; so is each of these,
written out in torch and in fp32, so that a CPU computes all scores where a kernel computes those of chosen keys.
Shapes: B sequences, T tokens (queries), S keys, C chosen keys, H heads, K width of a key, W of a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainledger.engine.nn.cache import LayerCache
from trainledger.engine.nn.norm import LayerNorm
from trainledger.engine.nn.positions import Angles, rotate
from trainledger.spec.model import ModelSpec

_LIBRARY = torch.library.Library("trainledger", "FRAGMENT")  # type: ignore[no-untyped-call]
_ATTENTION = "_scaled_dot_product_sparse_attention"


def _later(n_queries: int, n_keys: int, device: torch.device) -> Tensor:
    """Which keys come after each query, [T, S]; the queries are the last ones."""
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).triu(n_keys - n_queries + 1)


def _chosen(q_BTHK: Tensor, k_BSK: Tensor, weights_BTH: Tensor, count: int) -> Tensor:
    """The places of the best keys of each query, [B, T, C]: a weighted sum over heads of what ReLU leaves."""
    with torch.autocast(q_BTHK.device.type, enabled=False):
        n_queries, n_heads, width = q_BTHK.shape[1:]
        scores_BTHS = torch.einsum("bthk,bsk->bths", q_BTHK.float(), k_BSK.float()).relu() * width**-0.5
        scores_BTS = torch.einsum("bths,bth->bts", scores_BTHS, weights_BTH.float()) * n_heads**-0.5
        scores_BTS = scores_BTS.masked_fill(_later(n_queries, k_BSK.shape[1], k_BSK.device), float("-inf"))
        places_BTC: Tensor = scores_BTS.topk(min(count, k_BSK.shape[1]), dim=-1).indices.int()
        return places_BTC


def _scores(q_BTHK: Tensor, k_BSHK: Tensor, chosen_BTC: Tensor, scale: float) -> Tensor:
    """Scores in fp32, minus infinity for keys that are not chosen or come later, [B, H, T, S]."""
    n_queries, n_keys = q_BTHK.shape[1], k_BSHK.shape[1]
    hidden_BTS = torch.ones(*chosen_BTC.shape[:2], n_keys, dtype=torch.bool, device=q_BTHK.device)
    hidden_BTS = hidden_BTS.scatter(-1, chosen_BTC.long(), False) | _later(n_queries, n_keys, q_BTHK.device)
    scores_BHTS = torch.einsum("bthk,bshk->bhts", q_BTHK.float(), k_BSHK.float()) * scale
    return scores_BHTS.masked_fill(hidden_BTS[:, None], float("-inf"))


def _attended(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Mixtures of values [B, T, H, W] and the logarithm of each row's sum [B, H, T]."""
    with torch.autocast(q.device.type, enabled=False):
        scores_BHTS = _scores(q, k, chosen, scale)
        y_BTHW = torch.einsum("bhts,bshw->bthw", scores_BHTS.softmax(-1), v.float())
        return y_BTHW.to(v.dtype).contiguous(), scores_BHTS.logsumexp(-1)


def _attended_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, chosen: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(q.device.type, enabled=False):
        g, y = g.float(), y.float()
        weights_BHTS = (_scores(q, k, chosen, scale) - sums[..., None]).exp()
        rest_BHT1 = (g * y).sum(-1).transpose(1, 2)[..., None]
        slope_BHTS = weights_BHTS * (torch.einsum("bthw,bshw->bhts", g, v.float()) - rest_BHT1) * scale
        dq = torch.einsum("bhts,bshk->bthk", slope_BHTS, k.float())
        dk = torch.einsum("bhts,bthk->bshk", slope_BHTS, q.float())
        dv = torch.einsum("bhts,bthw->bshw", weights_BHTS, g)
        return dq.to(q.dtype).contiguous(), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous()


def _like(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors)


def _define(schema: str, run: Any, fake: Any) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"trainledger::{name}", fake, lib=_LIBRARY)


_define(
    "choose_keys(Tensor q, Tensor k, Tensor weights, int count) -> Tensor",
    _chosen,
    lambda q, k, weights, count: q.new_empty(*q.shape[:2], min(count, k.shape[1]), dtype=torch.int32),
)
_define(
    f"{_ATTENTION}(Tensor q, Tensor k, Tensor v, Tensor chosen, float scale) -> (Tensor, Tensor)",
    _attended,
    lambda q, k, v, chosen, scale: (
        v.new_empty(*q.shape[:3], v.shape[-1]),
        q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32),
    ),
)
_define(
    f"{_ATTENTION}_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor y, Tensor sums, Tensor chosen, float scale)"
    " -> (Tensor, Tensor, Tensor)",
    _attended_backward,
    lambda g, q, k, v, y, sums, chosen, scale: _like(q, k, v),
)


class _Sparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, scale: float) -> Tensor:
        y: Tensor
        y, sums = getattr(torch.ops.trainledger, _ATTENTION)(q, k, v, chosen, scale)
        ctx.save_for_backward(q, k, v, y, sums, chosen)
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        run = getattr(torch.ops.trainledger, f"{_ATTENTION}_backward")
        return (*run(gradients[0], *ctx.saved_tensors, ctx.scale), None, None)


def attend_to_chosen(q_BTHK: Tensor, k_BSHK: Tensor, v_BSHW: Tensor, chosen_BTC: Tensor, scale: float) -> Tensor:
    """Each query's mixture of the values of the keys that are chosen for it, [B, T, H W]."""
    y: Tensor = _Sparse.apply(q_BTHK, k_BSHK, v_BSHW, chosen_BTC, scale)  # type: ignore[no-untyped-call]
    return y.flatten(-2)


class Choice:
    """The keys that a layer chose, [B, T, C], to which the layers behind it attend too."""

    def __init__(self) -> None:
        self.places: Tensor | None = None


class Indexer(nn.Module):
    """Chooses the keys of each query from the hidden states and the latent of the queries.

    A choice has no gradient: these parameters are frozen. DeepSeek trains them by a loss of their own.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.latent is not None
        part, rank = spec.latent.indexer, spec.latent.q_rank
        assert part is not None
        assert rank is not None
        self.part = part
        self.wq_b = nn.Linear(rank, part.n_heads * part.head_dim, bias=False)
        self.wk = nn.Linear(spec.d_model, part.head_dim, bias=False)
        self.k_norm = LayerNorm(part.head_dim, eps=1e-6)
        self.weights_proj = nn.Linear(spec.d_model, part.n_heads, bias=False)
        self.requires_grad_(False)
        self.cache: LayerCache | None = None

    @torch.no_grad()
    def forward(self, x_BTD: Tensor, low_BTP: Tensor, angles: Angles) -> Tensor:
        """The places of the keys that each query attends to, [B, T, C]."""
        width, interleaved = self.part.head_dim, self.part.interleaved
        q_BTHK = self.wq_b(low_BTP).unflatten(-1, (-1, width))
        q_BTHK = rotate(q_BTHK, angles, interleaved=interleaved)
        k_BTK = self.wk(x_BTD)
        k_BTK = self.k_norm(k_BTK).type_as(k_BTK)
        k_BT1K = rotate(k_BTK[:, :, None], angles, interleaved=interleaved)
        del k_BTK
        weights_BTH = self.weights_proj(x_BTD)
        if self.cache is not None:
            (k_BT1K,) = self.cache.remember(k_BT1K)
        chosen_BTC: Tensor = torch.ops.trainledger.choose_keys(q_BTHK, k_BT1K[:, :, 0], weights_BTH, self.part.top_k)
        return chosen_BTC
