"""Values that a program reads off fake tensors, which are assumed: 0 where nothing else is known."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trainledger.trace.fakes.results import added_to_dense
from trainledger.trace.loss import DECISIONS, number_for_lbfgs
from trainledger.trace.patches import Args, Kwargs, all_replaced, around
from trainledger.trace.recorder.source_lines import OURS, TORCH, Lines, Refused, callers
from trainledger.trace.recorder.storages import tensors_in

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
        results: Mapping[OpOverload, Callable[[Args, Any], Any]] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = {**DECISIONS, **(results or {})}
        self._trusted = trusted
        self._assumed = assumed

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if func is _READ and isinstance(args[0], FakeTensor) and args[0].constant is None:
            trusted = self._trusted()
            loss = number_for_lbfgs() if trusted else None
            if loss is not None:
                return loss
            if self._assumed is not None and not (trusted and _only_scales(args[0])):
                self._assumed()
            if trusted or self._assumed is not None:
                return 0.0 if args[0].dtype.is_floating_point else 0
        if func is _EQUAL and any(isinstance(argument, FakeTensor) for argument in args):
            return self._are_equal(*args)
        out = added_to_dense(func, args)
        if out is None:
            out = func(*args, **(kwargs or {}))
        if func in _MADE_OF and isinstance(out, FakeTensor) and out.dim() == 0 and (self._trusted() or _is_whole(out)):
            return _known(out, _MADE_OF[func](args))
        correct = self._results.get(func)
        return out if correct is None else correct(args, out)

    def _are_equal(self, one: Any, other: Any) -> bool:
        # Whether two tensors are equal: assumed not, where their shapes are.
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
    for frame in callers():
        file = frame.f_code.co_filename
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


# ``data[i : i + 64]`` for each i of a tensor of random places would be empty: with i, i + 64 would be read as 0. So a
# whole number that is picked one by one is 0 and known, and i + 64 is 64. Where a batch is empty all the same, it is
# refused: an account of no tokens would be silently wrong.
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_READ = torch.ops.aten._local_scalar_dense.default
_PICKS = (torch.ops.aten.unbind.int, torch.ops.aten.select.int)
_SLICE, _EMBEDDING = torch.ops.aten.slice.Tensor, torch.ops.aten.embedding.default


def zero_where_picked(func: OpOverload, out: Any, guessed: Callable[[], None]) -> None:
    """Give whole numbers that an operation picks one by one the value 0; ``guessed`` is called for each."""
    if func not in _PICKS:
        return
    for tensor in tensors_in(out):
        if tensor.dim() or tensor.dtype not in _WHOLE or not isinstance(tensor, FakeTensor):
            return
        if tensor.constant is None:
            guessed()
            with _disable_current_modes():
                tensor.constant = torch.zeros((), dtype=tensor.dtype)


class EmptyBatches:
    """Refuses batches of nothing that come of values which were assumed; ``line`` is the one that runs now."""

    def __init__(self, line: Callable[[], str]) -> None:
        self._line = line
        self._emptied = ""  # the last line that a slice came out empty at

    def ran(self, func: OpOverload, args: Args, out: Any) -> None:
        """An operation has run."""
        if func is _SLICE and not out.numel() and args[0].numel():
            self._emptied = self._line()
        elif func is _EMBEDDING and not args[1].numel():
            self.refuse([args[1]])

    def refuse(self, inputs: list[Tensor]) -> None:
        """Raise Refused where the inputs of a model have an empty one, if a slice of the program's was empty before."""
        if self._emptied and any(isinstance(tensor, FakeTensor) and not tensor.numel() for tensor in inputs):
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

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if func is _READ and args[0].dtype == torch.bool and args[0].constant is None:
            self._decided()
        out = func(*args, **(kwargs or {}))
        zero_where_picked(func, out, self._guessed)
        self._empty.ran(func, args, out)
        return out


@contextmanager
def numbers_shown() -> Iterator[None]:
    """Inside, what is written of a fake tensor is what would be written of one whose unknown values are 0."""
    with all_replaced(
        (torch.Tensor, "__format__", around(_formatted)),
        (torch.Tensor, "__repr__", around(_printed)),
        (torch.Tensor, "__round__", around(_rounded)),  # not in every version of torch
        (torch.Tensor, "numpy", around(_as_array)),
        (torch.Tensor, "__array__", around(_as_array)),
    ):
        yield


def _is_number(tensor: Any) -> bool:
    return _is_traced(tensor) and not tensor.dim()


def _is_traced(tensor: Any) -> TypeGuard[FakeTensor]:
    # A fake tensor with sizes that may be symbols is a compiler's
    return type(tensor) is FakeTensor and tensor.fake_mode.shape_env is None


def _of_real(function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """What a function gives of a real tensor of the number that is read off a fake one."""
    number = tensor.item()
    with _disable_current_modes():
        return function(torch.tensor(number, dtype=tensor.dtype), *args, **kwargs)


def _formatted(before: Callable[..., str], tensor: Tensor, form: str) -> str:
    return format(tensor.item(), form) if _is_number(tensor) else before(tensor, form)


def _rounded(before: Callable[..., Any], tensor: Tensor, *digits: int) -> Any:
    return round(tensor.item(), *digits) if _is_number(tensor) else before(tensor, *digits)


def _printed(before: Callable[..., str], tensor: Tensor, *args: Any, **kwargs: Any) -> str:
    """A number as torch prints one; of any other its shape and format, as it has no values."""
    if not _is_traced(tensor) or tensor.fake_mode.in_kernel_invocation:  # torch's, while it works out a shape
        return before(tensor, *args, **kwargs)
    if not tensor.dim():
        return str(_of_real(before, tensor, *args, **kwargs))
    dtype = "" if tensor.dtype in (torch.float32, torch.int64, torch.bool) else f", dtype={tensor.dtype}"
    return f"tensor(..., size={tuple(tensor.shape)}{dtype})"


def _as_array(before: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if _is_traced(tensor):
        if not tensor.dim():
            return _of_real(before, tensor, *args, **kwargs)
        raise Refused(
            "a numpy array needs values, which fake tensors do not have; annotate without --fake runs on real ones"
        )
    return before(tensor, *args, **kwargs)
