"""Modules and optimizers as they were before a trace, whatever the traced code did to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainledger.trace.patches import all_replaced

_DEEPEST = 4  # containers in containers whose contents are put back


@contextmanager
def restored(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Put back all attributes of a model's modules and of optimizers, and what lists, dicts and sets in them hold.

    What a forward keeps for later (a table of angles, running statistics, its last output) would else be fake. So with
    loss scalers that are used meanwhile.
    """
    before: dict[int, tuple[Any, Any]] = {}  # containers and copies of what they hold, by the container's identity
    for each in (*model.modules(), *optimizers):
        _remember(vars(each), before, 0)

    def first(method: Callable[..., Any]) -> Callable[..., Any]:
        def used(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            _remember(vars(scaler), before, 0)
            return method(scaler, *args, **kwargs)

        return used

    try:
        with all_replaced(*((torch.amp.GradScaler, each, first) for each in ("scale", "unscale_", "step", "update"))):
            yield
    finally:
        for held, contents in before.values():
            _put_back(held, contents)


def _remember(held: Any, before: dict[int, tuple[Any, Any]], depth: int) -> None:
    if not isinstance(held, (dict, list, set)) or id(held) in before or depth > _DEEPEST:
        return
    contents = (dict(held) if isinstance(held, dict) else list(held)) if held else ()
    before[id(held)] = held, contents
    for each in held.values() if isinstance(held, dict) else held:
        if isinstance(each, (dict, list, set)):
            _remember(each, before, depth + 1)


def _put_back(held: Any, contents: Any) -> None:
    if isinstance(held, list):
        held[:] = contents
    elif not isinstance(held, dict) or not _same(held, contents):
        held.clear()
        held.update(contents)


def _same(held: dict[Any, Any], contents: Any) -> bool:
    """Whether a dict has the same objects under the same keys in the same order, without comparing tensors."""
    return len(held) == len(contents) and all(
        key is name and held[key] is contents[name] for key, name in zip(held, contents, strict=True)
    )
