"""Results that are far larger than all that they are made of: a broadcast written out."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trainledger.annotate.callers import Callers
from trainledger.ledger.core.record import Event
from trainledger.trace.recorder.tensor_facts import tensors_in

TIMES_LARGER = 16  # than the largest tensor that it is made of


class Broadcast:
    """Results of one expression."""

    __slots__ = ("expression", "largest", "line", "nbytes", "shape", "sources", "times")

    def __init__(
        self, line: str, expression: str, shape: tuple[int, ...], sources: tuple[tuple[int, ...], ...]
    ) -> None:  # fmt: skip
        self.line, self.expression, self.shape, self.sources = line, expression, shape, sources
        self.times = self.nbytes = self.largest = 0


class Broadcasts:
    """Pointwise results of two tensors or more, each stretched along a dim that the other has."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], Broadcast] = {}

    def take(self, event: Event, args: tuple[Any, ...], out: Tensor, callers: Callers) -> None:
        if event.facts["kind"] != "elementwise" or not event.allocated:
            return
        sources = tensors_in(args)
        if len(sources) < 2:
            return
        size = out.numel()
        if size < TIMES_LARGER * max(each.numel() for each in sources) or size < 1024:
            return
        caller = callers.now()
        if caller is None or caller.inside:
            return
        key = (caller.at, caller.expression)
        found = self.found.get(key)
        if found is None:
            shapes = tuple(tuple(each.shape) for each in sources)
            found = self.found[key] = Broadcast(caller.at, caller.expression, tuple(out.shape), shapes)
        found.times += 1
        found.nbytes += event.allocated[0].nbytes
        found.largest = max(found.largest, event.allocated[0].nbytes)
