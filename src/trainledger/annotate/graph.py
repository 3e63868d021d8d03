"""The graphs of autograd over the steps of a program: whether those of past steps stay alive.

A node of autograd has a number that grows, so that the steps whose nodes a live tensor still holds can be told.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from typing import Any

import torch
from torch import Tensor

from trainledger.ledger.core.record import Storage
from trainledger.trace.recorder.tensor_facts import tensors_in

MOST_NODES = 50_000  # looked at in one step
_NO_NUMBER = 2**63
_EVERY_STEP_UNTIL = 16


FEWEST_LOOKS = 4  # that tell a graph from a variable that is simply still there


def nodes_so_far() -> int:
    """How many nodes of autograd were made: the number of the next."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


class Held:
    """What a look at the end of a step found: how many past steps hold on, tensors that do, and bytes of past steps."""

    __slots__ = ("nbytes", "spans", "step", "tensors")

    def __init__(self, step: int, spans: int, tensors: list[tuple[Storage, Tensor]], nbytes: int) -> None:
        self.step, self.spans, self.nbytes = step, spans, nbytes
        self.tensors = [(record, weakref.ref(each)) for record, each in tensors]


class Graph:
    """Follows the tensors that were made with gradients recorded. ``steps`` ends of steps have gone by."""

    def __init__(self) -> None:
        self.steps = 0
        self.looks: list[Held] = []
        self._ends: list[int] = []
        self._made: dict[Storage, tuple[Any, int, int]] = {}  # tensor, steps before, nodes so far

    def made(self, records: list[Storage], out: Any) -> None:
        """An operation has made pieces of memory; their tensors get their node when it returns."""
        if records:
            for record, tensor in zip(records, tensors_in(out), strict=False):
                if tensor.is_floating_point() or tensor.is_complex():
                    self._made[record] = (weakref.ref(tensor), self.steps, nodes_so_far())

    def gone(self, record: Storage) -> None:
        self._made.pop(record, None)

    def end_step(self) -> bool:
        """A step is over; whether a look was taken at what is left of those before."""
        self._ends.append(nodes_so_far())
        self.steps += 1
        if self.steps > _EVERY_STEP_UNTIL and self.steps % max(1, self.steps // _EVERY_STEP_UNTIL):
            return False
        self.look()
        return True

    def number_before(self, steps: int) -> int:
        """The number of the first node that was made in the last so many steps."""
        return self._ends[-1 - steps] if len(self._ends) > steps else 0

    def look(self) -> None:
        """See which past steps' nodes are alive."""
        past = self.steps - 1  # nodes with a number before its end are of past steps
        before = self._ends[past - 1] if past > 0 else 0
        steps: set[int] = set()
        old: list[tuple[Storage, Tensor]] = []
        seen: set[Any] = set()
        nbytes = 0
        for record, (ref, born, _) in list(self._made.items()):
            if born < past:
                nbytes += record.nbytes
            tensor = ref()
            if tensor is None or tensor.grad_fn is None:
                continue
            held = self._steps_of(tensor.grad_fn, before, seen)
            if held:
                steps |= held
                old.append((record, tensor))
        self.looks.append(Held(self.steps, len(steps), old, nbytes))

    def nbytes_between(self, low: int, high: int) -> int:
        """Live bytes made while these nodes were: of tensors with a graph, and of those that only a graph holds."""
        nbytes = 0
        for record, (ref, _, number) in self._made.items():
            if low < number <= high:
                tensor = ref()
                if tensor is None or tensor.grad_fn is not None:
                    nbytes += record.nbytes
        return nbytes

    def _steps_of(self, node: Any, before: int, seen: set[Any]) -> set[int]:
        found: set[int] = set()
        todo = [node]
        while todo and len(seen) < MOST_NODES:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            number = node._sequence_nr()
            if number < before:
                found.add(bisect_right(self._ends, number))
            if number < _NO_NUMBER:
                todo.extend(each for each, _ in node.next_functions)
        return found

    @property
    def leaks(self) -> Held | None:
        """The last look, if past steps hold on and the more the longer the program runs; else None."""
        if len(self.looks) < FEWEST_LOOKS:
            return None
        last, middle = self.looks[-1], self.looks[len(self.looks) // 2 - 1]
        return last if last.spans >= 3 and last.spans > middle.spans else None
