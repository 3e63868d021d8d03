"""Whole numbers that a program picks from tensors of unknown values, as places in its data, and what must not follow.

``data[i : i + 64]`` for each i of a tensor of random places would be empty: with i, i + 64 would be read as 0. So the
number that is picked is 0 and known, and i + 64 is 64. Where a batch is empty all the same, it is refused: an account
of no tokens would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trainledger.trace.fakes.refused import Refused
from trainledger.trace.recorder.tensor_facts import tensors_in

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_READ = torch.ops.aten._local_scalar_dense.default
_PICKS = (torch.ops.aten.unbind.int, torch.ops.aten.select.int)
_SLICE, _EMBEDDING = torch.ops.aten.slice.Tensor, torch.ops.aten.embedding.default


def zero_where_picked(func: OpOverload, out: Any, guessed: Callable[[], None]) -> None:
    """Give whole numbers that an operation picks one by one the value 0; ``guessed`` is called for each."""
    if func not in _PICKS:
        return
    for each in tensors_in(out):
        if each.dim() or each.dtype not in _WHOLE or not isinstance(each, FakeTensor):
            return
        if each.constant is None:
            guessed()
            with _disable_current_modes():
                each.constant = torch.zeros((), dtype=each.dtype)


class EmptyBatches:
    """Refuses batches of nothing that come of values which were assumed; ``line`` is the one that runs now."""

    def __init__(self, line: Callable[[], str]) -> None:
        self._line = line
        self._emptied = ""  # the last line that a slice came out empty at

    def ran(self, func: OpOverload, args: tuple[Any, ...], out: Any) -> None:
        """An operation has run."""
        if func is _SLICE and not out.numel() and args[0].numel():
            self._emptied = self._line()
        elif func is _EMBEDDING and not args[1].numel():
            self.refuse([args[1]])

    def refuse(self, inputs: list[Tensor]) -> None:
        """Raise Refused where the inputs of a model have an empty one, if a slice of the program's was empty before."""
        if self._emptied and any(isinstance(each, FakeTensor) and not each.numel() for each in inputs):
            raise Refused(
                f"the batch is empty: the slice at {self._emptied} begins and ends at values that fake tensors do not "
                "have, and both are assumed to be 0; give the slice its length, as in data[i : i + T]"
            )


class ZeroIndices(TorchDispatchMode):
    """Whole numbers that are picked are 0 and known; ``decided`` is called at each condition on an unknown value."""

    supports_higher_order_operators = True

    def __init__(self, guessed: Callable[[], None], decided: Callable[[], None], empty: EmptyBatches) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._guessed, self._decided, self._empty = guessed, decided, empty

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _READ and args[0].dtype == torch.bool and args[0].constant is None:
            self._decided()
        out = func(*args, **(kwargs or {}))
        zero_where_picked(func, out, self._guessed)
        self._empty.ran(func, args, out)
        return out
