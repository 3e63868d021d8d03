"""A training step from sizes alone: what autograd would run, keep and free, without values.

Operations of `ledger.ops.operations` act on `Array`s, which have a size and a dtype but no values, and write entries.
The lifetime of an array is the lifetime of the Python references to it, and a node of the graph refers to what its
backward needs: as in PyTorch. So blocks written here the way they are written in torch have the same live bytes at
every operation, and sizes may be ints, arrays or symbols.

Loops are followed once: `loop(name, count)` says that what runs inside runs ``count`` times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from trainledger.ledger.core.graph import (
    Array,
    Backward,
    GatheredAgain,
    Gradients,
    Leaf,
    Node,
    Port,
    Sums,
    Target,
    as_kept,
    pop_gradient,
)
from trainledger.ledger.core.recording import Hook, Recording
from trainledger.ledger.entry import GRADIENTS_ON_HOST, Int, keep_what_lives
from trainledger.spec.precision import Precision


class Tape(Recording):
    """A recording with the graph that autograd would build, and its backward."""

    def __init__(self, precision: Precision, backend: str = "cpu", hooks: Sequence[Hook] = ()) -> None:
        super().__init__(precision, backend, hooks)
        self.graph = True  # whether operations make one
        self.sends_gradients = False  # to host memory, each as soon as all of it is there
        self._forgetting = False
        self._recomputing = False
        self._held: list[Array] = []
        self._apart: dict[Leaf, Array] | None = None
        self._nodes: list[Node] = []

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

        Where no gradient is wanted there is no step, nothing is saved, and its outputs are None.
        """
        if not self.graph or all(target is None for target in targets):
            return [None] * outputs
        if self._forgetting:
            return [Port() for _ in range(outputs)]
        if self._recomputing:  # the graph is there, only what it saves is collected
            if saved:
                self._pack(saved)
            return [Port() for _ in range(outputs)]
        node = Node(targets, backward, outputs, sums, formats, (self.path, self.loop_stack, self._block))
        if saved:
            node.packed_by, node.saved = self._pack(saved)
        self._nodes.append(node)
        for target in targets:
            if isinstance(target, Leaf):
                target.uses += 1
        return node.ports

    def _pack(self, saved: tuple[Array, ...]) -> tuple[Hook | None, Any]:
        """What a node keeps of what it saves, and the innermost hook that has packed it."""
        for hook in reversed(self.hooks):
            packed = hook.saved(saved)
            if packed is not None:
                return hook, packed
        return None, as_kept(saved)

    @contextmanager
    def recomputing(self, hook: Hook) -> Iterator[None]:
        """A part is recomputed for its backward, under a separate autocast; the hook collects what is saved."""
        with self._inside(path="", _recomputing=True), self.hooked(hook), self.during("recompute"), self.autocast():
            yield
        keep_what_lives(self._live.values(), "recompute")

    def hold(self, arrays: Sequence[Array]) -> None:
        """Keep arrays alive until the backward is over."""
        if self.graph:
            self._held += arrays

    def without_graph(self) -> AbstractContextManager[None]:
        """Operations inside have no backward (torch.no_grad): nothing is saved, and nothing is recomputed."""
        return self._inside(graph=False)

    def forgetting(self) -> AbstractContextManager[None]:
        """Operations inside make no graph and save nothing."""
        return self._inside(_forgetting=True)

    @contextmanager
    def apart(self) -> Iterator[dict[Leaf, Array]]:
        """A separate graph, whose backward runs inside a forward: the gradients of leaves are put into a dict."""
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
        """Continue with a graph that was set aside."""
        assert not self._nodes
        self._nodes = nodes
        self._count_uses(nodes, 1)

    @staticmethod
    def _count_uses(nodes: list[Node], change: int) -> None:
        for node in nodes:
            for target in node.targets:
                if isinstance(target, Leaf):
                    target.uses += change

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
            if all(port.gradient is None for port in node.ports):
                continue
            self.path, self.loop_stack, self._block = node.path if path is None else path, node.loop, node.block
            self._deliver(node.targets, self._run(node))
        self.path, self.loop_stack, self._block = before, loop, None
        if path is None:
            self._held.clear()

    def _run(self, node: Node) -> Gradients:
        """Gradients for a node's targets; the incoming gradients and what it saved are freed afterwards."""
        incoming = [port.pop() for port in node.ports]
        hook, kept = node.packed_by, node.pop_saved()
        if hook is not None:
            kept = hook.unpacked(kept)
        saved = tuple(again.read() if isinstance(again, GatheredAgain) else again for again in kept)
        gradients = node.backward(*incoming, *saved)
        if hook is not None and hook.frees_before_sums:
            del saved, kept
        for index, elements in node.sums:
            if node.targets[index] is None:
                continue
            whole = pop_gradient(gradients, index)
            gradients[index] = self.sum(whole, elements)
            del whole
        for index, dtype in enumerate(node.formats):
            if node.targets[index] is None:
                continue
            wide = pop_gradient(gradients, index)
            gradients[index] = self.cast(wide, dtype) if wide.dtype != dtype else wide
            del wide
        node.packed_by = hook = None  # the last node of a checkpointed part frees its input before the gradients
        return gradients

    def _deliver(self, targets: Sequence[Target], gradients: Gradients) -> None:
        for index, target in enumerate(targets):
            if isinstance(target, Leaf):
                self._to_leaf(target, pop_gradient(gradients, index))
            elif target is not None:
                self._to_port(target, pop_gradient(gradients, index))

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
            if not leaf.fused:
                self.change("add_", leaf.buffer, gradient)
            return
        if self.sends_gradients:
            leaf.gradient = self.added_on_host(leaf.gradient, gradient)
            return
        if leaf.gradient is not None:
            self.change("add_", leaf.gradient, gradient)
            return
        leaf.gradient = gradient.of("gradients")

    def added_on_host(self, before: Array | None, gradient: Array) -> Array:
        """A gradient in host memory, added there to that of earlier micro-batches, which its copy must wait for."""
        # torch 2.13, foreach_reduce: the copy overlaps what comes next only where nothing on the host reads it.
        moved = self.moved("to_host", gradient, GRADIENTS_ON_HOST, overlap="compute" if before is None else "")
        if before is None:
            return moved.of_each_round()
        with self.on_the_host():
            self.change("add_", before, moved)
        return before

    def sum(self, x: Array, elements: Int) -> Array:
        """The sum of x over all but ``elements`` of its elements."""
        return self.make("sum", "reduction", x, elements=elements, flops=x.elements)

    def cast(self, x: Array, dtype: str) -> Array:
        """x in another format, outside of the graph."""
        return self.make("_to_copy", "copy", x, dtype=dtype)

    def _plus(self, a: Array, b: Array) -> Array:
        """Two gradients of one tensor; autograd adds them into a new one."""
        return self.pointwise("add", a, b)
