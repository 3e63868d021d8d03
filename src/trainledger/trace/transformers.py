"""What Hugging Face transformers does differently when it sees fake tensors, undone while a step is traced."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
    setattr(masking, name, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(masking, name, before)
