"""LoRA and QLoRA: frozen linear layers with low-rank adapters that learn beside them.

Hu et al. 2021 (LoRA, section 4.1); Dettmers et al. 2023 (QLoRA, section 3). Names, so that a frozen weight is
called as it was: ``weight`` (and ``bias``), ``lora_a`` [R, I] and ``lora_b`` [O, R]; of a quantized weight
``weight`` holds the codes and ``scales``, ``scales_of_scales`` the rest.

Shapes: I input width, O output width, R rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainledger.nn.compute_dtype import compute_dtype
from trainledger.nn.init import fill
from trainledger.nn.quantized import codes_of, dequantize
from trainledger.spec.lora import is_linear, is_target
from trainledger.spec.recipe import Recipe


class AdaptedLinear(nn.Module):
    """A frozen linear layer, plus dropout(x) A^T B^T times alpha / R; without an adapter only frozen."""

    def __init__(self, frozen: nn.Linear, recipe: Recipe, *, adapted: bool) -> None:
        super().__init__()
        self.shape = frozen.weight.shape
        self.base_format = recipe.base_format
        self.weight = nn.Parameter(frozen.weight.detach(), requires_grad=False)
        self.scales: nn.Parameter | None = None
        self.scales_of_scales: nn.Parameter | None = None
        bias = frozen.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        if self.base_format is not None:
            self._store()
        self.dropout = recipe.lora_dropout
        self.lora_a: nn.Parameter | None = None
        self.lora_b: nn.Parameter | None = None
        if adapted:
            assert recipe.lora_rank is not None
            self.scale = recipe.lora_alpha / recipe.lora_rank
            options: dict[str, Any] = {"dtype": frozen.weight.dtype, "device": frozen.weight.device}
            self.lora_a = nn.Parameter(torch.empty(recipe.lora_rank, self.shape[1], **options))
            self.lora_b = nn.Parameter(torch.zeros(self.shape[0], recipe.lora_rank, **options))

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        x = x.to(compute_dtype(x))
        if self.base_format is None:
            y = F.linear(x, self.weight, self.bias)
        else:
            y = _Frozen.apply(x, self)  # type: ignore[no-untyped-call]
        if self.lora_a is None or self.lora_b is None:
            return y
        z = torch.native_dropout(x, self.dropout, True)[0] if self.training and self.dropout else x
        return y + F.linear(F.linear(z, self.lora_a), self.lora_b) * self.scale

    def wide(self, dtype: torch.dtype) -> Tensor:
        """The frozen weight [O, I] as numbers of a format."""
        d_out, d_in = self.shape
        assert self.base_format is not None
        weight: Tensor = dequantize(list(self._stored()), self.base_format, d_out, d_in, dtype)
        return weight

    def refill(self, weight: Tensor) -> None:
        """Put another frozen weight [O, I] in place, stored as the one before it."""
        with torch.no_grad():
            parts = codes_of(weight, self.base_format) if self.base_format is not None else (weight,)
            for own, new in zip(self._stored(), parts, strict=True):
                own.copy_(new)

    def merged(self) -> Tensor:
        """The weight [O, I] that does alone what weight and adapter do together, in fp32."""
        with torch.no_grad():
            whole = self.weight.float() if self.base_format is None else self.wide(torch.float32)
            if self.lora_a is None or self.lora_b is None:
                return whole
            return whole + self.scale * (self.lora_b.float() @ self.lora_a.float())

    def _store(self) -> None:
        codes, *scales = (nn.Parameter(each, requires_grad=False) for each in codes_of(self.weight, self.base_format))
        self.weight = codes
        if scales:
            self.scales = scales[0]
        if scales[1:]:
            self.scales_of_scales = scales[1]

    def _stored(self) -> tuple[Tensor, ...]:
        parts = (self.weight, self.scales, self.scales_of_scales)
        return tuple(each for each in parts if each is not None)


class _Frozen(torch.autograd.Function):
    """The product with a weight that is made wide for forward and again for backward, and never kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: AdaptedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.wide(x.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.layer.wide(gradient.dtype), None


def adapt(model: nn.Module, recipe: Recipe) -> None:
    """Freeze a model in place and put adapters beside the linear layers that the recipe names; nothing without a rank.

    ``lora_b`` is zero, so that the model computes what it did; ``lora_a`` is not yet drawn (`draw`).
    """
    if recipe.lora_rank is None:
        return
    for each in model.parameters():
        each.requires_grad_(False)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and is_linear(f"{path}.weight"):
            name = path.rpartition(".")[2]
            parent = model.get_submodule(path.rpartition(".")[0])
            setattr(
                parent, name, AdaptedLinear(module, recipe, adapted=is_target(f"{path}.weight", recipe.lora_targets))
            )


def draw(model: nn.Module, *, seed: int) -> None:
    """Give every ``lora_a`` deviation 1 / sqrt(I), so that unit input gives unit output, and every ``lora_b`` zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if name.endswith(".lora_a"):
                fill(each, 1 / math.sqrt(each.shape[1]), generator)
            elif name.endswith(".lora_b"):
                each.zero_()


def merge(model: nn.Module) -> None:
    """Put plain linear layers with the merged weights in the place of all that are adapted, in place."""
    for path, module in list(model.named_modules()):
        if isinstance(module, AdaptedLinear):
            plain = nn.Linear(module.shape[1], module.shape[0], bias=module.bias is not None)
            with torch.no_grad():
                plain.weight.copy_(module.merged())
                if module.bias is not None:
                    plain.bias.copy_(module.bias)
            setattr(model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], plain)
    for each in model.parameters():
        each.requires_grad_(True)
