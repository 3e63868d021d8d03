"""Fake tensors formatted, printed and rounded: a single number is the number that it is read as, as a real one is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from trainledger.trace.fakes.refused import Refused
from trainledger.trace.patches import all_replaced, around


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
    return type(tensor) is FakeTensor and not tensor.dim()


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
    if type(tensor) is not FakeTensor or tensor.fake_mode.in_kernel_invocation:  # torch's, while it works out a shape
        return before(tensor, *args, **kwargs)
    if not tensor.dim():
        return str(_of_real(before, tensor, *args, **kwargs))
    dtype = "" if tensor.dtype in (torch.float32, torch.int64, torch.bool) else f", dtype={tensor.dtype}"
    return f"tensor(..., size={tuple(tensor.shape)}{dtype})"


def _as_array(before: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if type(tensor) is FakeTensor:
        if not tensor.dim():
            return _of_real(before, tensor, *args, **kwargs)
        raise Refused("a numpy array needs values, which fake tensors do not have; run without --fake")
    return before(tensor, *args, **kwargs)
