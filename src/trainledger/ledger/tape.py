"""A training step followed by sizes alone: what autograd would run, keep and free, without a single number.

Operations of `ledger.operations` act on `Array`s, which have a size and a format but no values, and leave
entries behind. The lifetime of an array is the lifetime of the Python references to it, and a node of the
graph refers to what its backward needs: as in PyTorch. So blocks written here the way they are written in
torch have the same live bytes at every operation, and sizes may be ints, arrays or symbols.

Loops are followed once: `loop(name, count)` says that what runs inside runs ``count`` times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from trainledger.ledger.array import Array, Leaf, Memory, Port, Target, nbytes_of
from trainledger.ledger.entry import Amounts, Int, Ledger
from trainledger.ledger.record import Event, Loop, Storage, copies_left_behind, keep_what_lives

Gradients = list[Array | None]
Backward = Callable[..., Gradients]
Sums = Sequence[tuple[int, Int]]


class Node:
    """One step of the graph: what it saved, how its backward runs, and where gradients go on.

    ``sums`` says which of its gradients belong to a broadcast input, and that input's elements: they are
    summed after its backward, by the engine and not by the step itself.
    """

    __slots__ = ("backward", "frame", "loop", "path", "ports", "saved", "sums", "targets")

    def __init__(
        self,
        tape: Tape,
        targets: Sequence[Target],
        saved: tuple[Array, ...],
        backward: Backward,
        outputs: int,
        sums: Sums,
    ) -> None:
        self.targets = list(targets)
        self.backward = backward
        self.sums = sums
        self.path = tape.path
        self.loop = tape.loop_stack
        self.ports = [Port() for _ in range(outputs)]
        self.frame = tape.frame if saved else None
        self.saved: Any = saved if self.frame is None else self.frame.expect(saved)

    def run(self, tape: Tape) -> Gradients:
        """Gradients for the targets; the incoming gradients and what was saved are let go afterwards.

        What a checkpointed block saves is let go before the sums: its node holds no reference of its own.
        """
        incoming = [each.take() for each in self.ports]
        checkpointed = self.frame is not None
        saved = self._take_saved()
        gradients = self.backward(*incoming, *saved)
        if checkpointed:
            del saved
        for index, elements in self.sums:
            whole = _taken(gradients, index)
            gradients[index] = tape.sum(whole, elements)
            del whole
        return gradients

    def _take_saved(self) -> tuple[Array, ...]:
        saved, self.saved = self.saved, ()
        if self.frame is not None:
            frame, self.frame = self.frame, None
            return frame.recomputed(saved)
        result: tuple[Array, ...] = saved
        return result


class _EnoughRecomputed(Exception):  # noqa: N818
    """Everything the block's backward needs is there again."""


class Frame:
    """A checkpointed block: its forward keeps only its input, its backward first runs the block again.

    As in torch's non-reentrant checkpoint the second run stops as soon as the last saved array exists.
    """

    def __init__(self, tape: Tape, again: Callable[[], Any]) -> None:
        self.tape = tape
        self.again: Callable[[], Any] | None = again
        self.expected = 0
        self.arrays: list[tuple[Array, ...] | None] = []
        self.collecting = False

    def expect(self, saved: tuple[Array, ...]) -> int:
        """Called for each node that saves something: the first run counts them, the second collects what they save."""
        if not self.collecting:
            self.expected += 1
            return self.expected - 1
        self.arrays.append(saved)
        if len(self.arrays) == self.expected:
            raise _EnoughRecomputed
        return len(self.arrays) - 1

    def recomputed(self, index: int) -> tuple[Array, ...]:
        if not self.collecting:
            again, self.again = self.again, None
            assert again is not None
            self.collecting = True
            with self.tape.recomputing(self), suppress(_EnoughRecomputed):
                again()
            del again
        arrays = self.arrays[index]
        self.arrays[index] = None
        assert arrays is not None
        return arrays


class Tape:
    """Collects the entries of a step."""

    def __init__(self, compute_dtype: str) -> None:
        self.compute_dtype = compute_dtype
        self.events: list[Event] = []
        self.phase = "forward"
        self.path = ""
        self.loop_stack: Loop = ()
        self.frame: Frame | None = None
        self._nodes: list[Node] = []
        self._casts: dict[int, Array] = {}
        self._live: dict[int, Storage] = {}

    # Where and when

    @contextmanager
    def at(self, path: str) -> Iterator[None]:
        """Operations inside belong to this module path."""
        before, self.path = self.path, f"{self.path}.{path}" if self.path else path
        try:
            yield
        finally:
            self.path = before

    @contextmanager
    def loop(self, name: str, count: Int) -> Iterator[None]:
        """Operations inside run ``count`` times."""
        before, self.loop_stack = self.loop_stack, (*self.loop_stack, (name, count))
        try:
            yield
        finally:
            self.loop_stack = before

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Operations inside belong to this phase; what a forward leaves alive for it counts as kept."""
        if phase == "backward":
            keep_what_lives(self._live.values(), "forward")
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Low-precision copies of parameters are made once inside and dropped at the end."""
        before, self._casts = self._casts, {}
        try:
            yield
        finally:
            self._casts = before

    def cast_of(self, leaf: Leaf) -> Array | None:
        """The low-precision copy of a parameter that this autocast has already made."""
        return self._casts.get(id(leaf))

    def remember_cast(self, leaf: Leaf, cast: Array) -> None:
        assert cast.memory is not None
        cast.memory.record.cached = True
        self._casts[id(leaf)] = cast

    # Operations

    def emit(
        self,
        name: str,
        kind: str,
        *,
        reads: Sequence[Array] = (),
        makes: Sequence[tuple[Int, str]] = (),
        changes: Sequence[Array] = (),
        flops: Int = 0,
        model_flops: Int = 0,
        category: str | None = None,
        basis: str = "exact",
        source: str = "",
    ) -> list[Array]:
        """One operation: its entry, and the arrays that it makes."""
        if category is None:
            category = "logits and loss" if self.path == "loss" else "scratch"
        made: list[Array] = []
        records: list[Storage] = []
        for elements, dtype in makes:
            record = Storage(elements * nbytes_of(dtype), self.phase, category, self.loop_stack)
            self._live[id(record)] = record
            records.append(record)
            made.append(Array(elements, dtype, Memory(record, self.released)))
        touched = [*reads, *changes]
        self.events.append(
            Event(
                records,
                name=name,
                path=self.path,
                phase=self.phase,
                kind=kind,
                flops=flops,
                model_flops=0 if self.phase == "recompute" else model_flops,
                read=sum(each.nbytes for each in touched),
                written=sum(each.nbytes for each in (*made, *changes)),
                dtype=touched[0].dtype if touched else "",
                loop=self.loop_stack,
                basis=basis,
                source=source or f"ledger.operations.{name}",
            )
        )
        return made

    def released(self, record: Storage) -> None:
        """Called when the last reference to a piece of memory is gone."""
        self._live.pop(id(record), None)
        if not self.events:
            return
        if len(self.events[-1].facts["loop"]) > len(self.loop_stack):
            self.emit("release", "allocate")  # after a loop, where the loop's own last entry would free in each round
        self.events[-1].freed.append((record, copies_left_behind(record, self.loop_stack)))

    # The graph

    def node(self, targets: Sequence[Target], saved: tuple[Array, ...], backward: Backward, *, sums: Sums = ()) -> Port:
        """A step of the graph; ``backward(gradient, *saved)`` gives one gradient per target."""
        return self.fork(targets, saved, backward, 1, sums=sums)[0]

    def fork(
        self, targets: Sequence[Target], saved: tuple[Array, ...], backward: Backward, outputs: int, *, sums: Sums = ()
    ) -> list[Port]:
        """A step of the graph with several outputs: its backward gets a gradient for each."""
        node = Node(self, targets, saved, backward, outputs, sums)
        if self.frame is None or not self.frame.collecting:
            self._nodes.append(node)
        return node.ports

    @contextmanager
    def checkpointing(self, frame: Frame) -> Iterator[None]:
        """Nodes made inside save nothing but their place in the frame."""
        assert self.frame is None, "checkpointed blocks do not nest"
        self.frame = frame
        try:
            yield
        finally:
            self.frame = None

    @contextmanager
    def recomputing(self, frame: Frame) -> Iterator[None]:
        """A block runs again for its backward, under an autocast of its own."""
        path, self.path = self.path, ""
        with self.checkpointing(frame), self.during("recompute"), self.autocast():
            yield
        keep_what_lives(self._live.values(), "recompute")
        self.path = path

    def start(self, value: Array, seed: Array) -> None:
        """Give the gradient that backward starts from."""
        assert isinstance(value.node, Port)
        value.node.gradient = seed

    def backward(self) -> None:
        """Run the graph from the last node back, each node once all gradients have come to it."""
        path, loop = self.path, self.loop_stack
        while self._nodes:
            node = self._nodes.pop()
            if all(each.gradient is None for each in node.ports):
                continue
            self.path, self.loop_stack = node.path, node.loop
            self._deliver(node.targets, node.run(self))
        self.path, self.loop_stack = path, loop

    def _deliver(self, targets: Sequence[Target], gradients: Gradients) -> None:
        for index, target in enumerate(targets):
            if isinstance(target, Leaf):
                self._to_leaf(target, _taken(gradients, index))
            elif target is not None:
                self._to_port(target, _taken(gradients, index))

    def _to_port(self, target: Port, gradient: Array) -> None:
        target.gradient = gradient if target.gradient is None else self._plus(target.gradient, gradient)

    def _to_leaf(self, leaf: Leaf, gradient: Array) -> None:
        leaf.arrived += 1
        if leaf.pending is not None:
            gradient = self._plus(leaf.pending, gradient)
            leaf.pending = None
        if leaf.arrived < leaf.uses:
            leaf.pending = gradient
            return
        leaf.arrived = 0
        if leaf.gradient is not None:
            elements = leaf.elements
            self.emit("add_", "elementwise", reads=[gradient], changes=[leaf.gradient], flops=elements)
            return
        assert gradient.memory is not None
        gradient.memory.record.category = "gradients"
        leaf.gradient = gradient

    def sum(self, x: Array, elements: Int) -> Array:
        """The sum of x over all but ``elements`` of its elements."""
        return self.emit("sum", "reduction", reads=[x], makes=[(elements, x.dtype)], flops=x.elements)[0]

    def _plus(self, a: Array, b: Array) -> Array:
        """Two gradients of one tensor; autograd adds them into a new one."""
        (total,) = self.emit("add", "elementwise", reads=[a, b], makes=[(a.elements, a.dtype)], flops=a.elements)
        return total

    # The ledger

    def ledger(self, *, resident: Amounts, parameters: Int, tokens: Int, micro_batches: Int) -> Ledger:
        """What was noted, as a ledger; the tape is done afterwards."""
        entries = tuple(each.entry() for each in self.events)
        self.events = []
        return Ledger(entries, resident, parameters, tokens, micro_batches, writer="closed form")


def _taken(gradients: Gradients, index: int) -> Array:
    """A gradient given away, so that its receiver holds the only reference."""
    gradient, gradients[index] = gradients[index], None
    assert gradient is not None
    return gradient
