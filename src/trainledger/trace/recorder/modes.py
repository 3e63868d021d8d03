"""Dispatch modes entered by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def dispatching(mode: TorchDispatchMode) -> Iterator[None]:
    """Inside, operations are dispatched to a mode, also while it handles one; its own ``__enter__`` is not called."""
    TorchDispatchMode.__enter__(mode)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)  # type: ignore[no-untyped-call]
