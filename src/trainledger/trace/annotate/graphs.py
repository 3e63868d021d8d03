"""The graphs of autograd over the steps of a program, and the parameters that it writes itself.

Whether those of past steps stay alive, which forwards record one that no backward uses (evaluation without
``no_grad``), and whether a gradient that a step has used is added to and used again. A node of autograd has a number
that grows, which shows the step that made it.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from trainledger.ledger.entry import Event, Storage
from trainledger.trace.annotate.source import Chain
from trainledger.trace.patches import Args, Kwargs
from trainledger.trace.recorder.storages import tensors_in, written_arguments

RecordOf = Callable[[Tensor], Storage | None]
Named = dict[Storage, tuple[str, str]]  # the variable that holds it, the line that assigns it
MOST_NODES = 50_000  # looked at in one step
_NO_NUMBER = 2**63
_EVERY_STEP_UNTIL = 16
HEAVY = ("matmul", "attention")  # each of their nodes runs an operation in its backward
_MOST_OPEN = 50_000
FEWEST_LOOKS = 4  # that distinguish a graph from a variable that is simply still there


def nodes_so_far() -> int:
    """How many nodes of autograd were made: the number of the next."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


class Held(NamedTuple):
    """What a look at the end of a step found: how many past steps hold on, tensors that do, and bytes of past steps."""

    step: int
    spans: int
    tensors: list[tuple[Storage, weakref.ref[Tensor]]]
    nbytes: int


class Graph:
    """Follows the tensors that were made with gradients recorded. ``steps`` ends of steps have gone by."""

    def __init__(self) -> None:
        self.steps = 0
        self.looks: list[Held] = []
        self._ends: list[int] = []
        self._made: dict[Storage, tuple[weakref.ref[Tensor], int, int]] = {}  # tensor, steps before, nodes so far

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
        # Nodes with a number before its end are of past steps
        past = self.steps - 1
        before = self._ends[past - 1] if past > 0 else 0
        steps: set[int] = set()
        old: list[tuple[Storage, weakref.ref[Tensor]]] = []
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
                old.append((record, ref))
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


@dataclass(slots=True)
class Outlived:
    """A variable whose tensor of one step is still there when the next has made its successor."""

    name: str
    line: str
    times: int = 0
    nbytes: int = 0


class Outliving:
    """Follows large tensors that a variable holds over the end of a step, until they are freed."""

    def __init__(self) -> None:
        self.found: dict[str, Outlived] = {}
        self._held: dict[Storage, Outlived] = {}

    def end_step(self, live: Iterable[Storage], least: float, named: Callable[[set[Storage]], Named]) -> None:
        """A step is over; of the ``live`` tensors that its forward made, those that ``named`` gives are held."""
        self._held.clear()
        large = {storage for storage in live if storage.phase == "forward" and storage.nbytes >= least}
        for record, (name, line) in named(large).items() if large else ():
            self._held[record] = self.found.setdefault(f"{name} {line}", Outlived(name, line))

    def gone(self, record: Storage, live: Iterable[Storage]) -> None:
        """A piece of memory is freed: if another of its line and size is there, both were."""
        held = self._held.pop(record, None)
        if held is None or record.origin is None:
            return
        line = record.origin.line
        if any(storage.nbytes == record.nbytes and storage.origin and storage.origin.line == line for storage in live):
            held.times += 1
            held.nbytes = max(held.nbytes, record.nbytes)


@dataclass(slots=True)
class Forward:
    """Matmuls of one place whose nodes were never used."""

    line: str
    operations: int = 0
    flops: int = 0
    grown: int = 0


class _Matmul(NamedTuple):
    chain: Chain
    flops: int
    before: int
    live: int


class Forwards:
    """Matmuls by the number of their node, until a backward runs it."""

    def __init__(self) -> None:
        self._open: dict[int, _Matmul] = {}
        self._unused: list[tuple[int, _Matmul]] = []
        self._used: set[str] = set()
        self._last_used = -1

    def made(self, number: int, chain: Chain, flops: int, before: int, live: int) -> None:
        """A matmul got a node; ``before`` and ``live`` are bytes live before it and after it."""
        if len(self._open) >= _MOST_OPEN:
            self.settle(sorted(self._open)[_MOST_OPEN // 2])
        self._open[number] = _Matmul(chain, flops, before, live)

    def ran(self, number: int) -> None:
        """A backward runs a node."""
        matmul = self._open.pop(number, None)
        if matmul is not None:
            self._used.update(matmul.chain)
            self._last_used = max(self._last_used, number)

    def settle(self, before: int) -> None:
        """No backward will run a node with a lower number."""
        for number in [each for each in self._open if each < before]:
            if len(self._unused) < _MOST_OPEN:
                self._unused.append((number, self._open[number]))
            del self._open[number]

    def never_used(self, *, ended: bool, without: Iterable[tuple[int, int]] = ()) -> list[Forward]:
        """Places of matmuls that no backward has used, ``without`` those of these nodes (from, to).

        Where the program has not ``ended``, those after the last that was used might have been yet to come.
        """
        bounds = list(without)
        forwards: dict[str, Forward] = {}
        last = ""
        began = 0
        for number, matmul in sorted([*self._unused, *self._open.items()], key=lambda each: each[0]):
            if (not ended and number > self._last_used) or any(low <= number < high for low, high in bounds):
                continue
            line = next((each for each in matmul.chain if each not in self._used), next(iter(matmul.chain), ""))
            if not line:
                continue
            if line != last or matmul.live < began:
                last, began = line, matmul.before
            forward = forwards.setdefault(line, Forward(line))
            forward.operations += 1
            forward.flops += matmul.flops
            forward.grown = max(forward.grown, matmul.live - began)
        return list(forwards.values())


@dataclass(slots=True)
class Forgotten:
    """Gradients of one backward line that grew from step to step."""

    line: str
    step_line: str
    times: int = 0
    nbytes: int = 0
    _nbytes: int = 0
    _step: int = -1

    def used(self, nbytes: int, step: int) -> None:
        """A step uses so many bytes of them, which may be reported parameter by parameter."""
        if step != self._step:
            self.times += 1
            self._step, self._nbytes = step, 0
        self._nbytes += nbytes
        self.nbytes = max(self.nbytes, self._nbytes)


class Gradients:
    """Follows each gradient: used by a step, added to by a backward since, used by another step, or cleared.

    Only one that went all the way, used, added to, and used again without having been cleared, is reported: what
    several backward passes add up before a step, and what another model's loss leaves until it is cleared, is not.
    """

    def __init__(self) -> None:
        self._used: dict[Storage, str] = {}  # since a step, with the line of the backward that has added to it
        self.forgotten: dict[str, Forgotten] = {}

    @property
    def watches(self) -> bool:
        return bool(self._used)

    def used(self, record: Storage) -> bool:
        return record in self._used

    def unchanged(self, record: Storage) -> bool:
        """Whether a step has used it, and no backward has added to it since."""
        return self._used.get(record) == ""

    def gone(self, record: Storage) -> None:
        self._used.pop(record, None)

    def cleared(self, records: Iterable[Storage]) -> None:
        for record in records:
            self._used.pop(record, None)

    def accumulated(self, record: Storage | None, line: str) -> None:
        """A backward pass adds to a gradient."""
        if record is not None and record in self._used:
            self._used[record] = line or "backward"

    def before_step(self, records: Iterable[Storage], step_line: str, step: int) -> None:
        """Step number ``step`` is about to use gradients."""
        for record in records:
            line = self._used.get(record)
            if line:
                self.forgotten.setdefault(line, Forgotten(line, step_line)).used(record.nbytes, step)

    def after_step(self, records: Iterable[Storage]) -> None:
        for record in records:
            self._used[record] = ""


def gradients_of(parameters: Iterable[Tensor], record_of: RecordOf) -> list[Storage]:
    """The pieces of memory of the parameters' gradients."""
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    return [record for gradient in gradients if (record := record_of(gradient)) is not None]


# A program that uses no torch.optim writes its parameters itself: ``p -= lr * p.grad`` under ``no_grad``,
# ``p.data.add_(...)`` and ``torch._foreach_*``. A step begins with the first such write since a backward and is over
# when a graph is recorded again. Clipped or averaged weights are none: what is written must come from what a backward
# has made, which is followed through all operations in between.
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

    def ran(self, func: OpOverload, args: Args, kwargs: Kwargs, event: Event | None, *, backward: bool) -> None:
        """An operation runs, a view (without an event) too: the program's own, or in a backward."""
        inputs = tensors_in(args)
        for tensor in inputs:
            if tensor.requires_grad and tensor.is_leaf:
                self._learn(tensor)
        if backward:
            self._written.clear()
            self._after_backward = True
        if self._stepping and (backward or nodes_so_far() > self._nodes):
            self._after_backward, self._stepping = backward, False
            self.over()
        if event is None:
            return
        changed = written_arguments(func, args, kwargs) if func._schema.is_mutable else []
        written = [record for tensor in changed if (record := self._record_of(tensor)) is not None]
        read = (self._record_of(tensor) for tensor in (*inputs, *tensors_in(kwargs)))
        if not backward and not any(storage in self._of_gradients for storage in read):
            return
        self._of_gradients.update(event.allocated)
        self._of_gradients.update(storage for storage in written if storage not in self._parameters)
        parameters = [record for record in written if record in self._parameters and record not in self._written]
        if self._after_backward and not backward and parameters and self.on_write is not None:
            self._written.update(parameters)
            begins, self._stepping = not self._stepping, True
            self._nodes = nodes_so_far() if begins else self._nodes
            tensors = (ref() for record in parameters for ref in self._parameters[record].values())
            self.on_write(gradients_of((tensor for tensor in tensors if tensor is not None), self._record_of), begins)

    def _learn(self, parameter: Tensor) -> None:
        record = self._record_of(parameter)
        if record is not None:
            known = self._parameters.setdefault(record, {})
            ref = known.get(id(parameter))
            if ref is None or ref() is not parameter:
                known[id(parameter)] = weakref.ref(parameter)
                self._of_gradients.discard(record)
