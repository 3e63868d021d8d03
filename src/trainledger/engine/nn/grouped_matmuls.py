"""matmuls of many experts at once, as operations that a trace sees whole and knows the FLOPs of.

torch's own grouped matmul takes few formats and sizes (rows of whole 16 bytes; traced, only bf16), so these
surround it: each runs it where it can and else loops over the experts, with the same FLOPs. The shapes of
what comes out never depend on the data.

Shapes: E experts, R rows sorted by expert, C rows of one expert, D width in, M width out. ``ends_E`` holds, for
each expert, how many rows it and those before it have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


@torch.library.custom_op("trainledger::grouped_mm", mutates_args=())
def grouped_mm(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    """Each expert's rows of a times its matrix: [R, D] @ [E, D, M] -> [R, M].

    With a [M, R] and b [R, D] the rows are what is summed over: one [M, D] of each expert's rows, [E, M, D].
    """
    if _torch_takes(a, b):
        return F.grouped_mm(a, b, offs=ends_E.to(torch.int32))
    out = a.new_empty(_grouped_shape(a, b, ends_E))
    for expert, (first, end) in enumerate(_ranges(ends_E)):
        if b.dim() == 3:
            torch.mm(a[first:end], b[expert], out=out[first:end])
        else:
            torch.mm(a[:, first:end], b[first:end], out=out[expert])
    return out


@grouped_mm.register_fake
def _(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    return a.new_empty(_grouped_shape(a, b, ends_E))


@torch.library.custom_op("trainledger::group_sums", mutates_args=())
def group_sums(x_RM: Tensor, ends_E: Tensor) -> Tensor:
    """The sum of each expert's rows, [E, M]."""
    sums_EM = x_RM.new_empty(ends_E.shape[0], x_RM.shape[1])
    for expert, (first, end) in enumerate(_ranges(ends_E)):
        torch.sum(x_RM[first:end], 0, out=sums_EM[expert])
    return sums_EM


@group_sums.register_fake
def _(x_RM: Tensor, ends_E: Tensor) -> Tensor:
    return x_RM.new_empty(ends_E.shape[0], x_RM.shape[1])


@torch.library.custom_op("trainledger::padded_mm", mutates_args=())
def padded_mm(a: Tensor, b: Tensor, routed: int, places: int) -> Tensor:
    """[E, m, k] @ [E, k, n]; of the experts' ``places`` rows in all, at most ``routed`` hold a token."""
    return torch.bmm(a, b)


@padded_mm.register_fake
def _(a: Tensor, b: Tensor, routed: int, places: int) -> Tensor:
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2])


class GroupedLinear(Function):
    """x W^T + b with the weight and bias of each row's expert; ``expert_R`` is which, ascending."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, w_EMD: Tensor, b_EM: Tensor | None, expert_R: Tensor, ends_E: Tensor) -> Tensor:
        y_RM: Tensor = grouped_mm(x_RD, w_EMD.transpose(1, 2), ends_E)
        if b_EM is not None:
            y_RM += b_EM.index_select(0, expert_R)
        _save(ctx, x_RD, w_EMD, ends_E)
        return y_RM

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, w_EMD, ends_E = ctx.saved_tensors
        (g_RM,) = gradients
        x_wanted, w_wanted, b_wanted = ctx.needs_input_grad[:3]
        return (
            grouped_mm(g_RM, w_EMD, ends_E) if x_wanted else None,
            grouped_mm(g_RM.t(), x_RD, ends_E) if w_wanted else None,
            group_sums(g_RM, ends_E) if b_wanted else None,
            None,
            None,
        )


class PaddedLinear(Function):
    """x W^T + b of each expert's C places; ``routed`` as in `padded_mm`."""

    @staticmethod
    def forward(ctx: Any, x_ECD: Tensor, w_EMD: Tensor, b_EM: Tensor | None, routed: int) -> Tensor:
        ctx.routed, ctx.places = routed, x_ECD.shape[0] * x_ECD.shape[1]
        y_ECM: Tensor = padded_mm(x_ECD, w_EMD.transpose(1, 2), routed, ctx.places)
        if b_EM is not None:
            y_ECM += b_EM[:, None]
        _save(ctx, x_ECD, w_EMD)
        return y_ECM

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_ECD, w_EMD = ctx.saved_tensors
        (g_ECM,) = gradients
        x_wanted, w_wanted, b_wanted = ctx.needs_input_grad[:3]
        return (
            padded_mm(g_ECM, w_EMD, ctx.routed, ctx.places) if x_wanted else None,
            padded_mm(g_ECM.transpose(1, 2), x_ECD, ctx.routed, ctx.places) if w_wanted else None,
            g_ECM.sum(1) if b_wanted else None,
            None,
        )


def _save(ctx: Any, x: Tensor, w: Tensor, *others: Tensor) -> None:
    """Save what the wanted gradients need: that of the weights the input, that of the input the weights."""
    x_wanted, w_wanted = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if w_wanted else None, w if x_wanted else None, *others)


def _grouped_shape(a: Tensor, b: Tensor, ends_E: Tensor) -> tuple[int, ...]:
    if b.dim() == 3:
        return a.shape[0], b.shape[2]
    return ends_E.shape[0], a.shape[0], b.shape[1]


def _ranges(ends_E: Tensor) -> Iterator[tuple[int, int]]:
    """First and end row of each expert; waits for the device."""
    first = 0
    for end in ends_E.tolist():
        yield first, end
        first = end


def _torch_takes(a: Tensor, b: Tensor) -> bool:
    """Whether torch's grouped kernel runs these: bf16 on CUDA, one dim of stride 1, the others of whole 16 bytes."""
    return a.is_cuda and a.dtype == torch.bfloat16 and hasattr(F, "grouped_mm") and _aligned(a) and _aligned(b)


def _aligned(x: Tensor) -> bool:
    """Whether a kernel that loads 16 bytes at a time may read x."""
    step = 16 // x.element_size()
    return 1 in x.stride()[-2:] and x.data_ptr() % 16 == 0 and sum(each % step != 0 for each in x.stride()) == 1
