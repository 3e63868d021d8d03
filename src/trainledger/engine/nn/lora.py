"""LoRA, QLoRA and DoRA: frozen linear layers, their weights in fewer bits, with trained low-rank adapters.

Hu et al. 2021 (LoRA, section 4.1); Dettmers et al. 2023 (QLoRA, section 3). Names, so that a frozen weight is
called as it was: ``weight`` (and ``bias``), ``lora_a`` [R, I] and ``lora_b`` [O, R]; of a quantized weight
``weight`` holds the codes and ``scales``, ``scales_of_scales`` the rest. ``int8``: blocks of 2048 with an fp32 scale.
``nf4``: blocks of 64 codes of 4 bits, two in a byte; their scales in 8-bit floats, of which 256 share an fp32 scale.
``bf16``: no codes at all.

Shapes: I input width, O output width, R rank; E elements of a weight in a row, C blocks of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainledger.engine.nn.feed_forward import ExpertStack
from trainledger.engine.nn.norm import compute_dtype
from trainledger.spec.savings import Lora, is_linear, is_target

BLOCK = {"int8": 2048, "nf4": 64}
SCALES_TOGETHER = 256
LARGEST_SCALE = 448.0  # of e4m3

# The 16 values of NormalFloat4: quantiles of a normal cut to [-1, 1], zero among them (QLoRA, appendix E).
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def codes_of(weight: Tensor, base_format: str | None) -> tuple[Tensor, ...]:
    """A stored weight: itself in bf16, or codes and scales."""
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
    levels = torch.tensor(NF4, device=weight.device)
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
        levels = torch.tensor(NF4, device=codes.device)
        values_CE = _blocks(levels[both.long()], BLOCK["nf4"]) * scales_C[:, None]
    # Of blocks that are filled up a copy, not a view that keeps them.
    return values_CE.flatten()[:elements].view(d_out, d_in).to(dtype, copy=values_CE.numel() > elements)


@dequantize.register_fake
def _fake_dequantize(stored: list[Tensor], base_format: str, d_out: int, d_in: int, dtype: torch.dtype) -> Tensor:
    return stored[0].new_empty(d_out, d_in, dtype=dtype)


def _blocks(values: Tensor, size: int) -> Tensor:
    """Values in a row as blocks [C, size], the last one filled up with zeros."""
    return F.pad(values, (0, -len(values) % size)).view(-1, size)


class AdaptedLinear(nn.Module):
    """A frozen linear layer, plus dropout(x) A^T B^T times alpha / R; without an adapter only frozen."""

    def __init__(self, frozen: nn.Linear, lora: Lora, *, adapted: bool) -> None:
        super().__init__()
        self.shape, self.dtype = frozen.weight.shape, frozen.weight.dtype
        self.base_format = lora.base_format
        self.weight = nn.Parameter(frozen.weight.detach(), requires_grad=False)
        self.scales: nn.Parameter | None = None
        self.scales_of_scales: nn.Parameter | None = None
        bias = frozen.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        if self.base_format is not None:
            codes, *scales = (
                nn.Parameter(part, requires_grad=False) for part in codes_of(self.weight, self.base_format)
            )
            self.weight = codes
            if scales:
                self.scales = scales[0]
            if scales[1:]:
                self.scales_of_scales = scales[1]
        self.dropout = lora.dropout
        self.off = False
        self.lora_a: nn.Parameter | None = None
        self.lora_b: nn.Parameter | None = None
        if adapted:
            self.scale = lora.alpha / lora.rank
            options: dict[str, Any] = {"dtype": frozen.weight.dtype, "device": frozen.weight.device}
            self.lora_a = nn.Parameter(torch.empty(lora.rank, self.shape[1], **options))
            self.lora_b = nn.Parameter(torch.zeros(self.shape[0], lora.rank, **options))
        self.lora_magnitude: nn.Parameter | None = None
        if adapted and lora.dora:
            self.lora_magnitude = nn.Parameter(self._norms(frozen.weight.detach()))

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        x = x.to(compute_dtype(x))
        if self.base_format is None:
            y = F.linear(x, self.weight, self.bias)
        else:
            y = _Frozen.apply(x, self)  # type: ignore[no-untyped-call]
        if self.lora_a is None or self.lora_b is None or self.off:
            return y
        z = torch.native_dropout(x, self.dropout, True)[0] if self.training and self.dropout else x
        if self.lora_magnitude is not None:
            dtype, stored = self.lora_a.dtype, self.base_format is not None
            weight = (lambda: self.wide(dtype)) if stored else (lambda: self.weight.to(dtype))
            parts = (self.lora_a, self.lora_b, self.lora_magnitude)
            return (y + magnified(z, y, weight, self.bias, *parts, self.scale, dropped=z is not x)).to(y.dtype)
        return y + F.linear(F.linear(z, self.lora_a), self.lora_b) * self.scale

    def wide(self, dtype: torch.dtype) -> Tensor:
        """The frozen weight [O, I] as numbers of a format."""
        d_out, d_in = self.shape
        assert self.base_format is not None
        stored = [parameter for parameter in (self.weight, self.scales, self.scales_of_scales) if parameter is not None]
        weight: Tensor = dequantize(stored, self.base_format, d_out, d_in, dtype)
        return weight

    def store(self, whole: Tensor, put: Callable[[nn.Parameter, Tensor], object]) -> None:
        """Write a weight [O, I] as it is stored; ``put`` writes a tensor into a parameter."""
        whole = whole.to(self.dtype)
        codes = (whole,) if self.base_format is None else codes_of(whole, self.base_format)
        for parameter, values in zip((self.weight, self.scales, self.scales_of_scales), codes, strict=False):
            assert parameter is not None
            put(parameter, values)
        if self.lora_magnitude is not None:
            put(self.lora_magnitude, self._norms(whole))

    def _norms(self, whole: Tensor) -> Tensor:
        """The norms of the rows of a weight [O, I] as it is stored: the magnitudes that DoRA begins with."""
        if self.base_format is not None and not whole.is_meta:
            whole = dequantize(list(codes_of(whole, self.base_format)), self.base_format, *self.shape, whole.dtype)
        return row_norms(whole)

    def merged(self) -> Tensor:
        """The weight [O, I] that does alone what weight and adapter do together, in fp32."""
        with torch.no_grad():
            whole = self.weight.float() if self.base_format is None else self.wide(torch.float32)
            if self.lora_a is None or self.lora_b is None:
                return whole
            whole = whole + self.scale * (self.lora_b.float() @ self.lora_a.float())
            if self.lora_magnitude is None:
                return whole
            scaled: Tensor = whole * (self.lora_magnitude / row_norms(whole))[:, None]
            return scaled


def row_norms(matrix: Tensor) -> Tensor:
    """The norm of each row."""
    norms: Tensor = torch.linalg.vector_norm(matrix, dim=1)
    return norms


# Operation by operation as PEFT 0.21 (tuners/lora/dora.py): the identity goes through both factors, and what the norm
# is taken of lives until the output is there. The norm gets no gradient (Liu et al. 2024, section 4.3).
def magnified(
    z: Tensor,
    y: Tensor,
    wide: Callable[[], Tensor],
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    magnitude: Tensor,
    scale: float,
    *,
    dropped: bool,
    norms_of: Callable[[Tensor], Tensor] = row_norms,
) -> Tensor:
    """What DoRA adds to a frozen layer's output y [..., O] of an input z [..., I]; ``wide`` is its weight [O, I]."""
    eye = torch.eye(a.shape[1], dtype=a.dtype, device=a.device)
    low = F.linear(eye, a.detach())
    delta = F.linear(low, b.detach()).to(a.dtype).T
    matrix = wide()
    factor = (magnitude / norms_of(matrix + delta * scale)).view(1, -1)
    result = F.linear(F.linear(z, a), b)
    if dropped:
        y = F.linear(z, matrix)
    elif bias is not None:
        y = y - bias
    added: Tensor = (factor - 1) * y + factor * result * scale
    return added


class _Frozen(torch.autograd.Function):
    """The matmul with a weight that is made wide for forward and again for backward, and never kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: AdaptedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.wide(x.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.layer.wide(gradient.dtype), None


def adapt(model: nn.Module, lora: Lora | None) -> None:
    """Freeze a model in place and add adapters to the linear layers that LoRA targets; nothing without it.

    ``lora_b`` is zero, so that the model computes what it did; ``lora_a`` is not yet drawn (`init.draw`).
    """
    if lora is None:
        return
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name in lora.whole or ():
        model.get_submodule(name).requires_grad_(True)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and is_linear(f"{path}.weight"):
            name = path.rpartition(".")[2]
            parent = model.get_submodule(path.rpartition(".")[0])
            setattr(parent, name, AdaptedLinear(module, lora, adapted=is_target(f"{path}.weight", lora.targets)))
        elif isinstance(module, ExpertStack) and lora.of_experts is not None:
            module.adapt(lora)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, a model's linear layers and experts are the frozen ones alone."""
    layers = [module for module in model.modules() if isinstance(module, AdaptedLinear | ExpertStack)]
    for layer in layers:
        layer.off = True
    try:
        yield
    finally:
        for layer in layers:
            layer.off = False


def merge(model: nn.Module) -> None:
    """Put plain linear layers with the merged weights in the place of all that are adapted, and add to experts' weights
    what their adapters do, in place."""
    for path, module in list(model.named_modules()):
        if isinstance(module, AdaptedLinear):
            plain = nn.Linear(module.shape[1], module.shape[0], bias=module.bias is not None)
            with torch.no_grad():
                plain.weight.copy_(module.merged())
                if module.bias is not None:
                    plain.bias.copy_(module.bias)
            setattr(model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], plain)
        elif isinstance(module, ExpertStack):
            module.merge()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
