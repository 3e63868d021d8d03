"""Parameters that a program writes itself, without `torch.optim`: parameters that it writes in place, from gradients.

``p -= lr * p.grad`` under ``no_grad``, ``p.data.add_(...)`` and ``torch._foreach_*`` are such writes. A step begins
with the first of them since a backward and is over when a graph is recorded again. Clipped or averaged weights are
none: what is written must come from what a backward has made, which is followed through all operations in between.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from trainledger.ledger.core.record import Event, Storage
from trainledger.trace.annotate.graphs import nodes_so_far
from trainledger.trace.recorder.tensor_facts import tensors_in, written_arguments

RecordOf = Callable[[Tensor], Storage | None]
OnWrite = Callable[[list[Storage], bool], None]


class Updates:
    """Follows parameters by their memory; ``on_write(gradients, begins)`` hears of the gradients of a write.

    Parameters are leaves that need gradients, seen in any operation. A gradient is used once a step. ``over`` is called
    when a step is. Nothing is followed once ``on_write`` is None, as in a program that uses `torch.optim`.
    """

    def __init__(self, record_of: RecordOf) -> None:
        self.on_write: OnWrite | None = None
        self.over: Callable[[], None] = lambda: None
        self._record_of = record_of
        self._parameters: dict[Storage, dict[int, weakref.ref[Tensor]]] = {}
        self._of_gradients: set[Storage] = set()  # made in a backward, or from what was
        self._written: set[Storage] = set()  # in this step
        self._after_backward = False  # and before the next graph
        self._stepping = False
        self._nodes = 0

    @property
    def watches(self) -> bool:
        return self.on_write is not None

    def gone(self, record: Storage) -> None:
        self._parameters.pop(record, None)
        self._of_gradients.discard(record)
        self._written.discard(record)

    def ran(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], event: Event | None, *, backward: bool
    ) -> None:
        """An operation runs, a view (without an event) too: the program's own, or in a backward."""
        inputs = tensors_in(args)
        for each in inputs:
            if each.requires_grad and each.is_leaf:
                self._learn(each)
        if backward:
            self._written.clear()
            self._after_backward = True
        if self._stepping and (backward or nodes_so_far() > self._nodes):
            self._after_backward, self._stepping = backward, False
            self.over()
        if event is None:
            return
        changed = written_arguments(func, args, kwargs) if func._schema.is_mutable else []
        written = [record for each in changed if (record := self._record_of(each)) is not None]
        read = (self._record_of(each) for each in (*inputs, *tensors_in(kwargs)))
        if not backward and not any(each in self._of_gradients for each in read):
            return
        self._of_gradients.update(event.allocated)
        self._of_gradients.update(each for each in written if each not in self._parameters)
        if self._after_backward and not backward:
            self._write([each for each in written if each in self._parameters and each not in self._written])

    def _learn(self, parameter: Tensor) -> None:
        record = self._record_of(parameter)
        if record is not None:
            known = self._parameters.setdefault(record, {})
            ref = known.get(id(parameter))
            if ref is None or ref() is not parameter:
                known[id(parameter)] = weakref.ref(parameter)
                self._of_gradients.discard(record)

    def _write(self, parameters: list[Storage]) -> None:
        if not parameters or self.on_write is None:
            return
        self._written.update(parameters)
        begins, self._stepping = not self._stepping, True
        self._nodes = nodes_so_far() if begins else self._nodes
        self.on_write([each for parameter in parameters for each in self._gradients(parameter)], begins)

    def _gradients(self, parameter: Storage) -> Iterable[Storage]:
        for ref in self._parameters[parameter].values():
            tensor = ref()
            if tensor is not None and tensor.grad is not None:
                record = self._record_of(tensor.grad)
                if record is not None:
                    yield record
