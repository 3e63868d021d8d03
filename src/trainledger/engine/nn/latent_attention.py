"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1).

Keys and values of all heads come from one latent; what rope turns is a further part of each query head, and one key
for all heads.

Shapes: B sequences, T tokens, D d_model, H heads, P query rank, R key-value rank, N width without positions,
Q rotary width, K = N + Q, W value width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainledger.engine.nn.attention import Attend, Shared, attend, heads, refuse, scores_of
from trainledger.engine.nn.cache import LayerCache
from trainledger.engine.nn.norm import RMSNorm
from trainledger.engine.nn.positions import rotate
from trainledger.spec.layers import LayerKind
from trainledger.spec.model import ModelSpec

EPS = 1e-6  # of the norms of the latents: in the published code a constant, not the model's


class LatentAttention(nn.Module):
    """Attention whose keys and values are low-rank; arguments as of `Attention`."""

    def __init__(self, spec: ModelSpec, kind: LayerKind, implementation: str, dropout: float = 0.0) -> None:
        super().__init__()
        assert spec.latent is not None
        assert spec.rope is not None
        D, H, P, R = spec.d_model, spec.latent.n_heads, spec.latent.q_rank, spec.latent.kv_rank
        self.plain, self.turned, self.value = spec.latent.nope_head_dim, spec.rotary_size, spec.value_size
        self.rank, self.interleaved = R, spec.rope.interleaved
        self.cache: LayerCache | None = None
        self.attend: Attend = attend
        self.scores = scores_of(spec, implementation, 0.0)
        self.scores_in_training = scores_of(spec, implementation, dropout)
        bias = spec.attention.bias
        self.q_proj = nn.Linear(D, H * spec.head_size, bias=False) if P is None else None
        self.q_a_proj = nn.Linear(D, P, bias=bias) if P is not None else None
        self.q_a_layernorm = RMSNorm(P, eps=EPS) if P is not None else None
        self.q_b_proj = nn.Linear(P, H * spec.head_size, bias=False) if P is not None else None
        self.kv_a_proj_with_mqa = nn.Linear(D, R + self.turned, bias=bias)
        self.kv_a_layernorm = RMSNorm(R, eps=EPS)
        self.kv_b_proj = nn.Linear(R, H * (self.plain + self.value), bias=False)
        self.o_proj = nn.Linear(H * self.value, D, bias=spec.output_bias)
        refuse(spec, implementation, self.o_proj.weight)

    def forward(self, x_BTD: Tensor, shared: Shared) -> Tensor:
        """Each token's mixture of the values that it sees; [B, T, D] in and out."""
        angles, mask = shared
        assert angles is not None
        q_BTHK = heads(self._queries(x_BTD), self.plain + self.turned)
        q_BTHK = rotate(q_BTHK, angles, begin=self.plain, interleaved=self.interleaved)
        latent_BTR, turning_BTQ = torch.split(self.kv_a_proj_with_mqa(x_BTD), [self.rank, self.turned], dim=-1)
        if self.cache is not None:
            latent_BTR = self.kv_a_layernorm(latent_BTR)
            k_BT1Q = rotate(turning_BTQ[:, :, None], angles, interleaved=self.interleaved)
            decoding = self.cache.past > 0
            (joint_BS1C,) = self.cache.remember(torch.cat((latent_BTR[:, :, None], k_BT1Q), dim=-1))
            if decoding:
                y_B1D: Tensor = self.o_proj(self._absorbed(q_BTHK[:, 0], joint_BS1C[:, :, 0]))
                return y_B1D
            k_BTHN, v_BTHW = self._keys_values(latent_BTR)
        else:
            k_BTHN, v_BTHW = self._keys_values(self.kv_a_layernorm(latent_BTR))
            k_BT1Q = rotate(turning_BTQ[:, :, None], angles, interleaved=self.interleaved)
        k_BTHK = torch.cat((k_BTHN, k_BT1Q.expand(-1, -1, k_BTHN.shape[2], -1)), dim=-1)
        del k_BTHN, k_BT1Q, latent_BTR, turning_BTQ
        scores = self.scores_in_training if self.training else self.scores
        y_BTD: Tensor = self.o_proj(self.attend(q_BTHK, k_BTHK, v_BTHW, mask, scores, None))
        return y_BTD

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

    def _queries(self, x_BTD: Tensor) -> Tensor:
        if self.q_proj is not None:
            y: Tensor = self.q_proj(x_BTD)
            return y
        assert self.q_a_proj is not None
        assert self.q_a_layernorm is not None
        assert self.q_b_proj is not None
        z: Tensor = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD)))
        return z
