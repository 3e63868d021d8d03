"""Results of kernels that torch's rules for shapes do not give, for fake tensors.

They have other dtypes or more memory, or are sparse gradients: [rows] indices and [rows, width] values. How many rows
are left where entries of a row are added up depends on values: all are assumed to stay, which is the most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainledger.spec.units import round_up
from trainledger.trace.patches import Args

aten = torch.ops.aten
_HALVES = (torch.bfloat16, torch.float16)
Correct = Callable[[Args, Any], Any]  # from an operator's arguments and fake result, the real one's form
NOTES = {
    "_coalesce": "a sparse gradient is assumed to keep all its rows where entries of the same row are added up, which "
    "is the most"
}
_BY_NUMBER = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.pow.Tensor_Scalar)
_BY_VALUE = (*_BY_NUMBER, aten.sqrt.default, aten.neg.default)


def _statistics_in_fp32(args: Args, out: Any) -> Any:
    # Mean and deviation are as exact as the sums they come from (ATen/native/cuda/layer_norm_kernel.cu).
    return (out[0], *(each.to(torch.float32) if each.dtype in _HALVES else each for each in out[1:]))


def _norm(args: Args, out: Any) -> Any:
    # Statistics of half-precision values by fp32 weights are fp32: under autocast on a CPU both occur.
    first = 2 if len(args) > 2 and isinstance(args[1], (list, tuple)) else 1  # layer_norm has the shape before weights
    weights = [argument for argument in args[first : first + 2] if argument is not None]
    mixed = args[0].dtype in _HALVES and any(weight.dtype == torch.float32 for weight in weights)
    return _statistics_in_fp32(args, out) if mixed else out


def _group_norm_backward(args: Args, out: Any) -> Any:
    # The gradient of half-precision values is in half precision, whatever the weights are in.
    return out if out[0] is None else (out[0].to(args[1].dtype), *out[1:])


def _as_large_as_inputs(args: Args, out: Any) -> Any:
    # A reduced loss is a view of the memory that all its terms were allocated; other results are made as large as the
    # input and then resized, by which memory never becomes less.
    elements = max(argument.numel() for argument in args if isinstance(argument, Tensor))
    return out if elements <= out.numel() else out.new_empty(elements).as_strided(out.shape, out.stride())


def _layer_norm(args: Args, out: Any) -> Any:
    # Results of the CPU's kernel are contiguous, whatever the input is; torch's rule for shapes keeps the input's
    # strides.
    first = out[0]
    if isinstance(first, Tensor) and not first.is_contiguous():
        out = (torch.empty(first.shape, dtype=first.dtype, device="cpu"), *out[1:])
    return _norm(args, out) if isinstance(args[1], (list, tuple)) else out


_PAGE, _CACHE_LINE = 4096, 64  # bytes


def _recurrent(args: Args, out: Any) -> Any:
    # oneDNN keeps gates and states of every step for the backward, in memory whose size the operator does not show.
    # The buffers are those of oneDNN's `rnn_utils.cpp`; their formats were found by the sizes that torch 2.13
    # allocates, which this gives to the byte.
    x, hidden, train = args[0], args[10], args[15]
    if not train:
        return out
    (steps, batch), wide, size = x.shape[:2], max(x.shape[-1], hidden), x.element_size()
    states = 2 * (steps + 1)  # of the layer and of its input, and those before the first step
    rows = (
        steps * _row(4 * hidden, size),  # gates
        steps * _row(hidden, size),  # outputs
        *(states * _row(wide, nbytes) for nbytes in (size, 4, 4)),  # layer states, two gradients
        *(states * hidden * nbytes for nbytes in (size, 4)),  # hidden states, cell states
    )
    nbytes = sum(round_up(batch * row, _PAGE) for row in rows)
    return (*out[:3], torch.empty(nbytes, dtype=torch.uint8, device="cpu"))


def _row(numbers: int, size: int) -> int:
    # Whole cache lines, and one more where rows would lie a multiple of 256 numbers apart, against 4K aliasing
    # (oneDNN's rnn_utils.cpp, get_good_ld).
    line = _CACHE_LINE // size
    whole = round_up(numbers, line)
    return (whole + (0 if whole % 256 else line)) * size


CPU_RESULTS: dict[OpOverload, Correct] = {
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm,
    aten.native_group_norm.default: _norm,
    aten.native_batch_norm.default: _norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten.mse_loss.default: _as_large_as_inputs,
    aten.smooth_l1_loss.default: _as_large_as_inputs,
    aten.binary_cross_entropy.default: _as_large_as_inputs,
    aten.mkldnn_rnn_layer.default: _recurrent,
    aten.im2col.default: _as_large_as_inputs,
    aten.col2im.default: _as_large_as_inputs,
    aten.soft_margin_loss.default: _as_large_as_inputs,
}
CUDA_RESULTS: dict[OpOverload, Correct] = {aten.native_layer_norm.default: _statistics_in_fp32}


def results_of(backend: str) -> Mapping[OpOverload, Correct]:
    """What to correct for the kernels of a backend (`spec.device.KERNELS`)."""
    return {**SPARSE_RESULTS, **(CPU_RESULTS if backend == "cpu" else CUDA_RESULTS)}


def _is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.sparse_coo


def _made(indices: Tensor, values: Tensor, like: Tensor, *, coalesced: bool = False) -> Tensor:
    return torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=False, is_coalesced=coalesced or None)


def _bags_backward(args: Args, out: Any) -> Any:
    """A row for each entry of the bags."""
    grad, entries = args[:2]
    rows = (entries.numel(), grad.shape[-1])
    return _made(entries.reshape(1, -1), grad.new_empty(rows), out) if _is_sparse(out) else out


def _clone(args: Args, out: Any) -> Any:
    # A gradient is not copied where it becomes a parameter's, whatever happens to fake ones.
    x = args[0]
    if not _is_sparse(x):
        return out
    node = torch._C._current_autograd_node()
    given = node is not None and "AccumulateGrad" in node.name()
    indices, values = (each if given else each.clone() for each in (x._indices(), x._values()))
    return _made(indices, values, x, coalesced=x.is_coalesced())


def _coalesce(args: Args, out: Any) -> Any:
    return _made(args[0]._indices().clone(), args[0]._values().clone(), args[0], coalesced=True)


def _mask(args: Args, out: Any) -> Any:
    """The rows of a dense tensor that a sparse one has."""
    mask = args[1]
    if not _is_sparse(out):
        return out
    rows = torch.empty_like(mask._values(), dtype=out.dtype)
    return _made(mask._indices().clone(), rows, out, coalesced=mask.is_coalesced())


def _each_value(args: Args, out: Any) -> Any:
    """The same rows with other values."""
    x = args[0]
    if not _is_sparse(out) or not _is_sparse(x) or out._values().shape[0]:
        return out
    return _made(x._indices(), torch.empty_like(x._values(), dtype=out.dtype), out, coalesced=x.is_coalesced())


def _sum(args: Args, out: Any) -> Any:
    # Equal rows of both may become one; how many are depends on values.
    x, y = args[:2]
    if not _is_sparse(out):
        return out
    return _made(torch.cat([x._indices(), y._indices()], 1), torch.cat([x._values(), y._values()]), out)


def added_to_dense(func: OpOverload, args: Args) -> Tensor | None:
    """What becomes of a dense tensor that a sparse one is added to: torch's rule for shapes reads its values."""
    adds = func in (aten.add_.Tensor, aten.add.Tensor, aten.sub.Tensor)
    if not adds or not _is_sparse(args[1]) or args[0].layout is not torch.strided:
        return None
    into: Tensor = args[0]
    return into if func is aten.add_.Tensor else torch.empty_like(into)


SPARSE_RESULTS: dict[OpOverload, Correct] = {
    aten._embedding_bag_backward.default: _bags_backward,
    aten.clone.default: _clone,
    aten._coalesce.default: _coalesce,
    aten.sparse_mask.default: _mask,
    aten.add.Tensor: _sum,
    aten.sub.Tensor: _sum,
    **dict.fromkeys(_BY_VALUE, _each_value),
}
