"""Forward, backward, recomputation and update: which phase of a step runs, and what one leaves for the next."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import nn

from trainledger.ledger.core.record import Event, Storage, keep_what_lives
from trainledger.trace.recorder.accumulation import engine_calls
from trainledger.trace.recorder.attribution import Attribution
from trainledger.trace.recorder.storages import Storages

_FOUND = ("other", "forward", "backward")  # phases that are distinguished by whether autograd runs


class Phases:
    """The phase that runs now, and how many backwards have begun."""

    def __init__(self, model: nn.Module, storages: Storages, attribution: Attribution) -> None:
        self.current = "other"
        self.latest = "forward"  # the last one that was begun by name
        self.micro_batches = 0
        self._model = model
        self._storages = storages
        self._attribution = attribution
        self._recomputing = False
        self._of_graph: set[int] = set()  # ids of records of what a backward made that makes a graph itself

    def begin(self, phase: str) -> None:
        """Leave one phase for another: what a forward leaves live at the beginning of a backward is saved for it."""
        before, self.current = self.current, phase
        self.latest = self.latest if phase == "other" else phase
        if before == "backward":
            gradients = [each.grad for each in self._model.parameters() if each.grad is not None]
            self._storages.categorize(gradients, "gradients")
        if before == "data":
            for each in self._storages.live.values():
                if each.phase == "data":
                    each.category = "batch"
        if phase == "backward":
            self.micro_batches += 1
            live = self._storages.live.values()
            keep_what_lives(live, "forward")
            keep_what_lives((each for each in live if id(each) in self._of_graph), "backward")

    def notice(self, events: list[Event]) -> None:
        """Distinguish forward and backward by whether autograd runs."""
        if self.current not in _FOUND:
            return
        phase = "forward" if torch._C._current_autograd_node() is None else "backward"
        if phase == self.current:
            return
        if phase == "backward" and events and events[-1].facts["name"] == "ones_like":
            seed = events[-1]  # the gradient that backward starts from is made just before it
            seed.facts["phase"] = phase
            for record in seed.allocated:
                record.phase = phase
        self.begin(phase)

    def of_operation(self, made: Iterable[Storage]) -> str:
        """The phase of an operation that runs now and made these: a forward that runs in backward is recomputation."""
        phase = self.current
        if phase == "backward" and self._is_recomputation():
            phase = "recompute"
            for record in made:
                record.phase = phase
            self._recomputing = True
        elif phase == "backward" and torch.is_grad_enabled():  # with create_graph another backward will come
            self._of_graph |= {id(each) for each in made}
        elif self._recomputing:
            self._recomputing = False
            keep_what_lives(self._storages.live.values(), "recompute")
        return phase

    def _is_recomputation(self) -> bool:
        """Whether a forward runs inside backward: with gradients, or (in an own Function's forward) in a module.

        What the engine itself calls is none, though with ``create_graph`` it makes a graph too.
        """
        if torch._C._current_autograd_node() is None:
            return False
        if self._attribution.running:
            return True
        return torch.is_grad_enabled() and not engine_calls(sys._getframe(1))
