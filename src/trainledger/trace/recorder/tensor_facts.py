"""What a recorder asks of tensors: those in arguments, their format's name, the bytes an operator reads and writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
DTYPE_NAMES |= {torch.int64: "int64", torch.int32: "int32", torch.uint8: "uint8", torch.int8: "int8"}
DTYPE_NAMES |= {torch.bool: "bool"}
DTYPE_NAMES |= {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of an argument or a result, looking into lists, tuples and dicts; of a sparse one, its parts."""
    if isinstance(value, Tensor):
        return [value] if value.layout is torch.strided else _parts(value)
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in tensors_in(each)]
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in tensors_in(each)]
    return []


def _parts(tensor: Tensor) -> list[Tensor]:
    """The tensors with the memory of one that has none of its own; none of an opaque one."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout is torch.jagged:
        return [tensor._values, tensor._offsets]  # type: ignore[attr-defined, list-item]
    return []


def is_followed(tensor: Tensor) -> bool:
    """Whether the parts of a sparse tensor are known: of a fake one, torch may not know how many there are."""
    return tensor.layout is torch.sparse_coo and tensor._values().shape[0] > 0


def has_no_memory(value: Any) -> bool:
    """Whether a tensor is on the meta device, as models are built there to count their parameters."""
    if isinstance(value, FakeTensor):
        return value.fake_device.type == "meta"
    return isinstance(value, Tensor) and value.is_meta


def dtype_name(dtype: torch.dtype) -> str:
    """The field's name of a torch dtype (``fp32``); torch's own where it has none."""
    return DTYPE_NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def arithmetic_dtype(first: Tensor, kind: str) -> str:
    """The format in which an operation computes, by its first operand (empty: one without a name).

    fp32 matmuls of a GPU are in TF32 where ``torch.set_float32_matmul_precision`` allows it.
    """
    if first.dtype == torch.float32 and kind in ("matmul", "attention") and first.is_cuda:
        return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return DTYPE_NAMES.get(first.dtype, "")


def is_gpu(device: Any) -> bool:
    """Whether what a program names as a device is a GPU.

    >>> is_gpu("cuda:1"), is_gpu(0), is_gpu("cpu"), is_gpu(torch.device("cuda"))
    (True, True, False, True)
    """
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def touched_nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements, those of a broadcast dim counted once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            elements *= size
    return elements * tensor.element_size()


def written_arguments(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes in place, by its schema."""
    written = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "grads":  # fused optimizers write gradients only where a loss scale is removed
            continue
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written.extend(tensors_in(value))
    return written
