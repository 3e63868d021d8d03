"""The feed-forward part of a block.

Shapes: B sequences, T tokens, D d_model, F d_ff.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainledger.spec.model import ModelSpec

CLAMP, SWISH = 7.0, 1.702  # of clamped_swish


def activate(x: Tensor, activation: str) -> Tensor:
    """SiLU, GELU (exact or in its tanh form), ReLU, or the square of ReLU (So et al. 2021, Primer), elementwise."""
    match activation:
        case "silu":
            return F.silu(x)
        case "gelu" | "gelu_tanh":
            return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
        case "relu":
            return F.relu(x)
        case "relu2":
            y = F.relu(x)
            return y * y
    raise AssertionError(f"a plain MLP has no activation {activation}")


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up; clamped_swish is (up + 1) * gate * sigmoid(1.702 gate), both cut off at 7 (gpt-oss, 2025)."""
    if activation != "clamped_swish":
        return activate(gate, activation) * up
    gate = gate.clamp(max=CLAMP)
    up = up.clamp(min=-CLAMP, max=CLAMP)
    return (up + 1) * (gate * torch.sigmoid(gate * SWISH))


class MLP(nn.Module):
    """down(act(up(x))), or gated: down(act(gate(x)) * up(x)) (Shazeer 2020, GLU Variants)."""

    def __init__(self, spec: ModelSpec, width: int) -> None:
        super().__init__()
        self.activation = spec.feed_forward.activation
        self.gate_proj = (
            nn.Linear(spec.d_model, width, bias=spec.feed_forward.bias) if spec.feed_forward.gated else None
        )
        self.up_proj = nn.Linear(spec.d_model, width, bias=spec.feed_forward.bias)
        self.down_proj = nn.Linear(width, spec.d_model, bias=spec.feed_forward.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] in and out."""
        if self.gate_proj is None:
            h_BTF = activate(self.up_proj(x_BTD), self.activation)
        else:
            h_BTF = gated(self.gate_proj(x_BTD), self.up_proj(x_BTD), self.activation)
        y_BTD: Tensor = self.down_proj(h_BTF)
        return y_BTD
