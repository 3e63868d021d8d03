"""Weights in 8 or 4 bits: which matrices of a model are quantized, by torchao, and the stored codes.

A matrix [O, I] is symmetric integer codes and 16-bit scales: of 8 bits a scale per row, of 4 bits one per group of a
row's columns. A weight is its code times its scale, which is exact in fp32. Shapes: O rows, I columns, G groups.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainledger.spec.savings import is_linear
from trainledger.spec.units import ceil_div

BITS, GROUP_SIZES = (8, 4), (128, 64, 32)


@dataclass(frozen=True)
class Quantization:
    """Bits of a code, and of 4 bits the columns that share a scale (None: a whole row does)."""

    bits: int
    group_size: int | None = None

    @property
    def format(self) -> str:
        """Its name among the formats of served weights (`spec.serving.WEIGHT_FORMATS`).

        >>> Quantization(8).format, Quantization(4, 32).format
        ('int8', 'int4-symmetric-g32')
        """
        if self.bits == 8:
            return "int8"
        return "int4-symmetric" + ("" if self.group_size == 128 else f"-g{self.group_size}")


@dataclass(frozen=True)
class Quantized:
    """The codes of a matrix or of a stack of them, int8 of 8 bits and two a byte of 4, and its bf16 scales."""

    codes: Tensor
    scales: Tensor
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def is_quantized(name: str, weight: Tensor) -> bool:
    """Whether a parameter is a matrix of a block's linear layer or of experts; embeddings, head, router and norms stay.

    >>> matrix = torch.empty(4, 4)
    >>> is_quantized("layers.0.mlp.up_proj.weight", matrix), is_quantized("lm_head.weight", matrix)
    (True, False)
    """
    return (is_linear(name) and weight.ndim == 2) or ("experts" in name.split(".") and weight.ndim == 3)


def quantize(weights: Mapping[str, Tensor], quantization: Quantization) -> dict[str, Quantized]:
    """Those of a model's weights that are quantized; ModuleNotFoundError where torchao is missing."""
    found = {}
    for name, weight in weights.items():
        if is_quantized(name, weight):
            theirs, columns = by_torchao(weight, quantization), weight.shape[-1]
            codes_OI = theirs.qdata[:, :columns].contiguous()
            codes = codes_OI if quantization.bits == 8 else pack(codes_OI)
            found[name] = Quantized(codes, theirs.scale, tuple(weight.shape))
    return found


def by_torchao(weight: Tensor, quantization: Quantization) -> Any:
    """torchao's tensor of a matrix or of a stack of them, its rows one under the other.

    The last group of a row is filled up with zeros, which take no part in its scale.
    """
    import_torchao()
    from torchao.quantization import IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerAxis, PerGroup

    rows_OI = weight.detach().float().reshape(-1, weight.shape[-1])
    size = quantization.group_size
    if size is not None:
        rows_OI = torch.nn.functional.pad(rows_OI, (0, -rows_OI.shape[1] % size))
    # torchao quantizes layers. Its own tensor for int8 is the same numbers with scales that stay fp32.
    layer = torch.nn.Linear(rows_OI.shape[1], rows_OI.shape[0], bias=False, device="meta")
    layer.weight = torch.nn.Parameter(rows_OI, requires_grad=False)
    config = IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, f"int{quantization.bits}"),
        granularity=PerAxis(0) if size is None else PerGroup(size), scale_dtype=torch.bfloat16,
    )  # fmt: skip
    quantize_(layer, config)
    return layer.weight


def dequantize(quantized: Quantized, quantization: Quantization) -> Tensor:
    """The weights in fp32, each its code times its scale."""
    columns = quantized.shape[-1]
    codes_OI = quantized.codes if quantization.bits == 8 else unpack(quantized.codes, columns)
    size = columns if quantization.group_size is None else quantization.group_size
    scales_OI = quantized.scales.float().repeat_interleave(size, dim=1)[:, :columns]
    return (codes_OI.float() * scales_OI).reshape(quantized.shape)


def pack(codes_OI: Tensor) -> Tensor:
    """Codes of -8 to 7 as two a byte: the even column in the low four bits; an odd row ends with a 0.

    >>> pack(torch.tensor([[1, -1, 7]], dtype=torch.int8)).tolist()
    [[241, 7]]
    """
    even = torch.nn.functional.pad(codes_OI, (0, codes_OI.shape[1] % 2)).view(torch.uint8) & 0xF
    return even[:, 0::2] | even[:, 1::2] << 4


def unpack(packed: Tensor, columns: int) -> Tensor:
    """What `pack` has packed, as int8."""
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)[:, :columns].to(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)


def stored_shapes(shape: tuple[int, ...], quantization: Quantization) -> tuple[tuple[int, int], tuple[int, int]]:
    """The shapes of the codes and of the scales of a matrix or of a stack of them.

    >>> stored_shapes((2, 3, 70), Quantization(4, 64))
    ((6, 35), (6, 2))
    """
    *stack, columns = shape
    rows, size = 1, columns if quantization.group_size is None else quantization.group_size
    for each in stack:
        rows *= each
    return (rows, ceil_div(columns * quantization.bits, 8)), (rows, ceil_div(columns, size))


def import_torchao() -> None:
    """Import torchao without its warnings of libraries for GPUs that this machine has not; ModuleNotFoundError where it
    is missing."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        import torchao.quantization  # noqa: F401
    finally:
        logging.disable(before)
