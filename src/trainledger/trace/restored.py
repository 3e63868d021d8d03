"""Modules and optimizers as they were before a trace, whatever the traced code did to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_DEEPEST = 4  # containers in containers whose contents are put back

Put = Callable[[], None]


@contextmanager
def restored(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Put back all attributes of a model's modules and of optimizers, and what lists, dicts and sets in them hold.

    What a forward keeps for later (a table of angles, running statistics, its last output) would else be fake.
    """
    undo: list[Put] = []
    seen: set[int] = set()
    for each in (*model.modules(), *optimizers):
        _remember(vars(each), undo, seen, 0)
    try:
        yield
    finally:
        for put in reversed(undo):
            put()


def _remember(held: Any, undo: list[Put], seen: set[int], depth: int) -> None:
    if id(held) in seen or depth > _DEEPEST:
        return
    if isinstance(held, dict):
        values = list(held.values())
    elif isinstance(held, (list, set)):
        values = list(held)
    else:
        return
    seen.add(id(held))
    undo.append(_putting(held))
    for each in values:
        _remember(each, undo, seen, depth + 1)


def _putting(held: Any) -> Put:
    before = list(held.items()) if isinstance(held, dict) else list(held)

    def put() -> None:
        if isinstance(held, dict):
            if not _same(held, before):
                held.clear()
                held.update(before)
        elif isinstance(held, list):
            held[:] = before
        else:
            held.clear()
            held.update(before)

    return put


def _same(held: dict[Any, Any], before: list[tuple[Any, Any]]) -> bool:
    """Whether a dict has the same objects under the same keys in the same order, without comparing tensors."""
    return len(held) == len(before) and all(
        key is name and value is kept for (key, value), (name, kept) in zip(held.items(), before, strict=True)
    )
