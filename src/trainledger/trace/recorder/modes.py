"""Modes entered by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from trainledger.trace.patches import around, replaced


@contextmanager
def dispatching(mode: TorchDispatchMode) -> Iterator[None]:
    """Inside, operations are dispatched to a mode, also while it handles one; its own ``__enter__`` is not called."""
    TorchDispatchMode.__enter__(mode)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)  # type: ignore[no-untyped-call]


@contextmanager
def also_in_backward(mode: TorchFunctionMode) -> Iterator[None]:
    """A mode that hooks, own functions and recomputation in a backward pass as well, which torch runs without it."""

    def run(before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if mode in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            return before(*args, **kwargs)
        with mode:
            return before(*args, **kwargs)

    with replaced(torch.autograd, "_engine_run_backward", around(run)), mode:
        yield
