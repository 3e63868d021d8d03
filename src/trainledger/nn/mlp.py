"""The feed-forward part of a block.

Shapes: B sequences, T tokens, D d_model, F d_ff.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from trainledger.spec.model import ModelSpec


def activate(x: Tensor, activation: str) -> Tensor:
    """SiLU, exact GELU, or GELU in its tanh form, elementwise."""
    if activation == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class MLP(nn.Module):
    """down(act(up(x))), or gated: down(act(gate(x)) * up(x)) (Shazeer 2020, GLU Variants)."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.activation = spec.activation
        self.gate_proj = nn.Linear(spec.d_model, spec.d_ff, bias=spec.mlp_bias) if spec.gated else None
        self.up_proj = nn.Linear(spec.d_model, spec.d_ff, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(spec.d_ff, spec.d_model, bias=spec.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] in and out."""
        if self.gate_proj is None:
            h_BTF = activate(self.up_proj(x_BTD), self.activation)
        else:
            h_BTF = activate(self.gate_proj(x_BTD), self.activation) * self.up_proj(x_BTD)
        y_BTD: Tensor = self.down_proj(h_BTF)
        return y_BTD
