"""Frozen weights in fewer bits: codes in blocks with scales, and back to numbers.

``int8``: blocks of 2048 with an fp32 scale. ``nf4``: blocks of 64 codes of 4 bits, two in a byte; their scales in
8-bit floats, of which 256 share an fp32 scale (Dettmers et al. 2023, QLoRA, section 3). ``bf16``: no codes at all.

Shapes: E elements of a weight in a row, C blocks of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = {"int8": 2048, "nf4": 64}
SCALES_TOGETHER = 256
LARGEST_SCALE = 448.0  # of e4m3

# The 16 values of NormalFloat4: quantiles of a normal cut to [-1, 1], zero among them (QLoRA, appendix E).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def codes_of(weight: Tensor, base_format: str | None) -> tuple[Tensor, ...]:
    """A weight as it is stored: itself in bf16, or codes and scales."""
    if base_format == "bf16":
        return (weight.detach().to(torch.bfloat16),)
    assert base_format is not None
    values_CE = _blocks(weight.detach().float().flatten(), BLOCK[base_format])
    largest_C = values_CE.abs().amax(dim=1)
    if base_format == "int8":
        scaled = values_CE / largest_C.clamp(min=1e-30)[:, None] * 127
        return scaled.round().to(torch.int8).flatten()[: weight.numel()].clone(), largest_C
    groups = _blocks(largest_C, SCALES_TOGETHER)
    above = (groups.amax(dim=1) / LARGEST_SCALE).clamp(min=1e-30)
    scales = (groups / above[:, None]).to(torch.float8_e4m3fn)
    used_C = (scales.float() * above[:, None]).flatten()[: len(largest_C)]
    scaled = values_CE / used_C.clamp(min=1e-30)[:, None]
    levels = torch.tensor(NF4)
    between = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(scaled.contiguous(), between).to(torch.uint8).flatten()[: weight.numel()]
    pairs = F.pad(codes, (0, len(codes) % 2)).view(-1, 2)
    return pairs[:, 0] * 16 + pairs[:, 1], scales.flatten()[: len(largest_C)].clone(), above


@torch.library.custom_op("trainledger::dequantize", mutates_args=())
def dequantize(stored: list[Tensor], base_format: str, d_out: int, d_in: int, dtype: torch.dtype) -> Tensor:
    """The weight [d_out, d_in] that `codes_of` stored, in a format: one operation, as libraries have one kernel."""
    codes, elements = stored[0], d_out * d_in
    if base_format == "bf16":
        return codes.to(dtype, copy=True)
    if base_format == "int8":
        values_CE = _blocks(codes.float() / 127, BLOCK["int8"]) * stored[1][:, None]
    else:
        scales_C = (_blocks(stored[1].float(), SCALES_TOGETHER) * stored[2][:, None]).flatten()[: len(stored[1])]
        both = torch.stack((codes // 16, codes % 16), dim=1).flatten()[:elements]
        values_CE = _blocks(torch.tensor(NF4)[both.long()], BLOCK["nf4"]) * scales_C[:, None]
    return values_CE.flatten()[:elements].view(d_out, d_in).to(dtype)


@dequantize.register_fake
def _fake_dequantize(stored: list[Tensor], base_format: str, d_out: int, d_in: int, dtype: torch.dtype) -> Tensor:
    return stored[0].new_empty(d_out, d_in, dtype=dtype)


def _blocks(values: Tensor, size: int) -> Tensor:
    """Values in a row as blocks [C, size], the last one filled up with zeros."""
    return F.pad(values, (0, -len(values) % size)).view(-1, size)
