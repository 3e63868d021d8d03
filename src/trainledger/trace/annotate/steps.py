"""The optimizer steps of a program: those of `torch.optim`, by its hooks, or those that it takes itself.

A program takes a step itself where it writes parameters in place from gradients: ``p -= lr * p.grad`` under
``no_grad``, ``p.data.add_(...)`` and ``torch._foreach_*``. Such a step begins with the first write since a backward and
is over when a graph is recorded again. Clipped or averaged weights are none: what is written must come from what a
backward has made, which is followed through all operations in between.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.optim.optimizer as optimizers

from trainledger.ledger.core.record import Storage
from trainledger.trace.annotate import script
from trainledger.trace.annotate.graphs import gradients_of
from trainledger.trace.annotate.holders import Holder, holder_of, snapshots
from trainledger.trace.annotate.source import Files
from trainledger.trace.annotate.watcher import Watcher
from trainledger.trace.patches import replaced

_KEPT = 8  # steps whose nodes may still be run backward
_MOST_ASKED = 8  # tensors that are asked who holds them


class Steps:
    """Follows the optimizers of a program, whichever it makes; a program that makes none is followed by its writes."""

    def __init__(self, watcher: Watcher, files: Files, most: int | None) -> None:
        self.taken = 0
        self.in_step = False
        self.holder: Holder | None = None
        self.decided: Counter[str] = Counter()  # conditions on unknown values since the last step
        self._watcher, self._files, self._most = watcher, files, most
        self._stale: list[dict[str, Any]] = []
        watcher.updates.on_write, watcher.updates.over = self._written, self._enough

    @contextmanager
    def followed(self) -> Iterator[None]:
        """While inside, each optimizer's step is followed."""
        hooks = [
            optimizers.register_optimizer_step_pre_hook(self._before),
            optimizers.register_optimizer_step_post_hook(self._after),
        ]
        try:
            with ExitStack() as stack:
                stack.enter_context(replaced(torch.optim.Optimizer, "__init__", self._making))
                yield
        finally:
            for each in hooks:
                each.remove()

    def _making(self, before: Callable[..., None]) -> Callable[..., None]:
        """From the first optimizer on what else the program writes to parameters is no step (averages, clipping)."""

        @functools.wraps(before)
        def made(*args: Any, **kwargs: Any) -> None:
            self._watcher.updates.on_write = None
            before(*args, **kwargs)

        return made

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._watcher.updates.on_write = None
        self._forget_frames()
        self._use(gradients_of(optimizer, self._watcher.recorder.record_of), self.taken)
        self.in_step = True

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self.in_step:
            return  # it began before it was followed
        self.in_step = False
        self._watcher.gradients.after_step(gradients_of(optimizer, self._watcher.recorder.record_of))
        self.end_step()
        self._enough()

    def _written(self, gradients: list[Storage], begins: bool) -> None:
        """The program writes parameters by these gradients; ``begins`` with the first write since a backward."""
        if begins:
            self._forget_frames()
        self._use(gradients, self.taken if begins else self.taken - 1)
        self._watcher.gradients.after_step(gradients)
        if begins:
            self.end_step()

    def _enough(self) -> None:
        """End the program where it has taken as many steps as were asked for."""
        if self._most is not None and self.taken >= self._most:
            raise script.EnoughSteps(f"stopped after {self.taken:,} optimizer steps, as asked")

    def _forget_frames(self) -> None:
        for each in self._stale:
            each.clear()
        self._stale = []

    def _use(self, gradients: list[Storage], step: int) -> None:
        caller = self._watcher.callers.now()
        at = caller.at if caller is not None else "a library"
        self._watcher.gradients.before_step(gradients, at, step)

    def end_step(self) -> None:
        """A step is over: look at what it leaves behind."""
        graph = self._watcher.graph
        self.taken += 1
        self.decided.clear()
        self._watcher.account.settle()
        if self.taken % _KEPT == 0:
            self._watcher.recorder.attribution.forget_before(graph.number_before(_KEPT))
            self._watcher.forwards.settle(graph.number_before(_KEPT))
        if not graph.end_step() or graph.leaks is None:
            return
        caller = self._watcher.callers.now()
        if caller is None or (self.holder is not None and self.holder.line):
            return
        for _, ref in graph.looks[-1].tensors[:_MOST_ASKED]:
            tensor = ref()
            if tensor is not None:
                self.holder = holder_of(tensor, caller.frame, self._files) or self.holder
                if self.holder is not None and self.holder.line:
                    break
        self._stale = snapshots(caller.frame, self._files)
