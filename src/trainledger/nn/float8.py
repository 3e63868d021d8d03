"""Linear layers whose three products run in 8 bits (Micikevicius et al. 2022), as torchao's Float8Linear does them.

Each product scales both its factors so that the largest value of a tensor (or of a row along the contracted dim) is
the format's largest, and casts them. Backward gets the high-precision input and weight and scales them again:
nothing in 8 bits is kept. Written for eager PyTorch, so the scaled fp32 value before a cast is a tensor of its own;
a compiler would fuse it away.

Shapes: N tokens in a row, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainledger.nn.compute_dtype import compute_dtype
from trainledger.nn.transformer import Transformer
from trainledger.spec.precision import Float8

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SMALLEST_LARGEST = 1e-12  # an all-zero tensor would have no scale
LEFT_OUT = ("router", "shared_expert_gate")  # too thin to gain, and sensitive


def use_float8(model: Transformer, float8: Float8) -> None:
    """Let the linear layers of the blocks multiply in 8 bits; the head and the routers stay as they are."""
    for layer in model.layers:
        for module in list(layer.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear and name not in LEFT_OUT:
                    setattr(module, name, Float8Linear(child, float8))


class Float8Linear(nn.Linear):
    """A linear layer with another's parameters and products in 8 bits."""

    def __init__(self, linear: nn.Linear, float8: Float8) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.float8 = float8

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O] in the format that products have here."""
        dtype = compute_dtype(x)
        x_NI = x.to(dtype).reshape(-1, self.in_features)
        y_NO: Tensor = _Products.apply(x_NI, self.weight, self.float8)  # type: ignore[no-untyped-call]
        if self.bias is not None:
            y_NO = y_NO + self.bias.to(dtype)
        return y_NO.view(*x.shape[:-1], self.out_features)


class _Products(torch.autograd.Function):
    """y = x w^T, and backward dx = dy w and dw = dy^T x."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, w_OI: Tensor, float8: Float8) -> Tensor:
        ctx.save_for_backward(x_NI, w_OI)
        ctx.float8 = float8
        return product(x_NI, w_OI, float8, float8.forward, float8.forward, x_NI.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NO: Tensor) -> Any:
        x_NI, w_OI = ctx.saved_tensors
        float8: Float8 = ctx.float8
        dx_NI = product(dy_NO, w_OI.t(), float8, float8.backward, float8.forward, dy_NO.dtype)
        dw_OI = product(dy_NO.t(), x_NI.t(), float8, float8.backward, float8.forward, dy_NO.dtype)
        return dx_NI, dw_OI.to(w_OI.dtype), None


def product(a_MK: Tensor, b_NK: Tensor, float8: Float8, a_format: str, b_format: str, dtype: torch.dtype) -> Tensor:
    """a b^T of tensors whose rows are the contracted dim, both scaled and cast, in ``dtype``."""
    a8, a_inverse = cast(a_MK, float8.scaling, DTYPES[a_format])
    b8, b_inverse = cast(b_NK, float8.scaling, DTYPES[b_format])
    if float8.scaling == "rowwise":
        b_inverse = b_inverse.t()
    return torch._scaled_mm(a8, b8.t(), scale_a=a_inverse, scale_b=b_inverse, out_dtype=dtype)


def cast(x_MK: Tensor, scaling: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x in 8 bits with rows next to each other in memory, and what it must be multiplied with to be x again.

    One scale for the whole tensor ([]), or one per row ([M, 1]), in fp32.
    """
    low, high = x_MK.aminmax(dim=-1, keepdim=True) if scaling == "rowwise" else x_MK.aminmax()
    largest = torch.maximum(high, -low).to(torch.float32).clamp_(min=SMALLEST_LARGEST)
    limit = torch.finfo(dtype).max
    scale = limit / largest
    # An [1, 1] scale makes the product fp32, as a row's does; a number without dims would leave it in x's format.
    x8_MK = (x_MK * scale.view(-1, 1)).clamp_(-limit, limit).to(dtype)
    return x8_MK.contiguous(), largest / limit
