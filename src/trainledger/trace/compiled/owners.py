"""Which module compiled code works for, where blocks of one kind share it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainledger.trace.recorder.attribution import plain_name

Moved = dict[str, str]  # from a module that code was compiled for to the one that it runs for


class Owners:
    """The modules and the parameters of a model by what a compiler sees of them."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {id(each): plain_name(name) for name, each in model.named_modules()}
        held = [*model.named_parameters(), *model.named_buffers()]
        self._tensors = {each.untyped_storage()._cdata: plain_name(name) for name, each in held}
        self._of_node: dict[int, Moved] = {}

    def path(self, module: int | None) -> str | None:
        """The path of the module with this ``id``, None where it is no part of the model."""
        return None if module is None else "" if module == 0 else self._modules.get(module)

    def names(self, arguments: Iterable[Any]) -> list[str]:
        """The parameters among the arguments of a graph by position, "" for what is none."""
        names = self._tensors
        return [names.get(each.untyped_storage()._cdata, "") if isinstance(each, Tensor) else "" for each in arguments]

    def moved(self, first: Sequence[str], now: Sequence[str]) -> Moved:
        """Which modules stand in for those of the first run of a forward; remembered for the backward of this one."""
        moved = stands_for(first, now)
        # The node of backward is made just before its forward runs.
        self._of_node[torch.autograd._get_sequence_nr() - 1] = moved  # type: ignore[attr-defined]
        return moved

    def moved_in_forward(self) -> Moved:
        """The same for a backward that runs now."""
        node = torch._C._current_autograd_node()
        return {} if node is None else self._of_node.get(int(node._sequence_nr()), {})


def stands_for(first: Sequence[str], now: Sequence[str]) -> Moved:
    """Where names differ by position, what stands in the place of which.

    >>> stands_for(["layers.0.mlp.up.weight", "norm.weight"], ["layers.3.mlp.up.weight", "norm.weight"])
    {'layers.0': 'layers.3'}
    """
    moved: Moved = {}
    for before, after in zip(first, now, strict=False):
        if before and after and before != after:
            old, new = before.split("."), after.split(".")
            while len(old) > 1 and len(new) > 1 and old[-1] == new[-1]:
                old.pop()
                new.pop()
            moved.setdefault(".".join(old), ".".join(new))
    return moved
