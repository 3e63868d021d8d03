"""Low-precision copies of parameters for the time of a block, as sharded training gathers them (Zhao et al. 2023).

On one device there is nothing to gather: the copy is what FSDP2's ``MixedPrecisionPolicy(param_dtype=...)`` without
resharding after forward would leave. It is made before a block and lives until the block's backward is over; the
copy's gradient goes back to the parameter in the parameter's format.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainledger.nn.transformer import Transformer


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
        self.held: list[tuple[dict[str, Any], str, nn.Parameter]] = []
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
                self.held.append((slots, name, parameter))
        for slots, name, parameter in self.held:
            slots[name] = copies[id(parameter)]

    def _restore(self, module: nn.Module, args: Any, output: Any) -> None:
        for slots, name, parameter in self.held:
            slots[name] = parameter
        self.held.clear()
