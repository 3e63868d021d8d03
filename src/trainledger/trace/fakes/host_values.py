"""Whole numbers that a program has on its host: files that it reads, and what it computes of them, keep their values.

Loaders look for the ends of documents in their tokens, count and cut them; of that no rule for shapes knows the result.
So fake tensors of whole numbers that lie on the host carry real ones, as torch lets them (``FakeTensor.constant``),
until something unknown is written to them. Weights, activations and random numbers have no values as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._device
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from trainledger.spec.units import GIB
from trainledger.trace.patches import all_replaced, around
from trainledger.trace.recorder.tensor_facts import is_gpu

_MOST = 2**40  # elements of a file that is read
_MOST_NBYTES = 4 * GIB  # of memory that is made for a program to write to; of more the values are not known


@contextmanager
def host_values(mode: FakeTensorMode) -> Iterator[None]:
    """Inside, fake tensors of this mode have the values that their program knows on the host."""

    def converted(
        before: Callable[..., Any], converter: Any, of: Any, tensor: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if of is mode and not args and _is_plain(tensor):
            kwargs["make_constant"] = True
        return before(converter, of, tensor, *args, **kwargs)

    def made(before: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("pin_memory", None)  # which asks for a driver where there are values
        out = before(*args, **kwargs)
        of_host = not is_gpu(kwargs.get("device")) and kwargs.get("out") is None
        if of_host and type(out) is FakeTensor and out.fake_mode is mode and not _is_on_gpu(out):
            _give(mode, out)
        return out

    def from_file(before: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not mode:
            return before(*args, **kwargs)  # in a thread that loads ahead: two threads cannot work in one mode
        with _disable_current_modes():
            real = before(*args, **kwargs)
        found: Tensor = mode.fake_tensor_converter.from_real_tensor(mode, real, make_constant=True)
        return found

    torch.utils._device._device_constructors()  # remembered: `torch.device` as a context knows torch.empty by it
    with all_replaced(
        (fake_tensor, "CONSTANT_NUMEL_LIMIT", lambda _: _MOST),
        (FakeTensorConverter, "from_real_tensor", around(converted)),
        (torch, "from_file", around(from_file)),
        (torch, "empty", around(made)),
        (torch, "empty_like", around(made)),
        (torch.Tensor, "numpy", around(_as_array)),
    ):
        yield


def _is_plain(tensor: Any) -> bool:
    """Whether a real tensor is whole numbers in the memory of the host."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized)


def _is_on_gpu(tensor: Tensor) -> bool:
    """Whether it passes for a GPU's."""
    return is_gpu(tensor.device)


def _give(mode: FakeTensorMode, tensor: FakeTensor) -> None:
    """Memory of the host that a program will write to."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.layout is not torch.strided or tensor.is_meta:
        return
    nbytes = tensor.untyped_storage().nbytes()
    if nbytes > _MOST_NBYTES:
        return
    with _disable_current_modes():  # zeros, as what nobody has written should not differ from run to run
        real = torch.zeros(nbytes // tensor.element_size(), dtype=tensor.dtype)
        real = real.as_strided(tensor.shape, tensor.stride())
    converter = mode.fake_tensor_converter
    described = converter.meta_converter.describer.describe_tensor(real)
    converter.meta_converter.set_tensor_memo(described, tensor)
    if described.storage is not None:
        converter.meta_converter.set_storage_memo(described.storage, tensor.untyped_storage())
    tensor.constant = real
    converter.add_constant_storage_mapping(tensor)


def _as_array(before: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if type(tensor) is FakeTensor and tensor.constant is not None:
        with _disable_current_modes():
            return tensor.constant.numpy(*args, **kwargs)
    return before(tensor, *args, **kwargs)
