"""Which number format does the arithmetic: the formats of a recipe put into a model, and autocast around it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainledger.engine.nn.float8 import use_float8
from trainledger.engine.nn.lora import adapt
from trainledger.engine.nn.transformer import Transformer, build
from trainledger.spec.model import ModelSpec
from trainledger.spec.precision import Precision
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.recipe import Recipe

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_model(spec: ModelSpec, recipe: Recipe, *, adapted: bool = True, sharded: bool = False) -> Transformer:
    """The model of a run on torch's current default device, each parameter in the format of the recipe.

    With ``adapted`` its weights are frozen and have adapters where the recipe asks for them. Of a ``sharded`` model
    FSDP2 makes the copies in the format of the compute.

    Raises `InvalidInput` where the engine cannot train in this precision.
    """
    precision = recipe.precision
    refuse(precision, recipe)
    model = build(spec, recipe)
    hold_in(model, TORCH[precision.parameters])
    if adapted:
        adapt(model, recipe.lora)
    if precision.float8 is not None:
        use_float8(model, precision.float8)
    if precision.copies == "gathered" and not sharded:  # last: copies go into the modules that multiply
        gather_copies(model, TORCH[precision.compute])
    return model


def refuse_matmuls(precision: Precision, device: str) -> None:
    """Raise `InvalidInput` where this torch has no such matmul in 8 bits on a device."""
    rowwise = precision.float8 is not None and precision.float8.scaling == "rowwise"
    if rowwise and device == "cpu" and torch.__version__ < "2.12":
        rule = f"torch {torch.__version__} multiplies with a scale per row on GPUs only; torch 2.12 does so on CPUs too"
        nearest = precision.kind.replace("rowwise", "tensorwise")
        raise InvalidInput([Problem("recipe.precision", precision.kind, rule, nearest)])


def refuse(precision: Precision, recipe: Recipe) -> None:
    """Raise `InvalidInput` for what the ledger accounts for and the engine does not run."""
    found: list[Problem] = []
    if recipe.of_megatron:
        rule = "is accounted for; the engine trains PyTorch's modules"
        found.append(Problem("recipe.framework", recipe.framework, rule, "torch"))
    if precision.float8 is not None and precision.float8.scaling == "block":
        rule = "is accounted for, but no matmul with scales by block is built here; the engine does not train it"
        found.append(Problem("recipe.precision", precision.kind, rule, precision.kind.replace("block", "rowwise")))
    if precision.moments != precision.updated:
        rule = f"is accounted for, but torch.optim keeps its states in the format of the weights: {precision.updated}"
        found.append(Problem("recipe.precision.moment_dtype", precision.moments, rule, precision.updated))
    if recipe.compile and (precision.copies == "gathered" or precision.float8 is not None):
        rule = f"is not built for precision {precision.kind}, which puts other tensors or matmuls into the blocks"
        found.append(Problem("recipe.compile", True, rule, False))
    if precision.copies == "gathered" and recipe.loss.chunks is not None:
        rule = f"is not built for precision {precision.kind}: the head's copy is gone when its logits are made again"
        found.append(Problem("recipe.loss", recipe.loss.kind, rule, "full"))
    if found:
        raise InvalidInput(found)


def hold_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Put parameters in ``dtype`` in the place of a model's; a tied one stays tied, and buffers stay as they are."""
    changed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, each in list(module._parameters.items()):
            if each is None or each.dtype == dtype:
                continue
            if id(each) not in changed:
                changed[id(each)] = nn.Parameter(each.detach().to(dtype), requires_grad=each.requires_grad)
            module._parameters[name] = changed[id(each)]


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """The context of a forward pass: autocast where the precision has it, else nothing.

    matmuls then run in the low format; parameters, gradients, optimizer states, norms and the loss do not.
    """
    if precision.copies == "autocast":
        return torch.autocast(device.type, dtype=TORCH[precision.compute])
    return nullcontext()


def set_fp32_matmuls(precision: Precision) -> None:
    """fp32 means fp32 on every device, no TF32 in CUDA matmuls, unless the recipe says tf32."""
    torch.set_float32_matmul_precision("high" if precision.rate == "tf32" else "highest")


def gather_copies(model: Transformer, dtype: torch.dtype) -> None:
    """Let every block, and the model for what is outside of blocks, compute with copies in ``dtype``."""
    inside = {id(each) for layer in model.layers for each in layer.modules()}
    _Copies(model, [each for each in model.modules() if id(each) not in inside], dtype)
    for layer in model.layers:
        _Copies(layer, list(layer.modules()), dtype)


class _Copies:
    """Swaps the parameters of some modules for copies while one module's forward runs."""

    def __init__(self, around: nn.Module, modules: list[nn.Module], dtype: torch.dtype) -> None:
        self.modules = modules
        self.dtype = dtype
        self.swapped: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        around.register_forward_pre_hook(self._swap)
        around.register_forward_hook(self._restore, always_call=True)

    def _swap(self, module: nn.Module, args: Any) -> None:
        copies: dict[int, Tensor] = {}
        for each in self.modules:
            slots: dict[str, Any] = each._parameters
            for name, parameter in slots.items():
                if parameter is None:
                    continue
                if id(parameter) not in copies:
                    copies[id(parameter)] = parameter.to(self.dtype)
                self.swapped.append((slots, name, parameter))
        for slots, name, parameter in self.swapped:
            slots[name] = copies[id(parameter)]

    def _restore(self, module: nn.Module, args: Any, output: Any) -> None:
        for slots, name, parameter in self.swapped:
            slots[name] = parameter
        self.swapped.clear()
