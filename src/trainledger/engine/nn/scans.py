"""Operators of mixers: a causal convolution, Mamba-2's scan, the gated delta rule and a gated norm, each one operator.

A kernel of mamba-ssm or flash-linear-attention is one operation that keeps its inputs and recomputes in backward what
lies between; so does each of these, written out in torch and in fp32. `cached` also reads and writes a state.
Shapes: B sequences, T tokens, C channels, W tokens of the convolution, H heads, P their width, G groups of heads, N
width of the state, K width of a key, V of a value, Q tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Inputs = Sequence[Tensor]
Numbers = Sequence[float]
Run = Callable[[Inputs, Numbers, Tensor | None], tuple[Tensor, Tensor | None]]


def convolution(inputs: Inputs, numbers: Numbers, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A convolution of each channel over its last W tokens, then SiLU where the first number is 1.

    Inputs: x [B, T, C], weight [C, W], perhaps a bias [C]. The state is the last W - 1 inputs, [B, W - 1, C].
    """
    x_BTC, weight_CW, *bias_C = (tensor.float() for tensor in inputs)
    width, n_tokens = weight_CW.shape[1], x_BTC.shape[1]
    before = x_BTC.new_zeros(x_BTC.shape[0], width - 1, x_BTC.shape[2]) if state is None else state
    x_BSC = torch.cat((before, x_BTC), dim=1)
    y_BTC = torch.zeros_like(x_BTC) + sum(bias_C)
    for at in range(width):
        y_BTC = y_BTC + x_BSC[:, at : at + n_tokens] * weight_CW[:, at]
    return F.silu(y_BTC) if numbers[0] else y_BTC, x_BSC[:, n_tokens:]


def state_space(inputs: Inputs, numbers: Numbers, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Mamba-2's scan in chunks of as many tokens as the first number (Dao and Gu 2024, section 6).

    Inputs: x [B, T, H, P], step [B, T, H], A_log [H], dt_bias [H], B and C [B, T, G, N], D [H]. The state is
    [B, H, P, N].
    """
    x_BTHP, step_BTH, log_H, bias_H, b_BTGN, c_BTGN, d_H = (tensor.float() for tensor in inputs)
    shared = x_BTHP.shape[2] // b_BTGN.shape[2]
    b_BTHN, c_BTHN = (tensor.repeat_interleave(shared, dim=2) for tensor in (b_BTGN, c_BTGN))
    step_BTH = F.softplus(step_BTH + bias_H)
    decay_BTH = -step_BTH * log_H.exp()
    carried = x_BTHP.new_zeros(*x_BTHP.shape[:1], *x_BTHP.shape[2:], b_BTGN.shape[-1]) if state is None else state
    outputs = []
    # Only the state goes from chunk to chunk: what a chunk needs of it is one [Q, Q] matrix for each head.
    for x, step, decay, b, c in _chunks(int(numbers[0]), x_BTHP, step_BTH, decay_BTH, b_BTHN, c_BTHN):
        total_BQH = decay.cumsum(1)
        weights_BHQS = torch.einsum("bqhn,bshn->bhqs", c, b) * _decays(total_BQH)
        u_BQHP = step[..., None] * x
        y_BQHP = torch.einsum("bhqs,bshp->bqhp", weights_BHQS, u_BQHP)
        y_BQHP = y_BQHP + torch.einsum("bqhn,bhpn->bqhp", c, carried) * total_BQH.exp()[..., None]
        left_BQH = (total_BQH[:, -1:] - total_BQH).exp()
        carried = carried * total_BQH[:, -1].exp()[..., None, None]
        carried = carried + torch.einsum("bqhp,bqhn->bhpn", u_BQHP * left_BQH[..., None], b)
        outputs.append(y_BQHP)
    return torch.cat(outputs, dim=1) + d_H[:, None] * x_BTHP, carried


def delta_rule(inputs: Inputs, numbers: Numbers, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule in chunks of as many tokens as the first number (Yang et al. 2024, section 3.3).

    Inputs: v [B, T, H, V], q and k [B, T, heads, K], rate [B, T, H], decay [B, T, H] or of each channel [B, T, H, K],
    A_log [H], dt_bias as the decay. q and k are normalized. The state is [B, H, K, V].
    """
    v_BTHV, q_BTHK, k_BTHK, rate_BTH, decay, log_H, bias = (tensor.float() for tensor in inputs)
    shared = v_BTHV.shape[2] // q_BTHK.shape[2]
    q_BTHK, k_BTHK = (F.normalize(x, dim=-1).repeat_interleave(shared, dim=2) for x in (q_BTHK, k_BTHK))
    q_BTHK = q_BTHK * q_BTHK.shape[-1] ** -0.5
    by_channel = decay.dim() == 4
    decay = (
        -log_H.exp()[..., None] * F.softplus(decay + bias) if by_channel else -log_H.exp() * F.softplus(decay + bias)
    )
    if not by_channel:
        decay = decay[..., None]
    rate_BTH = rate_BTH.sigmoid()
    carried = v_BTHV.new_zeros(*v_BTHV.shape[:1], *k_BTHK.shape[2:], v_BTHV.shape[-1]) if state is None else state
    outputs = []
    for v, q, k, rate, log in _chunks(int(numbers[0]), v_BTHV, q_BTHK, k_BTHK, rate_BTH, decay):
        total_BQHK = log.cumsum(1)
        # exp(-total) alone would overflow where a decay is steep, so that a difference is taken before each exp: for
        # decays of channels that needs [Q, Q, K], which a kernel cuts into smaller blocks.
        if by_channel:
            apart_BQSHK = (total_BQHK[:, :, None] - total_BQHK[:, None]).clamp(max=0).exp()
            keys_BHQS, queries_BHQS = (torch.einsum("bqhk,bshk,bqshk->bhqs", x, k, apart_BQSHK) for x in (k, q))
            keys_BHQS, queries_BHQS = keys_BHQS.tril(), queries_BHQS.tril()
        else:
            decays = _decays(total_BQHK[..., 0])
            keys_BHQS, queries_BHQS = (torch.einsum("bqhk,bshk->bhqs", x, k) * decays for x in (k, q))
        seen_BQHK = total_BQHK.exp()
        # Each token writes what its value lacks after all before it in the chunk: a triangular system (section 3.2 of
        # Yang et al. 2024, Parallelizing Linear Transformers with the Delta Rule, arXiv 2406.06484).
        rate_BHQ1 = rate.transpose(1, 2)[..., None]
        lower = (rate_BHQ1 * keys_BHQS).tril(-1) + torch.eye(v.shape[1], device=v.device)
        wanted_BHQV = v.transpose(1, 2) - torch.einsum("bqhk,bhkv->bhqv", k * seen_BQHK, carried)
        new_BHQV = torch.linalg.solve_triangular(lower, rate_BHQ1 * wanted_BHQV, upper=False, unitriangular=True)
        y_BQHV = torch.einsum("bqhk,bhkv->bqhv", q * seen_BQHK, carried)
        outputs.append(y_BQHV + torch.einsum("bhqs,bhsv->bqhv", queries_BHQS, new_BHQV))
        left_BQHK = (total_BQHK[:, -1:] - total_BQHK).exp()
        carried = carried * total_BQHK[:, -1].exp()[..., None]
        carried = carried + torch.einsum("bqhk,bhqv->bhkv", k * left_BQHK, new_BHQV)
    return torch.cat(outputs, dim=1), carried


def _chunks(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(torch.split(tensor, size, dim=1) for tensor in tensors), strict=True)


def _decays(total_BQH: Tensor) -> Tensor:
    """exp of the decay between two tokens of a chunk, [B, H, Q, Q], zero for later ones."""
    total_BHQ = total_BQH.transpose(1, 2)
    return (total_BHQ[..., None] - total_BHQ[..., None, :]).tril().exp().tril()


def gated_norm(inputs: Inputs, numbers: Numbers, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """An RMS norm over the last dim and a gate: SiLU, or a sigmoid where the second number is 1.

    Inputs: x and gate [..., D], weight [D]. The first number is added to the mean square.
    """
    x, gate, weight = (tensor.float() for tensor in inputs)
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + numbers[0]) * weight
    return normed * (gate.sigmoid() if numbers[1] else F.silu(gate)), None


RUNS: dict[str, Run] = {
    run.__name__: run for run in (convolution, state_space, delta_rule, gated_norm)
}  # each gives a result like its first input
# One operator each in a trace, on fake tensors too, and one kernel where a package has it.
_LIBRARY = torch.library.Library("trainledger", "FRAGMENT")  # type: ignore[no-untyped-call]
_OTHER_MODES = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)


def _define(name: str, run: Run) -> None:
    def forward(inputs: Inputs, numbers: Numbers) -> Tensor:
        with torch.autocast(inputs[0].device.type, enabled=False):
            return run(inputs, numbers, None)[0].to(inputs[0].dtype).contiguous()

    def backward(gradient: Tensor, inputs: Inputs, numbers: Numbers) -> list[Tensor]:
        # Inside of a dispatch mode, which sees this as one operator, autograd is off but for this guard.
        included = torch._C._dispatch_tls_local_include_set()
        guard, device = torch._C._ForceDispatchKeyGuard(included, _OTHER_MODES), inputs[0].device.type
        with guard, torch.enable_grad(), torch.autocast(device, enabled=False):
            own = [tensor.detach().requires_grad_() for tensor in inputs]
            value = run(own, numbers, None)[0].to(gradient.dtype)
            return [tensor.contiguous() for tensor in torch.autograd.grad(value, own, gradient)]

    def cached(state: Tensor, inputs: Inputs, numbers: Numbers) -> Tensor:
        with torch.autocast(inputs[0].device.type, enabled=False):
            value, after = run(inputs, numbers, state)
            assert after is not None
            state.copy_(after)
            return value.to(inputs[0].dtype).contiguous()

    def like(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    defined: tuple[tuple[str, str, Callable[..., Any], Callable[..., Any]], ...] = (
        ("", "Tensor[] inputs, float[] numbers) -> Tensor", forward, lambda inputs, numbers: like(inputs[0])),
        (
            "_backward",
            "Tensor gradient, Tensor[] inputs, float[] numbers) -> Tensor[]",
            backward,
            lambda gradient, inputs, numbers: [like(tensor) for tensor in inputs],
        ),
        (
            "_cached",
            "Tensor(a!) state, Tensor[] inputs, float[] numbers) -> Tensor",
            cached,
            lambda state, inputs, numbers: like(inputs[0]),
        ),
    )
    for ending, schema, function, fake in defined:
        _LIBRARY.define(f"{name}{ending}({schema}")  # type: ignore[no-untyped-call]
        _LIBRARY.impl(f"{name}{ending}", function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"trainledger::{name}{ending}", fake, lib=_LIBRARY)


for _name, _run in RUNS.items():
    _define(_name, _run)


# A function of autograd hands each saved tensor to the hooks of saved tensors, so that checkpointing and offloading see
# what a kernel keeps.
class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, numbers: Numbers, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.scan, ctx.numbers = name, numbers
        y: Tensor = getattr(torch.ops.trainledger, name)(list(inputs), list(numbers))
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        run = getattr(torch.ops.trainledger, f"{ctx.scan}_backward")
        return None, None, *run(gradient, list(ctx.saved_tensors), list(ctx.numbers))


def scan(name: str, numbers: Numbers, *inputs: Tensor, state: Tensor | None = None) -> Tensor:
    """The result of one of `RUNS`; a ``state`` is read and written, and there is then no backward."""
    if state is not None:
        y: Tensor = getattr(torch.ops.trainledger, f"{name}_cached")(state, list(inputs), list(numbers))
        return y
    z: Tensor = _Scan.apply(name, numbers, *inputs)  # type: ignore[no-untyped-call]
    return z
