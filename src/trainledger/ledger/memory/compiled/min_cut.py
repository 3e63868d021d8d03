"""The cheapest values to keep so that others can be computed from them: a minimum cut (Ford and Fulkerson 1956)."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

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
