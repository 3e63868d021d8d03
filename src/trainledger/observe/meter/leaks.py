"""Which tensors pile up, where the memory of a loop grows: those of one shape and origin of which steps add some."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from typing import NamedTuple

from torch import Tensor

from trainledger.observe.meter.script import main_script
from trainledger.observe.meter.watch import Finding
from trainledger.spec.units import counted, format_nbytes
from trainledger.trace.annotate.source import Files, Holder, holder_of

_STEPS = 5  # between two looks at all tensors
_ASKED = 8  # tensors of a kind that are asked who holds them


class Kind(NamedTuple):
    """Tensors that are alike."""

    shape: tuple[int, ...]
    dtype: str
    made_by: str  # the autograd node of it


class Piles:
    """Two looks at the tensors that Python knows, some steps apart, and what there is more of at the second."""

    def __init__(self) -> None:
        self._before: Counter[Kind] | None = None
        self._until = 0
        self._begun = False

    def begin(self) -> None:
        """Look at the next step, and some steps later."""
        self._begun, self._before = True, None

    def look(self, step: int) -> list[Finding]:
        """What piles up, at the step of the second look."""
        if not self._begun:
            return []
        if self._before is None:
            self._before, self._until = _census(), step + _STEPS
            return []
        if step < self._until:
            return []
        before, self._before, self._begun = self._before, None, False
        now = _census()
        more = {kind: count - before[kind] for kind, count in now.items() if count - before[kind] >= _STEPS}
        if not more:
            sentence = (
                "No tensor that Python holds piles up: what grows is held by a library, by an autograd graph that a "
                "closure keeps, or is no tensor."
            )
            return [Finding("leak", step, sentence)]
        return [Finding("leak", step, _sentence(more))]


def _tensors() -> list[Tensor]:
    # isinstance asks some objects for a property and wakes it
    return [each for each in gc.get_objects() if issubclass(type(each), Tensor)]


def _kind(tensor: Tensor) -> Kind:
    node = tensor.grad_fn
    return Kind(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), "" if node is None else node.name())


def _census() -> Counter[Kind]:
    return Counter(_kind(each) for each in _tensors())


def _holder(alike: list[Tensor]) -> Holder | None:
    """What holds one of these together with others: a list, a dict, an attribute, not the variable of the last one."""
    files = Files(main_script() or "<loop>")
    for each in alike[:_ASKED]:
        found = holder_of(each, sys._getframe(), files)
        if found is not None and found.kind != "variable":
            return found
    return None


def _sentence(more: dict[Kind, int]) -> str:
    """Of the kinds of which there is more: the one that something named holds, else the one with the most bytes."""
    piles: dict[Kind, list[Tensor]] = {kind: [] for kind in more}
    for each in _tensors():
        if (kind := _kind(each)) in piles:
            piles[kind].append(each)
    by_size = sorted(piles, key=lambda kind: -sum(each.nbytes for each in piles[kind]))
    held = next(((kind, found) for kind in by_size if (found := _holder(piles[kind])) is not None), None)
    kind, holder = held if held is not None else (by_size[0], None)
    what = f"{kind.dtype}{list(kind.shape)}" + (f" of {kind.made_by}" if kind.made_by else "")
    sentence = (
        f"Since {_STEPS} steps there are {counted(more[kind], 'tensor')} {what} more, {len(piles[kind]):,} now "
        f"({format_nbytes(sum(each.nbytes for each in piles[kind]))})"
    )
    if holder is not None:
        sentence += f", in `{holder.name}` ({holder.kind})" + (f", added at {holder.line}" if holder.line else "")
    if kind.made_by:
        sentence += "; each keeps its whole graph alive: keep .detach() of it, or read numbers with .item()"
    return f"{sentence}."
