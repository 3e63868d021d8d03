"""Gradients over the steps of optimizers: whether one that a step used is added to and used again."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from trainledger.ledger.core.record import Storage


class Forgotten:
    """Gradients of one backward line that grew from step to step."""

    __slots__ = ("_nbytes", "_step", "line", "nbytes", "step_line", "times")

    def __init__(self, line: str, step_line: str) -> None:
        self.line, self.step_line = line, step_line
        self.times = self.nbytes = self._nbytes = 0
        self._step = -1

    def used(self, nbytes: int, step: int) -> None:
        """A step uses so many bytes of them, which may be told parameter by parameter."""
        if step != self._step:
            self.times += 1
            self._step, self._nbytes = step, 0
        self._nbytes += nbytes
        self.nbytes = max(self.nbytes, self._nbytes)


class Gradients:
    """Follows each gradient: used by a step, added to by a backward since, used by another step, or cleared.

    Only one that went all the way, used, added to, and used again without having been cleared, is told: what several
    backward passes add up before a step, and what another model's loss leaves behind until it is cleared, is not.
    """

    def __init__(self) -> None:
        self._used: dict[Storage, str] = {}  # since a step, with the line of the backward that has added to it
        self.forgotten: dict[str, Forgotten] = {}

    @property
    def watches(self) -> bool:
        return bool(self._used)

    def used(self, record: Storage) -> bool:
        return record in self._used

    def gone(self, record: Storage) -> None:
        self._used.pop(record, None)

    def cleared(self, records: Iterable[Storage]) -> None:
        for each in records:
            self._used.pop(each, None)

    def accumulated(self, record: Storage | None, line: str) -> None:
        """A backward pass adds to a gradient."""
        if record is not None and record in self._used:
            self._used[record] = line or "backward"

    def before_step(self, records: Iterable[Storage], step_line: str, step: int) -> None:
        """Step number ``step`` is about to use gradients."""
        for each in records:
            line = self._used.get(each)
            if line:
                self.forgotten.setdefault(line, Forgotten(line, step_line)).used(each.nbytes, step)

    def after_step(self, records: Iterable[Storage]) -> None:
        for each in records:
            self._used[each] = ""


def gradients_of(optimizer: torch.optim.Optimizer, record_of: Callable[[Tensor], Storage | None]) -> list[Storage]:
    """The pieces of memory of an optimizer's gradients."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                record = record_of(parameter.grad)
                if record is not None:
                    found.append(record)
    return found
