"""Products of many experts at once (torch's `grouped_mm`) on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode

_GROUPED = torch.ops.aten._grouped_mm.default


@contextmanager
def grouped_products_of_any_format() -> Iterator[None]:
    """Let fake tensors of any format be multiplied in groups, as the kernel of a CPU does.

    What torch knows of the product's shape without running it holds for bf16 only.
    """
    if _GROUPED in fake_impls.op_implementations_dict:
        yield
        return
    fake_impls.op_implementations_dict[_GROUPED] = _product
    try:
        yield
    finally:
        del fake_impls.op_implementations_dict[_GROUPED]


def _product(
    mode: FakeTensorMode, func: Any, a: Tensor, b: Tensor, offs: Tensor | None = None, *others: Any, **options: Any
) -> Tensor:
    """The result's shape: rows in groups by a matrix of each, or summed over the rows or columns of each group."""
    groups = [a.shape[0]] if a.dim() == b.dim() == 3 else []
    if a.dim() == b.dim() == 2:
        assert offs is not None
        groups = [offs.shape[0]]
    with mode:
        return a.new_empty(*groups, a.shape[-2], b.shape[-1], dtype=options.get("out_dtype") or a.dtype)
