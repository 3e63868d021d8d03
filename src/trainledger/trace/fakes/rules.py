"""Fake tensors take the way of real ones: rules of operators that torch lacks, and answers that transformers wants."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from trainledger.trace.patches import Patch, all_replaced, around

# Where transformers asks nothing of a mask but whether all of it is set, by way of `fast_all`.
_ANSWERED = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")


@contextmanager
def as_if_real(batch: Any = None) -> Iterator[None]:
    """Let transformers take the way that it takes for real tensors after looking at their values.

    Of fake tensors it cannot look at the values and, to be safe, writes out a mask of [B, 1, T, T], which a real
    run may not have. Sequences are assumed not to be packed. A padding mask that the model makes itself hides nothing;
    one in the batch is looked at, and one without values there is assumed to hide something. Nothing is imported here:
    where transformers is not loaded, no model is made of it.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    answer = not _hides_something(batch)
    patches: list[Patch] = [(F, "one_hot", around(_one_hot))]
    if masking is not None:
        patches += [
            (masking, "find_packed_sequence_indices", around(_packed)),
            (masking, "is_tracing", around(_is_tracing)),
            (masking, "fast_all", around(lambda fast_all, mask: _known(fast_all(mask), answer))),
        ]
    with all_replaced(*patches):
        yield


def _hides_something(batch: Any) -> bool:
    """Whether a mask in the batch hides a token; without values it may."""
    if not isinstance(batch, Mapping):
        return False
    masks = [each for name, each in batch.items() if str(name).endswith("attention_mask") and isinstance(each, Tensor)]
    for each in masks:
        if each.is_meta or isinstance(each, FakeTensor):
            return True
        with unset_fake_temporarily(), _disable_current_modes():
            if not bool(each.all()):
                return True
    return False


def _packed(find: Callable[[Tensor], Tensor | None], position_ids: Tensor) -> Tensor | None:
    """The look at the values with all its operations, answered for fake tensors: one sequence in each row."""
    sequence = find(position_ids)
    if not isinstance(sequence, FakeTensor):
        return sequence
    return None if _known((sequence[:, -1] == 0).all(), True) else sequence


def _is_tracing(before: Callable[..., bool], tensor: Any = None) -> bool:
    asks = sys._getframe(2).f_code.co_name  # behind `around`
    return before() if isinstance(tensor, FakeTensor) and asks in _ANSWERED else before(tensor)


def _known(value: Tensor, answer: bool) -> Tensor:
    """A fake truth value that has a value."""
    if isinstance(value, FakeTensor):
        with _disable_current_modes():
            value.constant = torch.tensor(answer)
    return value


def _one_hot(before: Callable[..., Tensor], tensor: Tensor, num_classes: int = -1) -> Tensor:
    """As real tensors do it: zeros, and a one where each number says; fake ones are compared with all numbers."""
    if not isinstance(tensor, FakeTensor) or num_classes < 0:
        return before(tensor, num_classes)
    zeros = torch.zeros(*tensor.shape, num_classes, dtype=tensor.dtype)
    return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)


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


def _matmul(
    mode: FakeTensorMode, func: Any, a: Tensor, b: Tensor, offs: Tensor | None = None, *others: Any, **options: Any
) -> Tensor:
    """The result of torch's `grouped_mm`: rows in groups by a matrix of each, or summed over each group.

    Of any format, as the kernel of a CPU takes them; torch's own rule is for bf16 only.
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
        rule = "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int"
        raise RuntimeError(f"{rule}; but got {indices.dtype} instead (while checking arguments for embedding)")
    return NotImplemented


_RULES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._grouped_mm.default: _matmul,
    torch.ops.aten.embedding.default: _embedding,
}
