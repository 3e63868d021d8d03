"""The feed-forward part of a block: a dense MLP, or a mixture of experts in its place.

Shapes: B sequences, T tokens, N = B T tokens, D d_model, F inner width (of an expert), E experts, K experts of a
token, R = K N routes, S places of all experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainledger.engine.nn.loss import with_loss
from trainledger.engine.nn.norm import compute_dtype, norm_of, normed
from trainledger.engine.nn.routing import (
    Dispatch,
    GroupedLinear,
    PaddedLinear,
    Router,
    balance_loss,
    capacity,
    dispatch,
    from_experts,
    to_experts,
)
from trainledger.spec.model import ModelSpec
from trainledger.spec.savings import Lora

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


@dataclass(frozen=True)
class Dispatching:
    """How a recipe sends tokens to experts.

    ``capacity_factor`` None sends every token to all of its experts (dropless); a number gives each expert so many
    times its even share of places, and what is routed beyond is dropped (Fedus et al. 2021, Switch Transformers).
    ``balance`` is the weight of the load-balance loss.
    """

    capacity_factor: float | None = None
    balance: float = 0.0


DROPLESS = Dispatching()


# One tensor for all experts, as grouped kernels read one address; DeepSeek-V3 has 256 routed experts in a layer.
class ExpertStack(nn.Module):
    """The MLPs of all experts, one tensor per projection; gate and up are one projection, gate first."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.experts is not None
        E, D, F = spec.experts.n_experts, spec.expert_d_model, spec.experts.width
        self.spec = spec
        inward = self.inward = "gate_up_proj" if spec.feed_forward.gated else "up_proj"
        wide = 2 * F if spec.feed_forward.gated else F
        shapes: dict[str, tuple[int, ...]] = {inward: (E, wide, D), f"{inward}_bias": (E, wide)}
        shapes |= {"down_proj": (E, D, F), "down_proj_bias": (E, D)}
        for name, shape in shapes.items():
            if spec.feed_forward.bias or not name.endswith("bias"):
                self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.lora: Lora | None = None
        self.off = False
        self.reset_parameters()

    def adapt(self, lora: Lora) -> None:
        """Add adapters, A [E, R, I] and B [E, O, R] of each frozen weight [E, O, I]."""
        self.lora = lora
        for name in (self.inward, "down_proj"):
            E, d_out, d_in = getattr(self, name).shape
            for part, shape in (("a", (E, lora.rank, d_in)), ("b", (E, d_out, lora.rank))):
                self.register_parameter(f"lora_{part}_{name}", nn.Parameter(getattr(self, name).new_zeros(shape)))

    def merge(self) -> None:
        """Add what adapters do to the weights, and remove them."""
        for name in (self.inward, "down_proj") if self.lora is not None else ():
            weight = getattr(self, name)
            assert self.lora is not None
            with torch.no_grad():
                b, a = (getattr(self, f"lora_{part}_{name}").to(weight.dtype) for part in "ba")
                weight.baddbmm_(b, a, alpha=self.lora.alpha / self.lora.rank)
            for part in "ab":
                delattr(self, f"lora_{part}_{name}")
        self.lora = None

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(fan_in), as torch fills a linear layer."""
        for name, parameter in self.named_parameters():
            bound = getattr(self, name.removesuffix("_bias")).shape[-1] ** -0.5
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x_SD: Tensor, where: Dispatch, routed: int) -> Tensor:
        """[S, D] in and out; ``routed`` of the S rows hold tokens."""
        y_SH = self._linear(x_SD, self.inward, where, routed)
        if self.spec.feed_forward.gated:
            gate_SF, up_SF = y_SH.chunk(2, dim=-1)
            h_SF = gated(gate_SF, up_SF, self.spec.feed_forward.activation)
            del gate_SF, up_SF
        else:
            h_SF = activate(y_SH, self.spec.feed_forward.activation)
        del y_SH
        return self._linear(h_SF, "down_proj", where, routed)

    def stack(self, name: str) -> Tensor | None:
        """A parameter as the matmuls read it, None where there is none."""
        stack: Tensor | None = getattr(self, name, None)
        return stack

    def _linear(self, x_SD: Tensor, name: str, where: Dispatch, routed: int) -> Tensor:
        weight, bias = self.stack(name), self.stack(f"{name}_bias")
        a, b = self.stack(f"lora_a_{name}"), self.stack(f"lora_b_{name}")
        assert weight is not None
        if self.lora is None or a is None or b is None or self.off:
            return self._multiply(x_SD, weight, bias, where, routed)
        scale = self.lora.alpha / self.lora.rank
        if self.lora.experts == "weights":  # as PEFT 0.21 (tuners/lora/layer.py, ``ParamWrapper``)
            return self._multiply(x_SD, torch.baddbmm(weight, b, a, alpha=scale), bias, where, routed)
        z_SD = torch.native_dropout(x_SD, p, True)[0] if self.training and (p := self.lora.dropout) else x_SD
        y_SM = self._multiply(x_SD, weight, bias, where, routed)
        rest = (None, where, routed)
        return y_SM + self._multiply(self._multiply(z_SD, a, *rest), b, *rest) * scale

    def _multiply(self, x_SD: Tensor, weight: Tensor, bias: Tensor | None, where: Dispatch, routed: int) -> Tensor:
        """Each expert's rows times its own matrix of a stack."""
        w_EMD = weight.to(x_SD.dtype)
        b_EM = None if bias is None else bias.to(x_SD.dtype)
        y_SM: Tensor
        if where.expert_S is None:
            x_ECD = x_SD.view(w_EMD.shape[0], -1, x_SD.shape[1])
            y_SM = PaddedLinear.apply(x_ECD, w_EMD, b_EM, routed).flatten(0, 1)  # type: ignore[no-untyped-call]
        else:
            y_SM = GroupedLinear.apply(x_SD, w_EMD, b_EM, where.expert_S, where.ends_E)  # type: ignore[no-untyped-call]
        return y_SM


class Experts(nn.Module):
    """Router, experts, and the shared expert that every token passes through (Dai et al. 2024, DeepSeekMoE).

    In training the load-balance loss joins as `extra_loss` says.
    """

    def __init__(self, spec: ModelSpec, dispatching: Dispatching) -> None:
        super().__init__()
        assert spec.experts is not None
        self.spec = spec
        self.n_experts = spec.experts.n_experts
        self.dispatching = dispatching
        factor = dispatching.capacity_factor
        self.capacity_factor = None if factor is None else Fraction(str(factor))
        self.router = Router(spec)
        self.experts = ExpertStack(spec)
        D, narrow, bias = spec.d_model, spec.experts.expert_d_model, spec.feed_forward.bias
        self.latent_in = nn.Linear(D, narrow, bias=bias) if narrow else None
        self.latent_out = nn.Linear(narrow, D, bias=bias) if narrow else None
        own, shared = spec.experts.own_norms, spec.experts.own_norms and spec.experts.n_shared
        self.experts_norm, self.experts_out_norm = (norm_of(spec) if own else None for _ in range(2))
        self.shared_norm, self.shared_out_norm = (norm_of(spec) if shared else None for _ in range(2))
        width = spec.experts.shared_width
        self.shared_experts = MLP(spec, width) if spec.experts.n_shared else None
        self.shared_expert_gate = nn.Linear(spec.d_model, 1, bias=False) if spec.experts.shared_gate else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] in and out."""
        low, stream_BTD = compute_dtype(x_BTD), None if self.experts_norm is None else x_BTD
        x_BTD = normed(self.experts_norm, x_BTD).to(low)
        y_ND = self._routed(x_BTD, x_BTD if stream_BTD is None else stream_BTD)
        if self.latent_out is not None:
            y_ND = self.latent_out(y_ND)
        y_ND = normed(self.experts_out_norm, y_ND)
        y_BTD = y_ND.view(x_BTD.shape)
        del y_ND
        if self.shared_experts is not None:
            if self.shared_norm is not None and stream_BTD is not None:
                x_BTD = self.shared_norm(stream_BTD).to(low)
            shared_BTD = normed(self.shared_out_norm, self.shared_experts(x_BTD))
            if self.shared_expert_gate is not None:
                shared_BTD = self.shared_expert_gate(x_BTD).sigmoid() * shared_BTD
            y_BTD = y_BTD + shared_BTD
        return y_BTD

    def _routed(self, x_BTD: Tensor, routed_BTD: Tensor) -> Tensor:
        """The weighted sum of what each token's experts make of it, [N, D]; the router reads another tensor."""
        routes = self.router.route(routed_BTD)
        x_ND = (x_BTD if self.latent_in is None else self.latent_in(x_BTD)).flatten(0, 1)
        n_tokens, per_token = routes.chosen_NK.shape
        places = None
        if self.capacity_factor is not None:
            places = capacity(n_tokens, per_token, self.n_experts, self.capacity_factor)
        where = dispatch(routes.chosen_NK, self.n_experts, places)
        with torch.autocast(x_ND.device.type, enabled=False):  # all below has its format already
            n_routes = n_tokens * per_token
            routed = n_routes if places is None else min(n_routes, places * self.n_experts)
            y_SD = self.experts(to_experts(x_ND, where), where, routed)
            weights_KN1 = routes.weights_NK.t().contiguous().to(y_SD.dtype)[..., None]
            y_ND = (from_experts(y_SD, where).view(per_token, n_tokens, -1) * weights_KN1).sum(0)
            if self.dispatching.balance and self.training and torch.is_grad_enabled():
                loss = balance_loss(routes, self.shares(where, n_routes), self.spec) * self.dispatching.balance
                y_ND = with_loss(y_ND, loss)
        return y_ND

    def shares(self, where: Dispatch, n_routes: int) -> Tensor:
        """Each expert's share of a micro-batch's routes, [E]."""
        return (where.ends_E - where.starts_E) / n_routes
