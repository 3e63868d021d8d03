"""Loops after which the graphs of their iterations are still alive, though no backward ever uses them.

A validation loop that collects its losses without ``no_grad`` is the usual one. The graph of each iteration is known by
the numbers of autograd's nodes; that a backward uses it later is seen as it runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor

from trainledger.trace.annotate.graphs import Graph
from trainledger.trace.annotate.holders import Holder, added_to, attributes_of, sums_up, variables_of
from trainledger.trace.annotate.line_runs import Turns
from trainledger.trace.annotate.source import Files

_FEWEST = 4  # iterations
_FEWEST_HELD = 3  # iterations whose graphs are still there
_MOST_LOOKED_AT = 256  # elements of a container, the last ones
_MOST_WATCHED = 64  # loops whose nodes are looked for in backward passes
_COLLECTIONS = (list, tuple, set, deque)


@dataclass(slots=True)
class Kept:
    """Graphs that a loop left behind: who holds them, of how many iterations, and bytes besides what is held itself."""

    loop: str
    holder: Holder
    iterations: int
    each: int
    bounds: tuple[int, int]
    scalars: bool
    used: bool = False

    @property
    def nbytes(self) -> int:
        return self.each * self.iterations

    def covers(self, number: int) -> bool:
        """Whether a node with this number was made in the loop."""
        return self.bounds[0] <= number < self.bounds[1]

    def watched(self, tensors: list[Tensor]) -> None:
        """Notice when a backward passes one of the tensors."""
        for tensor in tensors:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._passed)

    def _passed(self, gradients: Any) -> None:
        self.used = True


class LoopGraphs:
    """Looks at each loop when it is left, and follows the graphs that it leaves until a backward uses them."""

    def __init__(self, files: Files, graph: Graph) -> None:
        self._files = files
        self._graph = graph
        self._found: list[Kept] = []
        self._watched: deque[Kept] = deque(maxlen=_MOST_WATCHED)

    def left(self, turns: Turns, frame: FrameType) -> None:
        """A loop is over. One with optimizer steps in it is looked at step by step instead."""
        ends = turns.ends
        if len(ends) < _FEWEST or ends[-1].steps != turns.entered.steps:
            return
        first, middle, last = ends[0].live, ends[len(ends) // 2].live, ends[-1].live
        if not first < middle < last:
            return
        numbers = [turns.entered.nodes, *(each.nodes for each in ends)]
        grown = -1
        for holder, tensors, iterations in self._holders(frame, numbers, turns):
            if grown < 0:
                held = self._graph.nbytes_between(numbers[0], numbers[-1])
                grown = min((last - first) // (len(ends) - 1), held // len(ends))
            own = max(each.untyped_storage().nbytes() for each in tensors)
            if grown - own <= 0:
                continue
            kept = Kept(
                f"{turns.file}:{turns.head}", holder, iterations, grown - own, (numbers[0], numbers[-1]),
                all(each.numel() == 1 for each in tensors),
            )  # fmt: skip
            kept.watched(tensors)
            self._found.append(kept)
            self._watched.append(kept)

    def ran(self, number: int) -> None:
        """A backward runs the node with this number."""
        for each in self._watched:
            if each.covers(number):
                each.used = True

    @property
    def never_used(self) -> list[Kept]:
        """Of each loop, the largest that no backward has used."""
        largest: dict[str, Kept] = {}
        for each in self._found:
            if not each.used and (each.loop not in largest or largest[each.loop].nbytes < each.nbytes):
                largest[each.loop] = each
        return list(largest.values())

    @property
    def unused_bounds(self) -> list[tuple[int, int]]:
        """The first and the last number of the nodes of all of them."""
        return [each.bounds for each in self._found if not each.used]

    def _holders(
        self, frame: FrameType, numbers: list[int], turns: Turns
    ) -> Iterator[tuple[Holder, list[Tensor], int]]:
        """Variables of a frame that hold tensors with the graphs of several iterations."""

        body = self._files.shape(frame.f_code.co_filename).loops.get(turns.head, (0, 0))

        def of(value: Any) -> tuple[list[Tensor], int]:
            found = {}
            for each in _tensors_of(value):
                at = _iteration(each, numbers)
                if at is not None:
                    found[at] = each
            return list(found.values()), len(found)

        for name, value in variables_of(frame):
            if isinstance(value, Tensor):
                if value.numel() == 1 and _iteration(value, numbers) is not None:
                    line, added = added_to(name, frame, self._files, within=body)
                    if line and sums_up(name, line, frame, self._files):
                        yield Holder(name, "variable", line, added), [value], len(turns.ends)
            elif isinstance(value, (*_COLLECTIONS, dict)):
                tensors, iterations = of(value)
                if iterations >= _FEWEST_HELD:
                    place = added_to(name, frame, self._files, within=body)
                    yield Holder(name, type(value).__name__, *place), tensors, iterations
            else:
                for inner, held in attributes_of(value):
                    tensors, iterations = of(held) if isinstance(held, (*_COLLECTIONS, dict)) else ([], 0)
                    if iterations >= _FEWEST_HELD:
                        place = added_to(inner, frame, self._files, attribute=True, within=body)
                        yield Holder(f"{name}.{inner}", "attribute", *place), tensors, iterations


def _iteration(tensor: Tensor, numbers: list[int]) -> int | None:
    """In which iteration the node of a tensor was made; None outside of them all."""
    if tensor.grad_fn is None:
        return None
    number = tensor.grad_fn._sequence_nr()
    return bisect_right(numbers, number) if numbers[0] <= number < numbers[-1] else None


def _tensors_of(value: Any, deep: bool = True) -> Iterator[Tensor]:
    """The tensors in a container and in the containers in it."""
    held = list(value.values()) if isinstance(value, dict) else list(value)
    for each in held[-_MOST_LOOKED_AT:]:
        if isinstance(each, Tensor):
            yield each
        elif deep and isinstance(each, (*_COLLECTIONS, dict)):
            yield from _tensors_of(each, deep=False)
