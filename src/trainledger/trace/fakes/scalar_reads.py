"""Values that code reads off fake tensors, which are assumed: 0 where nothing else is known."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainledger.trace.fakes.results import added_to_dense
from trainledger.trace.optimizers import DECISIONS, number_for_lbfgs
from trainledger.trace.recorder.source_lines import OURS, TORCH, Lines, callers

_READ = torch.ops.aten._local_scalar_dense.default
_EQUAL = torch.ops.aten.equal.default
_OPTIMIZERS = os.path.join(TORCH, "optim", "")
# Operators that make a tensor of one number, and that number.
_MADE_OF: dict[OpOverload, Callable[[tuple[Any, ...]], Any]] = {
    torch.ops.aten.zeros.default: lambda args: 0,
    torch.ops.aten.ones.default: lambda args: 1,
    torch.ops.aten.full.default: lambda args: args[1],
    torch.ops.aten.scalar_tensor.default: lambda args: args[0],
}


class ZeroWhereUnknown(TorchDispatchMode):
    """A number read off a fake tensor is 0 where its value is unknown, such as ``item()`` of a norm in an optimizer.

    Where such a number only scales values and does not decide which operations run, that is exact. ``trusted()`` says
    where: inside an optimizer. In torch's own optimizers it is true of all numbers, since those that decide (the step
    count, ASGD's ``mu``) are known: tensors of a single number that are made where it is trusted keep their value, and
    those of a whole number anywhere.
    A truth value always decides, and what other optimizers do with a number is not known. There, and where nothing is
    trusted, ``assumed()`` is called each time; where nothing is trusted and without it, the read fails. ``results``
    correct what some operators give (`results`). L-BFGS decides by losses and slopes, and reads those of a descent that
    continues (`optimizers`).
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        trusted: Callable[[], bool] = lambda: True,
        assumed: Callable[[], None] | None = None,
        results: Mapping[OpOverload, Callable[[tuple[Any, ...], Any], Any]] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = {**DECISIONS, **(results or {})}
        self._trusted = trusted
        self._assumed = assumed

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _READ and isinstance(args[0], FakeTensor) and args[0].constant is None:
            trusted = self._trusted()
            loss = number_for_lbfgs() if trusted else None
            if loss is not None:
                return loss
            if self._assumed is not None and not (trusted and _only_scales(args[0])):
                self._assumed()
            if trusted or self._assumed is not None:
                return 0.0 if args[0].dtype.is_floating_point else 0
        if func is _EQUAL and any(isinstance(each, FakeTensor) for each in args):
            return self._are_equal(*args)
        out = added_to_dense(func, args)
        if out is None:
            out = func(*args, **(kwargs or {}))
        if func in _MADE_OF and isinstance(out, FakeTensor) and out.dim() == 0 and (self._trusted() or _is_whole(out)):
            return _known(out, _MADE_OF[func](args))
        correct = self._results.get(func)
        return out if correct is None else correct(args, out)

    def _are_equal(self, one: Any, other: Any) -> bool:
        """Whether two tensors are equal: assumed not, where their shapes are."""
        if one.shape != other.shape:
            return False
        if self._assumed is None:
            return bool(_EQUAL(one, other))
        self._assumed()
        return False


def _known(made: FakeTensor, number: Any) -> torch.Tensor:
    """A tensor of a known number instead of one whose number is unknown."""
    if not isinstance(number, (bool, int, float)) or made.fake_device.type != "cpu":
        return made
    return torch.tensor(number, dtype=made.dtype)


def _is_whole(tensor: FakeTensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _only_scales(tensor: FakeTensor) -> bool:
    """Whether an optimizer of torch's own reads a number that is no truth value."""
    if tensor.dtype is torch.bool:
        return False
    for each in callers():
        file = each.f_code.co_filename
        if file.startswith(_OPTIMIZERS):
            return True
        if not file.startswith((TORCH, OURS)):
            return False
    return True


class AssumedValues:
    """Counts, by the user's line, values that were assumed to be 0.

    More than ``most`` at one line raise RuntimeError: a loop that waits for a value would never end.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._counts: Counter[str] = Counter()
        self._lines = Lines()

    def add(self) -> None:
        """One more, at the line that runs now."""
        line = self.line()
        self._counts[line] += 1
        if self._most is not None and self._counts[line] > self._most:
            raise RuntimeError(f"{line} has read more than {self._most:,} unknown values")

    def line(self) -> str:
        """The line that runs now, in words where it is none of the user's."""
        return self._lines.here() or "a line that is not yours"

    def clear(self) -> None:
        """Forget all counts."""
        self._counts.clear()

    def notes(self) -> Iterator[str]:
        """A sentence for each line."""
        for line, count in self._counts.items():
            values, are = ("value", "is") if count == 1 else ("values", "are")
            unknown = f"{count} {values} read at {line} {are} unknown and assumed to be 0"
            yield f"{unknown}: code that depends on it may take another path"
