"""What a compiled block keeps for its backward, and when each of its pieces of memory is live.

torch.compile traces forward and backward of a block as one graph and cuts it in two where the least is kept: a value is
kept, or recomputed in backward from what is. Taken here are the rules of AOTAutograd's partitioner (torch 2.13,
torch/_functorch/partitioners.py, ``solve_min_cut``, with a memory budget of 1): matmuls, attention kernels, random
numbers and concatenations are not recomputed, nor what a backward reads in a matmul, nor reductions, nor what would
tie kernels together that lie on two sides of a matmul; everything else is, where that keeps less. Pointwise
operations run in the kernel of their reader: their result has memory only where a matmul, the backward or something
outside of the block reads it, and may take that of an input of the same size that is no longer needed.

What is left out: the order in which Inductor puts matmuls (here: autograd's), and that it hands freed memory on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from trainledger.ledger.core.graph import Array
from trainledger.ledger.entry import Event, Int, Storage

FUSED = ("elementwise", "norm", "softmax", "copy", "random", "reduction")
# torch/_functorch/partitioners.py (2.13), is_fusible: "We can perform memory fusion into a cat, but cat cannot be a
# producer to a fusion".
NOT_AGAIN = ("cat", "stack", "constant_pad_nd")  # copies that the partitioner never recomputes
NEARER = 1.1  # by which a value costs more to keep for each operation that lies between it and the backward


class Operation:
    """One operation of a block: what it reads and makes. ``at`` is its place among all events of the step."""

    def __init__(self, event: Event, touched: Sequence[Array]) -> None:
        self.event = event
        self.at = event.at
        self.name, self.kind = event.facts["name"], event.facts["kind"]
        self.fused = self.kind in FUSED
        self.reads = [array.memory.record for array in touched if array.memory is not None]
        self.made = list(event.allocated)
        self.elements = [array.elements for array in touched]

    @property
    def has_statistics(self) -> bool:
        """Whether the first result is computed of the others: of a row's mean and deviation, or of a random mask."""
        return self.kind in ("norm", "random") and self.event.facts["phase"] != "backward"

    @property
    def small(self) -> list[Storage]:
        """The sums over rows among its results: a kernel that sums writes them, for any reader."""
        if self.kind == "reduction":
            return self.made
        return self.made[1:] if self.kind == "norm" and self.has_statistics else []


def once(operations: Sequence[Operation], same: dict[int, Storage]) -> list[Operation]:
    """The operations without those that do what an earlier one has done: copies of one value in one format.

    ``same`` maps the result of each that is left out to its replacement, and learns of these.
    """
    seen: dict[tuple[int, ...], Operation] = {}
    left = []
    for operation in operations:
        operation.reads = [same.get(id(read), read) for read in operation.reads]
        first = operation
        if operation.name == "_to_copy" and operation.reads:
            first = seen.setdefault(tuple(map(id, operation.reads)), operation)
        if first is operation:
            left.append(operation)
        else:
            same[id(operation.made[0])] = first.made[0]
    return left


class Values:
    """The values of a forward as a graph of pieces of memory."""

    def __init__(self, forward: Sequence[Operation]) -> None:
        self.maker: dict[int, Operation] = {}
        self.inputs: dict[int, list[Storage]] = {}
        self.users: dict[int, list[Operation]] = {}
        self.order: dict[int, int] = {}
        self.storages: dict[int, Storage] = {}
        for order, operation in enumerate(forward):
            self.order[id(operation)] = order
            for read in operation.reads:
                self.storages[id(read)] = read
                self.users.setdefault(id(read), []).append(operation)
            for made in operation.made:
                self.storages[id(made)] = made
                self.maker[id(made)] = operation
                self.inputs[id(made)] = list(self._inputs_of(operation, made))

    @staticmethod
    def _inputs_of(operation: Operation, made: Storage) -> Iterator[Storage]:
        """What a value is computed of: results of row-wise kernels of their input and of its statistics or mask."""
        yield from operation.reads
        if made is operation.made[0] and operation.has_statistics:
            yield from operation.made[1:]

    def kept(self, backward: Sequence[Operation]) -> set[int]:
        """The pieces of memory that are kept for a backward, those from outside included."""
        needed: dict[int, bool] = {}  # whether backward reads it outside of a fused kernel
        for operation in backward:
            for read in operation.reads:
                if id(read) in self.storages:
                    needed[id(read)] = needed.get(id(read), False) or not operation.fused
        fixed = {storage for storage in self.storages if storage not in self.maker or self._is_fixed(storage)}
        # "If a node must be materialized in the backwards pass, then recomputing it is never free"
        # (ban_if_materialized_backward).
        fixed |= {each for each, whole in needed.items() if whole}
        # ban_if_used_far_apart: recomputed, such a value would tie kernels together that lie on two sides of a matmul.
        fixed |= self._far_apart()
        distances = self._distances(needed)
        costs = {storage: self._cost(storage, needed, distances) for storage in self.storages}
        edges = [(id(one), each) for each, inputs in self.inputs.items() for one in inputs]
        return values_to_keep(costs, edges, fixed, needed)

    def _is_fixed(self, value: int) -> bool:
        """Whether a value is never recomputed."""
        operation = self.maker[value]
        if not operation.fused or operation.name in NOT_AGAIN:
            return True
        beside = operation.has_statistics and self.storages[value] is not operation.made[0]
        if not beside and operation.kind != "reduction":
            return False
        read = sum(typical(storage.nbytes) for storage in operation.reads)
        # "If the output of an op is 4x smaller (arbitrary choice), then we don't allow recomputation" (partitioners.py,
        # ban_if_reduction): saved statistics are small, and normalizations are not run again.
        return operation.kind == "random" or 4 * typical(self.storages[value].nbytes) < read

    def _far_apart(self) -> set[int]:
        """Values made in a fused kernel of something that is read before a matmul as well."""
        found: set[int] = set()
        for value, users in self.users.items():
            if value not in self.maker or not self.maker[value].fused:
                continue
            last = max(self.order[id(user)] for user in users)
            first = self._first_matmul(users, last)
            for user in users:
                if user.fused and self.order[id(user)] > first:
                    found.update(id(made) for made in user.made)
        return found

    def _first_matmul(self, users: Iterable[Operation], last: int) -> int:
        waiting = {self.order[id(each)]: (each, True) for each in users}
        while waiting:
            order = min(waiting)
            operation, fused = waiting.pop(order)
            if not fused:
                return order
            for user in (user for made in operation.made for user in self.users.get(id(made), ())):
                at = self.order[id(user)]
                if at <= last:
                    waiting[at] = (user, operation.fused and user.fused and waiting.get(at, (user, True))[1])
        return last

    def _distances(self, needed: Iterable[int]) -> dict[int, int]:
        """How many operations lie between each value and the backward."""
        distances = dict.fromkeys(needed, 1)
        for value in reversed(list(self.inputs)):
            if value in distances:
                for storage in self.inputs[value]:
                    distances[id(storage)] = min(distances.get(id(storage), 100), distances[value] + 1)
        return distances

    def _cost(self, value: int, needed: dict[int, bool], distances: dict[int, int]) -> float:
        # 1.1 ** dist_from_bw, at most 100, is the partitioner's "heuristic to bias towards nodes closer to the
        # backwards pass"; what a fused kernel would not have written counts twice (is_materialized).
        nbytes = typical(self.storages[value].nbytes) * NEARER ** min(distances.get(value, 100), 100)
        maker = self.maker.get(value)
        fused = maker is not None and maker.fused and not needed.get(value, False)
        return nbytes * (2 if fused and all(operation.fused for operation in self.users.get(value, ())) else 1)

    def sources(self, value: Storage, held: set[int]) -> Iterator[Storage]:
        """What is in memory and what a value is computed of: itself, where it is."""
        waiting, seen = [value], set()
        while waiting:
            each = waiting.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            if id(each) in held or id(each) not in self.maker:
                yield each
            else:
                waiting += self.inputs[id(each)]


def typical(nbytes: Int) -> float:
    """A number for comparisons: of many sizes their mean, of a formula that with usual sizes."""
    if isinstance(nbytes, int | float):
        return float(nbytes)
    if hasattr(nbytes, "free_symbols"):
        return float(
            nbytes.xreplace({free_symbol: _USUAL.get(str(free_symbol), 64) for free_symbol in nbytes.free_symbols})
        )
    return float(nbytes.mean())


_USUAL = {"B": 8, "T": 2048, "S": 2048, "V": 32768, "D": 4096, "F": 12288, "H": 32, "G": 32, "K": 128}


Value = TypeVar("Value", bound=Hashable)
_NEVER = float("inf")


def values_to_keep(
    costs: Mapping[Value, float], edges: Iterable[tuple[Value, Value]], fixed: Iterable[Value], needed: Iterable[Value]
) -> set[Value]:
    """Of values that each cost something to keep, those that are kept, so that what is ``needed`` can be made of them.

    ``edges`` go from a value to what is computed of it; ``fixed`` are those that cannot be computed again. Of cuts that
    cost the same it is the one nearest to what is needed (as networkx's, which PyTorch's partitioner takes).

    >>> values_to_keep({"x": 4, "half": 2, "y": 4}, [("x", "half"), ("half", "y")], ["x"], ["y"])
    {'half'}
    """
    graph: dict[object, dict[object, float]] = {"source": {}, "sink": {}}

    def edge(a: object, b: object, capacity: float) -> None:
        graph.setdefault(a, {})[b] = graph.get(a, {}).get(b, 0) + capacity
        graph.setdefault(b, {}).setdefault(a, 0)

    for value, cost in costs.items():
        edge(("in", value), ("out", value), cost)
    for a, b in edges:
        edge(("out", a), ("in", b), _NEVER)
    for value in fixed:
        edge("source", ("in", value), _NEVER)
    for value in needed:
        edge(("out", value), "sink", _NEVER)
    while (path := _augmenting(graph)) is not None:
        most = min(graph[here][there] for here, there in path)
        for here, there in path:
            graph[here][there] -= most
            graph[there][here] += most
    behind = _reaching_sink(graph)
    return {each for each in costs if ("in", each) not in behind and ("out", each) in behind}


def _augmenting(graph: dict[object, dict[object, float]]) -> list[tuple[object, object]] | None:
    """A shortest path from source to sink with capacity left on it."""
    came: dict[object, object] = {"source": None}
    waiting: deque[object] = deque(["source"])
    while waiting and "sink" not in came:
        node = waiting.popleft()
        for other, capacity in graph[node].items():
            if capacity > 0 and other not in came:
                came[other] = node
                waiting.append(other)
    if "sink" not in came:
        return None
    path: list[tuple[object, object]] = []
    node = "sink"
    while (before := came[node]) is not None:
        path.append((before, node))
        node = before
    return path


def _reaching_sink(graph: dict[object, dict[object, float]]) -> set[object]:
    """The nodes from which something more could still flow to the sink."""
    found: set[object] = {"sink"}
    waiting: list[object] = ["sink"]
    while waiting:
        node = waiting.pop()
        for other in graph[node]:
            if other not in found and graph[other][node] > 0:
                found.add(other)
                waiting.append(other)
    return found
