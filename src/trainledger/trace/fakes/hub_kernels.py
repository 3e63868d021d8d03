"""Kernels that programs fetch from a hub (Hugging Face's ``kernels``): on fake tensors those that are known.

Nothing is fetched: what a hub gives is compiled code for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from trainledger.trace.fakes.refused import Refused
from trainledger.trace.patches import after_import, all_replaced

_KNOWN = ("flash_attn_func", "flash_attn_varlen_func")
_ATTENTION = "flash-att"  # of the repository: flash-attn3, flash-attention-3


class _Kernels:
    """A package of a hub: functions that are known, and for any other a function that says so when it is called."""

    def __init__(self, repository: str, note: Callable[[str], object], name: str = "") -> None:
        self._repository, self._note, self._name = repository, note, name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _KNOWN and _ATTENTION in self._repository:
            from trainledger.trace.fakes import flash_attention  # registers operators, which few programs need

            self._note(
                f"{name} of {self._repository} is not fetched: its FLOPs are those of the longest sequence or window, "
                "an upper bound"
            )
            return getattr(flash_attention, name)
        return _Kernels(self._repository, self._note, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise Refused(
            f"{self._name or 'a kernel'} of {self._repository} is compiled code that a hub gives for a GPU, and its "
            "results are not known; let the program take another implementation"
        )


@contextmanager
def hub_kernels_followed(note: Callable[[str], object]) -> Iterator[None]:
    """Inside, ``kernels.get_kernel`` fetches nothing."""
    with ExitStack() as stack:

        def loaded(module: ModuleType) -> None:
            def get_kernel(repository: str, *args: Any, **options: Any) -> Any:
                return _Kernels(repository, note)

            stack.enter_context(all_replaced((module, "get_kernel", lambda _: get_kernel)))

        stack.enter_context(after_import("kernels", loaded))
        yield
