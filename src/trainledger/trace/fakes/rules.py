"""What the tracer knows of operators on fake tensors beyond torch: products of many experts, embeddings' indices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode


@contextmanager
def fake_rules() -> Iterator[None]:
    """Inside, fake tensors follow these rules where torch has none of its own."""
    known = fake_impls.op_implementations_dict
    added = {func: rule for func, rule in _RULES.items() if func not in known}
    known.update(added)
    try:
        yield
    finally:
        for each in added:
            del known[each]


def _product(
    mode: FakeTensorMode, func: Any, a: Tensor, b: Tensor, offs: Tensor | None = None, *others: Any, **options: Any
) -> Tensor:
    """The result of torch's `grouped_mm`: rows in groups by a matrix of each, or summed over each group.

    Of any format, as the kernel of a CPU takes them; torch's own rule holds for bf16 only.
    """
    groups = [a.shape[0]] if a.dim() == b.dim() == 3 else []
    if a.dim() == b.dim() == 2:
        assert offs is not None
        groups = [offs.shape[0]]
    with mode:
        return a.new_empty(*groups, a.shape[-2], b.shape[-1], dtype=options.get("out_dtype") or a.dtype)


def _embedding(mode: FakeTensorMode, func: Any, weight: Tensor, indices: Tensor, *others: Any, **options: Any) -> Any:
    """Refuse indices that real tensors refuse; torch's own rule does so since 2.13."""
    if indices.dtype not in (torch.int64, torch.int32):
        told = "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int"
        raise RuntimeError(f"{told}; but got {indices.dtype} instead (while checking arguments for embedding)")
    return NotImplemented


_RULES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._grouped_mm.default: _product,
    torch.ops.aten.embedding.default: _embedding,
}
