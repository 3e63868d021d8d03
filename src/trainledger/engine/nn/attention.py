"""Causal self-attention with query, key and value heads, and its core: in one fused kernel or unfused.

Shapes: B sequences, T tokens (queries), S keys, D d_model, H query heads, G key-value heads, K query and key width, W
value width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainledger.engine.nn.cache import LayerCache
from trainledger.engine.nn.checkpointing import again
from trainledger.engine.nn.norm import RMSNorm, norm_of, widened
from trainledger.engine.nn.positions import Angles, rotate
from trainledger.engine.nn.sparse import Choice, Indexer, attend_to_chosen
from trainledger.spec.layers import LayerKind
from trainledger.spec.model import ModelSpec
from trainledger.spec.problem import InvalidInput, Problem

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


@dataclass(frozen=True)
class Scores:
    """How scores become probabilities, and what computes it: ``sdpa``, ``flash``, ``efficient`` or ``math``."""

    implementation: str
    scale: float
    softcap: float | None = None
    dropout: float = 0.0
    sparse: bool = False  # to the keys that an indexer chose
    again: bool = False  # recomputed in backward: of the core only queries, keys and values are kept


def scores_of(spec: ModelSpec, implementation: str, dropout: float) -> Scores:
    """The choices of a spec; scores are multiplied by 1 / sqrt(K) unless it says otherwise."""
    scale = 1 / math.sqrt(spec.head_size) if spec.attention.scale is None else spec.attention.scale
    return Scores(implementation, scale, spec.attention.softcap, dropout, spec.indexer is not None)


def usual(spec: ModelSpec) -> str:
    """The fastest implementation that can do what the spec asks for on every device."""
    return "math" if spec.attention.custom_scores else "sdpa"


def refusals(spec: ModelSpec, implementation: str, device: str) -> Iterator[Problem]:
    """What this implementation cannot do on this kind of device, with a kernel that can."""
    if implementation == "math":
        return
    where, given = "recipe.attention", implementation
    if implementation != "sdpa" and device == "cpu":
        yield Problem(where, given, "is a kernel of accelerators, not of a CPU", usual(spec))
        return
    if spec.attention.custom_scores:
        yield Problem(where, given, f"PyTorch has no such kernel with {spec.attention.custom_scores}", "math")
    if implementation == "flash":
        if spec.attention.window is not None or spec.positions.kind == "alibi":
            what = "a window" if spec.attention.window is not None else "ALiBi"
            yield Problem(where, given, f"PyTorch's flash kernel has no mask here, which {what} needs", "sdpa")
        if spec.value_size != spec.head_size:
            yield Problem(where, given, "PyTorch's flash kernel has values as wide as keys only", "sdpa")


def attend(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGW: Tensor, mask: Tensor | None, scores: Scores, sinks_H: Tensor | None = None
) -> Tensor:
    """Each query's mixture of the values it may see, [B, T, H W]; ``mask`` is what `Masks` made, or the chosen keys."""
    if scores.again:
        core = partial(attend, mask=mask, scores=replace(scores, again=False), sinks_H=sinks_H)
        return again(core, q_BTHK, k_BTGK, v_BTGW, random=scores.dropout > 0)
    if scores.sparse:
        assert mask is not None, "an indexer chooses keys"
        return attend_to_chosen(q_BTHK, k_BTGK, v_BTGW, mask, scores.scale)
    fused = scores.implementation != "math" and not (scores.dropout and q_BTHK.device.type == "cpu")
    if fused:
        assert scores.softcap is None
        assert sinks_H is None
        return scaled_dot_product(q_BTHK, k_BTGK, v_BTGW, mask, scores)
    assert mask is not None or q_BTHK.shape[1] == 1, "unfused attention has a mask"
    return written_out(q_BTHK, k_BTGK, v_BTGW, mask, scores, sinks_H)


# On compute capability 9 and 10 torch takes cuDNN's kernel before FlashAttention-2 once cuDNN is newer than 9.15
# (`check_prefer_cudnn_attention`): its builds for CUDA 13 come with 9.19 (torch 2.11) and 9.20 (2.13), those for CUDA
# 12.6 with an older one.
def scaled_dot_product(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGW: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """PyTorch's fused attention; scores are never stored. Without a mask it is causal; a lone query sees all keys."""
    n_heads, width = q_BTHK.shape[2], v_BTGW.shape[-1]
    grouped = n_heads != k_BTGK.shape[2]
    if q_BTHK.device.type == "cpu":
        q_BTHK, k_BTGK, v_BTGW = equally_wide(q_BTHK, k_BTGK, v_BTGW)
    q_BHTK, k_BGTK, v_BGTW = (x.transpose(1, 2) for x in (q_BTHK, k_BTGK, v_BTGW))
    if grouped and q_BTHK.device.type != "cpu" and (mask is not None or q_BTHK.dtype == torch.float32):
        # The kernel that takes masks and fp32 there has no key-value heads shared by queries.
        k_BGTK, v_BGTW = (x.repeat_interleave(n_heads // x.shape[1], dim=1) for x in (k_BGTK, v_BGTW))
        grouped = False

    causal = mask is None and q_BTHK.shape[1] == k_BTGK.shape[1]

    def run() -> Tensor:
        return F.scaled_dot_product_attention(
            q_BHTK,
            k_BGTK,
            v_BGTW,
            attn_mask=mask,
            is_causal=causal,
            dropout_p=scores.dropout,
            scale=scores.scale,
            enable_gqa=grouped,
        )

    if scores.implementation == "sdpa":
        y_BHTW = run()
    else:
        with sdpa_kernel(_BACKENDS[scores.implementation]):
            y_BHTW = run()
    if y_BHTW.shape[-1] != width:
        return y_BHTW[..., :width].transpose(1, 2).clone(memory_format=torch.contiguous_format).flatten(-2)
    return y_BHTW.transpose(1, 2).flatten(-2)


# DeepSeek's keys are wider than its values (192 and 128). The CPU's flash kernel wants one width (torch 2.13) and would
# else give way to unfused attention, with scores of T x T in memory.
def equally_wide(*heads: Tensor) -> Iterator[Tensor]:
    """Queries, keys and values padded with zeros to one width, which the fused kernel of a CPU wants."""
    widest = max(head.shape[-1] for head in heads)
    return (head if head.shape[-1] == widest else F.pad(head, (0, widest - head.shape[-1])) for head in heads)


def written_out(
    q_BTHK: Tensor, k_BTGK: Tensor, v_BTGW: Tensor, mask: Tensor | None, scores: Scores, sinks_H: Tensor | None = None
) -> Tensor:
    """The same, one operation after the other, with scores and probabilities as tensors of [B, H, T, S]."""
    n_heads = q_BTHK.shape[2]
    q_BHTK, k_BHSK = heads_first(q_BTHK, n_heads), heads_first(k_BTGK, n_heads)
    if scores.softcap is None:
        scores_BHTS = (q_BHTK @ k_BHSK.transpose(-1, -2)) * scores.scale
    else:
        scores_BHTS = (q_BHTK @ k_BHSK.transpose(-1, -2)) * (scores.scale / scores.softcap)
        scores_BHTS = scores_BHTS.tanh() * scores.softcap
    if mask is not None:
        scores_BHTS = scores_BHTS + mask
    if sinks_H is None:
        weights_BHTS = scores_BHTS.softmax(dim=-1)
    else:
        # One more key for each head that takes probability and has no value (OpenAI 2025, gpt-oss).
        sink_BHT1 = sinks_H.to(scores_BHTS.dtype)[:, None, None].expand(*scores_BHTS.shape[:-1], 1)
        scores_BHTS = torch.cat((scores_BHTS, sink_BHT1), dim=-1)
        del sink_BHT1
        weights_BHTS = scores_BHTS.softmax(dim=-1)[..., :-1]
    del scores_BHTS
    if scores.dropout:
        # Unlike F.dropout on a CPU, this keeps a mask of one byte per element.
        weights_BHTS = torch.native_dropout(weights_BHTS, scores.dropout, True)[0]
    y_BHTW = with_gradient_in_order(weights_BHTS @ heads_first(v_BTGW, n_heads))
    return y_BHTW.transpose(1, 2).clone(memory_format=torch.contiguous_format).flatten(-2)


def heads(x_BTC: Tensor, width: int) -> Tensor:
    """The last dim as heads of a width, [B, T, H, K]."""
    x_BTHK: Tensor = x_BTC.unflatten(-1, (-1, width))  # type: ignore[no-untyped-call]
    return x_BTHK


def heads_first(x_BTGK: Tensor, n_heads: int) -> Tensor:
    """A copy with heads before tokens, as batched matmuls want it, [B, H, T, K]; shared ones repeated."""
    x_BGTK = with_gradient_in_order(x_BTGK).transpose(1, 2)
    repeats = n_heads // x_BGTK.shape[1]
    if repeats == 1:
        return x_BGTK.clone(memory_format=torch.contiguous_format)
    x_BGRTK = x_BGTK[:, :, None].expand(-1, -1, repeats, -1, -1)
    return x_BGRTK.clone(memory_format=torch.contiguous_format).flatten(1, 2)


class _GradientInOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clone(memory_format=torch.contiguous_format)


def with_gradient_in_order(x: Tensor) -> Tensor:
    """x itself; its gradient is copied into the order of x's dims, whatever order a batched matmul gave it.

    Otherwise each operation before would pass the strange order on, until one copies because it must.
    """
    y: Tensor = _GradientInOrder.apply(x)  # type: ignore[no-untyped-call]
    return y


Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, Scores, Tensor | None], Tensor]  # as `attend`
# What all layers of a kind share: rotary angles, and a mask, or what layers choose for those behind them.
Shared = tuple[Angles | None, Tensor | Choice | None]


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query attention.

    ``implementation`` is ``sdpa``, ``math``, ``flash`` or ``efficient``; `InvalidInput` where it cannot do what the
    spec asks for on the device of the weights.
    """

    def __init__(self, spec: ModelSpec, kind: LayerKind, implementation: str, dropout: float = 0.0) -> None:
        super().__init__()
        spec = spec.of_layers(kind.window)
        D, K, W = spec.d_model, spec.head_size, spec.value_size
        self.value_size, self.value_norm, self.value_scale = W, spec.attention.value_norm, spec.attention.value_scale
        self.head_size, self.qk_norm, self.gated = K, spec.attention.qk_norm, spec.attention.gated
        self.interleaved = spec.rope is not None and spec.rope.interleaved
        self.dropout = dropout
        self.cache: LayerCache | None = None
        self.attend: Attend = attend
        self.scores = scores_of(spec, implementation, 0.0)
        self.scores_in_training = scores_of(spec, implementation, dropout)
        self.sinks = nn.Parameter(torch.zeros(spec.attention.n_heads)) if spec.attention.sinks else None
        self.q_proj = nn.Linear(D, spec.attention.n_heads * K * (2 if self.gated else 1), bias=spec.attention.bias)
        self.k_proj = nn.Linear(D, spec.kv_heads * K, bias=spec.attention.bias)
        own = not spec.attention.keys_as_values
        self.v_proj = nn.Linear(D, spec.kv_heads * W, bias=spec.attention.bias) if own else None
        self.o_proj = nn.Linear(spec.attention.n_heads * W, D, bias=spec.output_bias)
        wide, normed = spec.attention.qk_norm == "width", spec.attention.qk_norm in ("head", "width")
        self.q_norm = norm_of(spec, spec.attention.n_heads * K if wide else K) if normed else None
        self.k_norm = norm_of(spec, spec.kv_heads * K if wide else K) if normed else None
        self.eps = spec.norm.eps
        refuse(spec, implementation, self.q_proj.weight)

    def forward(self, x_BTD: Tensor, shared: Shared) -> Tensor:
        """Each token's mixture of the values that it sees; [B, T, D] in and out."""
        angles, mask = shared
        assert not isinstance(mask, Choice)
        q_BTC, gate_BTHK = self.q_proj(x_BTD), None
        if self.gated:
            q_BTHK, gate_BTHK = torch.split(heads(q_BTC, 2 * self.head_size), self.head_size, dim=-1)
            q_BTC = q_BTHK if self.q_norm is None or self.qk_norm == "head" else q_BTHK.flatten(-2)
        q_BTHK = self._heads(q_BTC, self.q_norm)
        del q_BTC
        k_BTC = self.k_proj(x_BTD)
        kept_BTC = [k_BTC] if self.v_proj is None else []
        k_BTGK = self._heads(k_BTC, self.k_norm)
        del k_BTC
        v_BTGW = heads(kept_BTC.pop() if self.v_proj is None else self.v_proj(x_BTD), self.value_size)
        if self.value_norm:
            v_BTGW = F.rms_norm(widened(v_BTGW), (self.value_size,), eps=self.eps).type_as(v_BTGW)
        if self.value_scale != 1:
            v_BTGW = v_BTGW * self.value_scale
        if angles is not None:
            q_BTHK = rotate(q_BTHK, angles, interleaved=self.interleaved)
            k_BTGK = rotate(k_BTGK, angles, interleaved=self.interleaved)
            if self.qk_norm == "turned":
                q_BTHK = F.rms_norm(widened(q_BTHK), (self.head_size,), eps=self.eps).type_as(q_BTHK)
                k_BTGK = F.rms_norm(widened(k_BTGK), (self.head_size,), eps=self.eps).type_as(k_BTGK)
        if self.cache is not None:
            k_BTGK, v_BTGW = self.cache.remember(k_BTGK, v_BTGW)
        scores = self.scores_in_training if self.training else self.scores
        y_BTC = self.attend(q_BTHK, k_BTGK, v_BTGW, mask, scores, self.sinks)
        if gate_BTHK is not None:
            y_BTC = y_BTC * gate_BTHK.sigmoid().flatten(-2)
            del gate_BTHK
        if self.cache is not None and y_BTC.shape[1] == 1:
            y_BTC = y_BTC[:, 0][:, None]  # with the strides of a row, else the matmul would be a batch of small ones
        y_BTD: Tensor = self.o_proj(y_BTC)
        return y_BTD

    def _heads(self, x_BTC: Tensor, norm: nn.Module | None) -> Tensor:
        """[B, T, H K] to heads, normalized: the whole width before they are split, or each of them."""
        if norm is not None and self.qk_norm == "width":
            x_BTC = norm(x_BTC).type_as(x_BTC)
        x_BTHK = heads(x_BTC, self.head_size) if x_BTC.dim() == 3 else x_BTC
        if norm is not None and self.qk_norm == "head":
            x_BTHK = norm(x_BTHK).type_as(x_BTHK)
        return x_BTHK


def refuse(spec: ModelSpec, implementation: str, weight: Tensor) -> None:
    """Raise `InvalidInput` where this implementation cannot run on the weight's device; none runs on ``meta``."""
    problems = [] if weight.is_meta else list(refusals(spec, implementation, weight.device.type))
    if problems:
        raise InvalidInput(problems)


_LATENT_EPS = 1e-6  # of the norms of the latents: in the published code a constant, not the model's


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1); arguments as of `Attention`.

    Keys and values of all heads come from one latent; what rope turns is a further part of each query head, and one
    key for all heads. Shapes: P query rank, R key-value rank, N width without positions, Q rotary width, K = N + Q.
    """

    def __init__(self, spec: ModelSpec, kind: LayerKind, implementation: str, dropout: float = 0.0) -> None:
        super().__init__()
        assert spec.latent is not None
        D, H, P, R = spec.d_model, spec.latent.n_heads, spec.latent.q_rank, spec.latent.kv_rank
        self.plain, self.turned, self.value = spec.latent.nope_head_dim, spec.rotary_size, spec.value_size
        self.rank, self.interleaved = R, spec.rope is not None and spec.rope.interleaved
        self.cache: LayerCache | None = None
        self.attend: Attend = attend
        self.scores = scores_of(spec, implementation, 0.0)
        self.scores_in_training = scores_of(spec, implementation, dropout)
        bias = spec.attention.bias
        self.q_proj = nn.Linear(D, H * spec.head_size, bias=False) if P is None else None
        self.q_a_proj = nn.Linear(D, P, bias=bias) if P is not None else None
        self.q_a_layernorm = RMSNorm(P, eps=_LATENT_EPS) if P is not None else None
        self.q_b_proj = nn.Linear(P, H * spec.head_size, bias=False) if P is not None else None
        self.indexer = Indexer(spec) if kind.chooses else None
        self.kv_a_proj_with_mqa = nn.Linear(D, R + self.turned, bias=bias)
        self.kv_a_layernorm = RMSNorm(R, eps=_LATENT_EPS)
        self.kv_b_proj = nn.Linear(R, H * (self.plain + self.value), bias=False)
        self.o_proj = nn.Linear(H * self.value, D, bias=spec.output_bias)
        refuse(spec, implementation, self.o_proj.weight)

    def forward(self, x_BTD: Tensor, shared: Shared) -> Tensor:
        """Each token's mixture of the values that it sees; [B, T, D] in and out."""
        angles, mask = shared
        q_BTC, chosen_BTC = self._queries(x_BTD, angles)
        if isinstance(mask, Choice):
            mask.places = mask.places if chosen_BTC is None else chosen_BTC
            chosen_BTC = mask.places
        mask = mask if chosen_BTC is None else chosen_BTC
        assert not isinstance(mask, Choice), "a layer before this one chooses keys"
        q_BTHK = self._turned(heads(q_BTC, self.plain + self.turned), angles, begin=self.plain)
        del q_BTC, chosen_BTC
        latent_BTR, turning_BTQ = torch.split(self.kv_a_proj_with_mqa(x_BTD), [self.rank, self.turned], dim=-1)
        if self.cache is not None:
            latent_BTR = self.kv_a_layernorm(latent_BTR)
            k_BT1Q = self._turned(turning_BTQ[:, :, None], angles)
            decoding = self.cache.past > 0
            (joint_BS1C,) = self.cache.remember(torch.cat((latent_BTR[:, :, None], k_BT1Q), dim=-1))
            if decoding:
                joint_BSC = joint_BS1C[:, :, 0]
                if mask is not None:
                    joint_BSC = joint_BSC.gather(1, mask.long()[:, 0, :, None].expand(-1, -1, joint_BSC.shape[-1]))
                y_B1D: Tensor = self.o_proj(self._absorbed(q_BTHK[:, 0], joint_BSC))
                return y_B1D
            k_BTHN, v_BTHW = self._keys_values(latent_BTR)
        else:
            k_BTHN, v_BTHW = self._keys_values(self.kv_a_layernorm(latent_BTR))
            k_BT1Q = self._turned(turning_BTQ[:, :, None], angles)
        k_BTHK = torch.cat((k_BTHN, k_BT1Q.expand(-1, -1, k_BTHN.shape[2], -1)), dim=-1)
        del k_BTHN, k_BT1Q, latent_BTR, turning_BTQ
        scores = self.scores_in_training if self.training else self.scores
        y_BTD: Tensor = self.o_proj(self.attend(q_BTHK, k_BTHK, v_BTHW, mask, scores, None))
        return y_BTD

    def _turned(self, x_BTHK: Tensor, angles: Angles | None, begin: int = 0) -> Tensor:
        """With rotary positions, where the model has any."""
        return x_BTHK if angles is None else rotate(x_BTHK, angles, begin=begin, interleaved=self.interleaved)

    def _keys_values(self, latent_BTR: Tensor) -> tuple[Tensor, Tensor]:
        """Of normed latents the keys without their turned part, and the values, of all heads."""
        kv_BTHC = heads(self.kv_b_proj(latent_BTR), self.plain + self.value)
        k_BTHN, v_BTHW = torch.split(kv_BTHC, [self.plain, self.value], dim=-1)
        return k_BTHN, v_BTHW

    def _absorbed(self, q_BHK: Tensor, joint_BSC: Tensor) -> Tensor:
        """One query of each sequence against the latents themselves, C = R + Q wide: [B, 1, H W].

        What kv_b_proj makes of a latent is a matmul that queries and mixtures can take instead (DeepSeek-V2,
        section 2.1.2), so that keys and values of all heads are never there.
        """
        weight_HCR = self.kv_b_proj.weight.view(-1, self.plain + self.value, self.rank)
        q_BHN, turned_BHQ = torch.split(q_BHK, [self.plain, self.turned], dim=-1)
        q_HBR = torch.bmm(q_BHN.transpose(0, 1), weight_HCR[:, : self.plain])
        q_BHC = torch.cat((q_HBR.transpose(0, 1), turned_BHQ), dim=-1)
        weights_BHS = (torch.bmm(q_BHC, joint_BSC.transpose(1, 2)) * self.scores.scale).softmax(dim=-1)
        y_BHR = torch.bmm(weights_BHS, joint_BSC[..., : self.rank])
        y_HBW = torch.bmm(y_BHR.transpose(0, 1), weight_HCR[:, self.plain :].transpose(1, 2))
        return y_HBW.transpose(0, 1).clone(memory_format=torch.contiguous_format).flatten(1)[:, None]

    def _queries(self, x_BTD: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor | None]:
        """Queries [B, T, H K], and the places of the keys that are chosen for each."""
        if self.q_proj is not None:
            return self.q_proj(x_BTD), None
        assert self.q_a_proj is not None
        assert self.q_a_layernorm is not None
        assert self.q_b_proj is not None
        low_BTP = self.q_a_layernorm(self.q_a_proj(x_BTD))
        chosen_BTC = self.indexer(x_BTD, low_BTP, angles) if self.indexer is not None and angles is not None else None
        return self.q_b_proj(low_BTP), chosen_BTC
