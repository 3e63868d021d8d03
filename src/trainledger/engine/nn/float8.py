"""Linear layers whose three matmuls run in 8 bits (Micikevicius et al. 2022), as torchao's Float8Linear does them.

Each matmul scales both its factors so that the largest value of a tensor (or of a row along the contracted dim) is
the format's largest, and casts them. Backward gets the high-precision input and weight and scales them again:
nothing in 8 bits is kept, unless weights are cast once for all micro-batches of a step (`weights_cast_once`, as
Transformer Engine has it with ``is_first_microbatch``). Written for eager PyTorch, so the scaled fp32 value before a
cast is a separate tensor; a compiler would fuse it away.

Shapes: N tokens in a row, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainledger.engine.nn.norm import compute_dtype
from trainledger.engine.nn.transformer import Transformer
from trainledger.spec.precision import IN_16_BITS, Float8

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SMALLEST_LARGEST = 1e-12  # an all-zero tensor would have no scale
Scaled = tuple[Tensor, Tensor]  # elements in 8 bits, and what they must be multiplied with


def use_float8(model: Transformer, float8: Float8) -> None:
    """Let the linear layers of the blocks multiply in 8 bits; the head and the routers do not change."""
    for layer in model.layers:
        for module in list(layer.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear and name not in IN_16_BITS:
                    setattr(module, name, Float8Linear(child, float8))


@contextmanager
def weights_cast_once(model: nn.Module) -> Iterator[None]:
    """Cast the weights of a model that keeps them in 8 bits; inside, its matmuls read those, without a check."""
    layers = [module for module in model.modules() if isinstance(module, Float8Linear) and module.float8.caching]
    for layer in layers:
        layer.cast_weight()
    try:
        yield
    finally:
        for layer in layers:
            layer.is_cast = False


class Float8Linear(nn.Linear):
    """A linear layer with another's parameters and matmuls in 8 bits.

    ``weight_8`` and ``weight_8_turned`` are buffers for the weight in 8 bits, where it is cast once for several uses:
    [O, I] for the matmul of forward, [I, O] for the input's gradient. ``is_cast`` says that the weight is in them.
    """

    weight_8: Tensor
    weight_8_turned: Tensor
    weight_scale: Tensor
    weight_scale_turned: Tensor

    def __init__(self, linear: nn.Linear, float8: Float8) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.float8 = float8
        self.is_cast = False
        if float8.caching:
            (O, I), rowwise = self.weight.shape, float8.scaling == "rowwise"
            sizes: dict[str, tuple[int, ...]] = {"weight_8": (O, I), "weight_8_turned": (I, O)}
            sizes |= {"weight_scale": (O, 1), "weight_scale_turned": (I, 1)} if rowwise else {"weight_scale": ()}
            for name, size in sizes.items():
                dtype = torch.float32 if "scale" in name else DTYPES[float8.forward]
                self.register_buffer(name, torch.empty(size, dtype=dtype, device=self.weight.device), persistent=False)

    @property
    def _scale_turned(self) -> Tensor:
        return self.weight_scale_turned if self.float8.scaling == "rowwise" else self.weight_scale

    @torch.no_grad()
    def cast_weight(self) -> None:
        """Put the present weight into its buffers."""
        w_OI, scaling, dtype = self.weight.detach(), self.float8.scaling, self.weight_8.dtype
        w8_OI, inverse = cast(w_OI, scaling, dtype)
        self.weight_8.copy_(w8_OI)
        self.weight_scale.copy_(inverse)
        if scaling == "tensorwise":
            self.weight_8_turned.copy_(w8_OI.t())
        else:
            del w8_OI, inverse
            w8_IO, inverse = cast(w_OI.t(), scaling, dtype)
            self.weight_8_turned.copy_(w8_IO)
            self.weight_scale_turned.copy_(inverse)
        self.is_cast = True

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O] in the format that matmuls have here."""
        y = self._split(x) if hasattr(x, "to_local") else self._multiply(x, self.weight)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _multiply(self, x: Tensor, w_OI: Tensor) -> Tensor:
        dtype = compute_dtype(x)
        x_NI = x.to(dtype).reshape(-1, w_OI.shape[1])
        copies = None
        if self.is_cast:
            copies = (self.weight_8, self.weight_scale), (self.weight_8_turned, self._scale_turned)
        y_NO: Tensor = _Matmuls.apply(x_NI, w_OI, self.float8, copies)  # type: ignore[no-untyped-call]
        return y_NO.view(*x.shape[:-1], w_OI.shape[0])

    def _split(self, x: Any) -> Tensor:
        """The same over tensor ranks: each scales and multiplies its own part of the weight, [O / t, I] or [O, I / t].

        torchao first asks all ranks for the largest value of the whole, one number or one a row.
        """
        from torch.distributed.tensor import DTensor, Partial, Shard  # half as long to import as torch itself

        weight: Any = self.weight
        by_outputs = weight.placements == (Shard(0),)
        y = self._multiply(x.to_local(grad_placements=(Partial(),) if by_outputs else None), weight.to_local())
        return DTensor.from_local(y, weight.device_mesh, (Shard(y.ndim - 1) if by_outputs else Partial(),))


class _Matmuls(torch.autograd.Function):
    """y = x w^T, and backward dx = dy w and dw = dy^T x."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, w_OI: Tensor, float8: Float8, copies: tuple[Scaled, Scaled] | None = None
    ) -> Tensor:
        # Copies that outlive the graph are nothing to save: no checkpoint recomputes them.
        ctx.save_for_backward(*((x_NI, w_OI) if copies is None else (x_NI,)))
        ctx.float8, ctx.copies, ctx.w_dtype = float8, copies, w_OI.dtype
        if copies is None:
            return matmul(x_NI, w_OI, float8, float8.forward, float8.forward, x_NI.dtype)
        return multiply(cast(x_NI, float8.scaling, DTYPES[float8.forward]), copies[0], float8.scaling, x_NI.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NO: Tensor) -> Any:
        x_NI, *w_OI = ctx.saved_tensors
        float8: Float8 = ctx.float8
        if ctx.copies is None:
            dx_NI = matmul(dy_NO, w_OI[0].t(), float8, float8.backward, float8.forward, dy_NO.dtype)
        else:
            dy8_NO = cast(dy_NO, float8.scaling, DTYPES[float8.backward])
            dx_NI = multiply(dy8_NO, ctx.copies[1], float8.scaling, dy_NO.dtype)
            del dy8_NO
        dw_OI = matmul(dy_NO.t(), x_NI.t(), float8, float8.backward, float8.forward, dy_NO.dtype)
        return dx_NI, dw_OI.to(ctx.w_dtype), None, None


def matmul(a_MK: Tensor, b_NK: Tensor, float8: Float8, a_format: str, b_format: str, dtype: torch.dtype) -> Tensor:
    """a b^T of tensors whose rows are the contracted dim, both scaled and cast, in ``dtype``."""
    a, b = cast(a_MK, float8.scaling, DTYPES[a_format]), cast(b_NK, float8.scaling, DTYPES[b_format])
    return multiply(a, b, float8.scaling, dtype)


# A scale for each row runs on CPUs since torch 2.12 (an assertion inside torch before).
def multiply(a_MK: Scaled, b_NK: Scaled, scaling: str, dtype: torch.dtype) -> Tensor:
    """a b^T of what is in 8 bits already."""
    (a8, a_inverse), (b8, b_inverse) = a_MK, b_NK
    if scaling == "rowwise":
        b_inverse = b_inverse.t()
    return torch._scaled_mm(a8, b8.t(), scale_a=a_inverse, scale_b=b_inverse, out_dtype=dtype)


def cast(x_MK: Tensor, scaling: str, dtype: torch.dtype) -> Scaled:
    """x in 8 bits with rows next to each other in memory, and what it must be multiplied with to be x again.

    One scale for the whole tensor ([]), or one per row ([M, 1]), in fp32.
    """
    rows: dict[str, Any] = {"dim": -1, "keepdim": True} if scaling == "rowwise" else {}
    if torch.compiler.is_compiling():
        # No tensor of the magnitudes is made, and their largest can be recomputed for backward, as in torchao. Of
        # aminmax a compiler makes an amax, of which it thinks so, and an amin, of which it does not: it keeps more.
        largest = x_MK.abs().amax(**rows).to(torch.float32).clamp_(min=SMALLEST_LARGEST)
    else:
        low, high = x_MK.aminmax(**rows)
        largest = torch.maximum(high, -low).to(torch.float32).clamp_(min=SMALLEST_LARGEST)
    limit = torch.finfo(dtype).max
    scale = limit / largest
    # An [1, 1] scale makes the matmul fp32, as a row's does; a number without dims would leave it in x's format.
    x8_MK = (x_MK * scale.view(-1, 1)).clamp_(-limit, limit).to(dtype)
    return x8_MK.contiguous(), largest / limit
