"""A training step followed by sizes alone: what autograd would run, keep and free, without a single number.

Operations of `ledger.ops.operations` act on `Array`s, which have a size and a format but no values, and leave
entries behind. The lifetime of an array is the lifetime of the Python references to it, and a node of the
graph refers to what its backward needs: as in PyTorch. So blocks written here the way they are written in
torch have the same live bytes at every operation, and sizes may be ints, arrays or symbols.

Loops are followed once: `loop(name, count)` says that what runs inside runs ``count`` times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainledger.dtypes import nbytes_in
from trainledger.ledger.core.arithmetic import summed
from trainledger.ledger.core.array import Array, Leaf, Memory, Port, Target
from trainledger.ledger.core.node import Backward, Gradients, Node, Sums, taken
from trainledger.ledger.core.record import Event, Loop, Storage, copies_left_behind, keep_what_lives
from trainledger.ledger.entry import Amounts, Int
from trainledger.ledger.ledger import Ledger
from trainledger.spec.precision import Precision

if TYPE_CHECKING:
    from trainledger.ledger.memory.checkpointing import Frame, Offload
    from trainledger.ledger.memory.compiled.blocks import Units
    from trainledger.ledger.memory.compiled.kernels import Compiled
    from trainledger.ledger.parallel.fully_sharded import FullySharded


class Tape:
    """Collects the entries of a step in a precision. ``backend`` (of `spec.kernels.KERNELS`) says which kernels run."""

    def __init__(self, precision: Precision, backend: str = "cpu") -> None:
        self.precision = precision
        self.compute_dtype = precision.compute
        self.backend = backend
        # A CPU multiplies fp32 in fp32 whatever it is allowed to do.
        self._fp32_rate = precision.rate if backend != "cpu" and precision.rate else "fp32"
        self.events: list[Event] = []
        self.phase = "forward"
        self.path = ""
        self.loop_stack: Loop = ()
        self.frame: Frame | None = None
        self.offload: Offload | None = None
        self.category: str | None = None
        self.sharded: FullySharded | None = None
        self.compiled: Compiled | None = None
        self.units: Units | None = None
        self._forgetting = False
        self._held: list[Array] = []
        self._apart: dict[Leaf, Array] | None = None
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
        **more: Any,
    ) -> list[Array]:
        """One operation: its entry, and the arrays that it makes; ``more`` are other fields of the entry."""
        if self.frame is not None:
            known = self.frame.recall(name)
            if known is not None:
                return known
        if category is None:
            of_loss = self.path == "loss" or self.path.endswith(".loss")
            category = self.category or ("logits and loss" if of_loss else "scratch")
        made: list[Array] = []
        records: list[Storage] = []
        for elements, dtype in makes:
            record = Storage(nbytes_in(elements, dtype), self.phase, category, self.loop_stack)
            self._live[id(record)] = record
            records.append(record)
            made.append(Array(elements, dtype, Memory(record, self.released), nbytes=record.nbytes))
        touched = [*changes, *reads]  # as torch has its arguments
        self.events.append(
            Event(
                records,
                name=name,
                path=self.path,
                phase=self.phase,
                kind=kind,
                flops=flops,
                model_flops=0 if self.phase == "recompute" else model_flops,
                read=0 if kind == "allocate" else summed(each.nbytes for each in touched),
                written=0 if kind == "allocate" else summed(each.nbytes for each in (*made, *changes)),
                dtype=self._rate_of(kind, [*changes, *reads]),  # torch names first what it changes
                loop=self.loop_stack,
                basis=basis,
                source=source or f"ledger.operations.{name}",
                **more,
            )
        )
        if self.compiled is not None:
            self.compiled.notice(self.events[-1], reads, changes)
            if self.units is not None:
                self.units.notice(self.events[-1], len(self.events) - 1, reads, changes)
        if self.frame is not None:
            self.frame.notice(name, made)
        return made

    def _rate_of(self, kind: str, touched: Sequence[Array]) -> str:
        """The format an operation works in: that of its first input, fp32 products at the rate they may run at."""
        if not touched:
            return ""
        dtype = touched[0].dtype
        return self._fp32_rate if dtype == "fp32" and kind in ("matmul", "attention") else dtype

    def let_go(self, array: Array) -> None:
        """The last operation frees what an array of an earlier loop refers to: once in each round of its own loop."""
        memory = array.memory
        assert memory is not None
        self._live.pop(id(memory.record), None)
        self.events[-1].freed.append((memory.record, 1))
        memory.released = lambda record: None

    def released(self, record: Storage) -> None:
        """Called when the last reference to a piece of memory is gone."""
        self._live.pop(id(record), None)
        if not self.events:
            return
        if self.events[-1].facts["loop"] != self.loop_stack:
            self.emit("release", "allocate")  # the last entry runs in another loop and would free in each round of that
        self.events[-1].freed.append((record, copies_left_behind(record, self.loop_stack)))

    # The graph

    def node(
        self,
        targets: Sequence[Target],
        saved: tuple[Array, ...],
        backward: Backward,
        *,
        sums: Sums = (),
        formats: Sequence[str] = (),
    ) -> Port | None:
        """A step of the graph; ``backward(gradient, *saved)`` gives a gradient per target (any, where that is None)."""
        return self.fork(targets, saved, backward, 1, sums=sums, formats=formats)[0]

    def fork(
        self,
        targets: Sequence[Target],
        saved: tuple[Array, ...],
        backward: Backward,
        outputs: int,
        *,
        sums: Sums = (),
        formats: Sequence[str] = (),
    ) -> Sequence[Port | None]:
        """A step of the graph with several outputs: its backward gets a gradient for each.

        Where no gradient is wanted there is no step, nothing is saved, and None stands for its outputs.
        """
        if all(each is None for each in targets):
            return [None] * outputs
        if self._forgetting:
            return [Port() for _ in range(outputs)]
        node = Node(self, targets, saved, backward, outputs, sums, formats)
        if self.frame is None or not self.frame.collecting:
            self._nodes.append(node)
            for each in targets:
                if isinstance(each, Leaf):
                    each.uses += 1
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

    def hold(self, arrays: Sequence[Array]) -> None:
        """Keep arrays alive until the backward is over."""
        self._held += arrays

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Operations inside make no graph and save nothing."""
        before, self.frame, self._forgetting = self.frame, None, True
        try:
            yield
        finally:
            self.frame, self._forgetting = before, False

    @contextmanager
    def holding(self, category: str) -> Iterator[None]:
        """What is made inside belongs to this category unless it turns out to be a gradient."""
        before, self.category = self.category, category
        try:
            yield
        finally:
            self.category = before

    @contextmanager
    def offloading(self, offload: Offload) -> Iterator[None]:
        """What nodes made inside save goes to host memory."""
        self.offload = offload
        try:
            yield
        finally:
            self.offload = None

    @contextmanager
    def apart(self) -> Iterator[dict[Leaf, Array]]:
        """A graph of its own, whose backward runs inside a forward: the gradients of leaves are put into a dict."""
        before, self._nodes, self._apart = self._nodes, [], {}
        try:
            yield self._apart
        finally:
            self._nodes, self._apart = before, None

    def set_aside(self) -> list[Node]:
        """The graph so far, for a backward that comes later (`take_up`)."""
        nodes, self._nodes = self._nodes, []
        self._count_uses(nodes, -1)
        return nodes

    def take_up(self, nodes: list[Node]) -> None:
        """Go on with a graph that was set aside."""
        assert not self._nodes
        self._nodes = nodes
        self._count_uses(nodes, 1)

    @staticmethod
    def _count_uses(nodes: list[Node], change: int) -> None:
        for node in nodes:
            for each in node.targets:
                if isinstance(each, Leaf):
                    each.uses += change

    def start(self, value: Array, seed: Array) -> None:
        """Give the gradient that backward starts from."""
        assert isinstance(value.node, Port)
        value.node.gradient = seed

    def backward(self, path: str | None = None) -> None:
        """Run the graph from the last node back, each node once all gradients have come to it.

        Each node's operations belong to the module path that it was made at, or all to ``path``.
        """
        before, loop = self.path, self.loop_stack
        while self._nodes:
            node = self._nodes.pop()
            if all(each.gradient is None for each in node.ports):
                continue
            self.path, self.loop_stack = node.path if path is None else path, node.loop
            if self.units is not None:
                self.units.now = node.unit
            self._deliver(node.targets, node.run(self))
        self.path, self.loop_stack = before, loop
        if self.units is not None:
            self.units.now = None
        if path is None:
            self._held.clear()

    def _deliver(self, targets: Sequence[Target], gradients: Gradients) -> None:
        for index, target in enumerate(targets):
            if isinstance(target, Leaf):
                self._to_leaf(target, taken(gradients, index))
            elif target is not None:
                self._to_port(target, taken(gradients, index))

    def _to_port(self, target: Port, gradient: Array) -> None:
        target.gradient = gradient if target.gradient is None else self._plus(target.gradient, gradient)

    def _to_leaf(self, leaf: Leaf, gradient: Array) -> None:
        if self._apart is not None:
            leaf.uses -= 1
            self._apart[leaf] = gradient
            return
        leaf.arrived += 1
        if leaf.pending is not None:
            gradient = self._plus(leaf.pending, gradient)
            leaf.pending = None
        if leaf.arrived < leaf.uses:
            leaf.pending = gradient
            return
        leaf.arrived = leaf.uses = 0
        if leaf.buffer is not None:
            self.emit("add_", "elementwise", reads=[gradient], changes=[leaf.buffer], flops=leaf.elements)
            return
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

    def cast(self, x: Array, dtype: str) -> Array:
        """x in another format, outside of the graph."""
        return self.emit("_to_copy", "copy", reads=[x], makes=[(x.elements, dtype)])[0]

    def _plus(self, a: Array, b: Array) -> Array:
        """Two gradients of one tensor; autograd adds them into a new one."""
        (total,) = self.emit("add", "elementwise", reads=[a, b], makes=[(a.elements, a.dtype)], flops=a.elements)
        return total

    # The ledger

    def ledger(
        self, *, resident: Amounts, parameters: Int, tokens: Int, micro_batches: Int, notes: tuple[str, ...] = ()
    ) -> Ledger:
        """What was noted, as a ledger; the tape is done afterwards."""
        if self.compiled is not None:
            self.compiled.finish()
        if self.units is not None:
            self.units.finish(self.events)
        entries = tuple(each.entry() for each in self.events)
        self.events = []
        return Ledger(entries, resident, parameters, tokens, micro_batches, writer="closed form", notes=notes)
