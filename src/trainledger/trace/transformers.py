"""What Hugging Face transformers does differently when it sees fake tensors, undone while a step is traced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def as_if_real() -> Iterator[None]:
    """Let transformers take sequences as not packed, as it does for real tensors after looking at their values.

    Of fake tensors it cannot look at the values and, to be safe, writes out a mask of [B, 1, T, T], which a real
    run does not have. Nothing is imported here: where transformers is not loaded, no model is made of it.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    if not hasattr(masking, name):
        yield
        return
    before = getattr(masking, name)
    setattr(masking, name, _not_packed(before))
    try:
        yield
    finally:
        setattr(masking, name, before)


def _not_packed(find: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    """The look at the values with all its operations, answered for fake tensors: one sequence in each row."""

    def found(position_ids: Tensor) -> Tensor | None:
        sequence = find(position_ids)
        if not isinstance(sequence, FakeTensor):
            return sequence
        alone = (sequence[:, -1] == 0).all()
        with _disable_current_modes():
            alone.constant = torch.ones((), dtype=torch.bool)  # type: ignore[attr-defined]
        return None if alone else sequence

    return found
