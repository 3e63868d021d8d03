"""Numbers that code reads off tensors, where tensors are fake."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

_READ = torch.ops.aten._local_scalar_dense.default


class ZeroWhereUnknown(TorchDispatchMode):
    """A number read off a fake tensor whose value nobody knows is 0, as ``item()`` of a norm in an optimizer.

    Where such a number scales values and decides nothing about which operations run, as inside an optimizer, that is
    right: ``trusted()`` says so. Elsewhere ``guessed()`` is told each time, and without one the read fails.
    ``results`` correct what some operators give (`cpu_results`).
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        trusted: Callable[[], bool] = lambda: True,
        guessed: Callable[[], None] | None = None,
        results: Mapping[OpOverload, Callable[[tuple[Any, ...], Any], Any]] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results or {}
        self._trusted = trusted
        self._guessed = guessed

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _READ and isinstance(args[0], FakeTensor) and args[0].constant is None:
            trusted = self._trusted()
            if not trusted and self._guessed is not None:
                self._guessed()
            if trusted or self._guessed is not None:
                return 0.0 if args[0].dtype.is_floating_point else 0
        out = func(*args, **(kwargs or {}))
        correct = self._results.get(func)
        return out if correct is None else correct(args, out)
