"""Sparse gradients of tables: how many rows operators give, which torch's rules for shapes leave at none.

A sparse tensor is [rows] indices and [rows, width] values. How many rows are left where entries of the same row are
added up depends on values: all are taken to stay, which is the most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten
NOTES = {
    "_coalesce": "a sparse gradient is taken to keep all its rows where entries of the same row are added up, which is "
    "the most",
}


def _is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.sparse_coo


def _made(indices: Tensor, values: Tensor, like: Tensor, *, coalesced: bool = False) -> Tensor:
    made: Tensor = torch.sparse_coo_tensor(
        indices, values, like.shape, check_invariants=False, is_coalesced=coalesced or None
    )
    return made


def _bags_backward(args: tuple[Any, ...], out: Any) -> Any:
    """A row for each entry of the bags."""
    grad, entries = args[0], args[1]
    if not _is_sparse(out):
        return out
    rows = torch.empty((entries.numel(), grad.shape[-1]), dtype=grad.dtype, device=grad.device)
    return _made(entries.reshape(1, -1), rows, out)


def _clone(args: tuple[Any, ...], out: Any) -> Any:
    """A gradient is not copied where it becomes a parameter's, whatever happens to fake ones."""
    x = args[0]
    if not _is_sparse(x):
        return out
    node = torch._C._current_autograd_node()
    given = node is not None and "AccumulateGrad" in node.name()
    indices, values = (each if given else each.clone() for each in (x._indices(), x._values()))
    return _made(indices, values, x, coalesced=x.is_coalesced())


def _coalesce(args: tuple[Any, ...], out: Any) -> Any:
    return _made(args[0]._indices().clone(), args[0]._values().clone(), args[0], coalesced=True)


def _mask(args: tuple[Any, ...], out: Any) -> Any:
    """The rows of a dense tensor that a sparse one has."""
    x, mask = args[0], args[1]
    if not _is_sparse(out) or not _is_sparse(mask):
        return out
    rows = torch.empty(mask._values().shape, dtype=x.dtype, device=x.device)
    return _made(mask._indices().clone(), rows, out, coalesced=mask.is_coalesced())


def _each_value(args: tuple[Any, ...], out: Any) -> Any:
    """The same rows with other values."""
    x = args[0]
    if not _is_sparse(out) or not _is_sparse(x) or out._values().shape[0]:
        return out
    return _made(x._indices(), torch.empty_like(x._values(), dtype=out.dtype), out, coalesced=x.is_coalesced())


def _sum(args: tuple[Any, ...], out: Any) -> Any:
    """The rows of both, which is the most: equal ones may become one."""
    x, y = args[0], args[1]
    if not _is_sparse(out) or not _is_sparse(x) or not _is_sparse(y):
        return out
    return _made(torch.cat([x._indices(), y._indices()], 1), torch.cat([x._values(), y._values()]), out)


def added_to_dense(func: OpOverload, args: tuple[Any, ...]) -> Tensor | None:
    """What becomes of a dense tensor that a sparse one is added to: torch's rule for shapes reads its values."""
    if func not in (aten.add_.Tensor, aten.add.Tensor, aten.sub.Tensor) or not _is_sparse(args[1]):
        return None
    into: Tensor = args[0]
    if into.layout is not torch.strided:
        return None
    return into if func is aten.add_.Tensor else torch.empty_like(into)


_BY_VALUE = (
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.pow.Tensor_Scalar, aten.sqrt.default,
    aten.neg.default,
)  # fmt: skip
SPARSE_RESULTS: dict[OpOverload, Callable[[tuple[Any, ...], Any], Any]] = {
    aten._embedding_bag_backward.default: _bags_backward,
    aten.clone.default: _clone,
    aten._coalesce.default: _coalesce,
    aten.sparse_mask.default: _mask,
    aten.add.Tensor: _sum,
    aten.sub.Tensor: _sum,
    **dict.fromkeys(_BY_VALUE, _each_value),
}
