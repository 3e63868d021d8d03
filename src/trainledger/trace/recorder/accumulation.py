"""Where autograd adds a gradient into another's memory, which it does not do while dispatch is watched.

Where a tensor was used twice, the engine adds up the gradients that come back: into the older one if no one else refers
to it, else into new memory (torch/csrc/autograd/input_buffer.cpp). Under a dispatch mode, and for fake tensors, it
always takes new memory. From the reference counts of the older one the recorder knows what happens without it.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

_ADD = torch.ops.aten.add.Tensor


def added_into(func: OpOverload, args: tuple[Any, ...]) -> Tensor | None:
    """The gradient whose memory takes the sum, where this operation is the engine's and no one else refers to it.

    To be asked by a ``__torch_dispatch__`` before it runs the operation.
    """
    if func is not _ADD or len(args) != 2 or torch.is_grad_enabled():
        return None
    older, newer = args
    if not (isinstance(older, Tensor) and isinstance(newer, Tensor)) or older.shape != newer.shape:
        return None
    if torch._C._current_autograd_node() is None or not engine_calls(sys._getframe(1)):
        return None
    sole = alone()
    if sole is None or _references(older) != sole or older.dtype != newer.dtype or not _is_dense(older):
        return None
    return older


def engine_calls(frame: Any) -> bool:
    """Whether the engine itself called: no Python of a backward or of a hook stands between."""
    while frame is not None and _is_dispatch(frame.f_code):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name in ("_engine_run_backward", "backward")


_DISPATCH = ("__torch_dispatch__", "_dispatched", "_record", "of_operation", "_is_recomputation")


def _is_dispatch(code: Any) -> bool:
    """Whether this is a dispatch mode's own code, or what torch wraps it in."""
    return bool(code.co_name in _DISPATCH or code.co_filename.endswith(("_dynamo/eval_frame.py", "_compile.py")))


def _references(tensor: Tensor) -> tuple[int, int]:
    """References to a tensor and to its memory, as `alone` counts them."""
    storage = tensor.untyped_storage()._cdata
    return tensor._use_count(), torch._C._storage_Use_Count(storage)  # type: ignore[attr-defined]


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill its memory without a gap, in any order of its dims."""
    dims = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    step = 1
    for stride, size in dims:
        if size == 1:
            continue
        if stride != step:
            return False
        step *= size
    return True


@cache
def alone() -> tuple[int, int] | None:
    """The `_references` to a gradient that only the engine has; None in a torch that does not count them.

    To be asked for the first time outside of any dispatch, as it runs a backward of its own.
    """
    if not hasattr(Tensor, "_use_count") or not hasattr(torch._C, "_storage_Use_Count"):
        return None
    found: list[tuple[int, int]] = []

    class Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _ADD and torch._C._current_autograd_node() is not None:
                found.append(_references(args[0]))
            return func(*args, **(kwargs or {}))

    with _disable_current_modes(), torch.enable_grad():
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        with Look():  # type: ignore[no-untyped-call]
            (y.exp() * y.sin()).sum().backward()  # type: ignore[no-untyped-call]
    return found[0] if found else None
