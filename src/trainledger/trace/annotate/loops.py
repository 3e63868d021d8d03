"""How often each line runs, what an iteration of each loop does, and loops whose graphs no backward ever uses.

A validation loop that collects its losses without ``no_grad`` is the usual one. The graph of each iteration is known by
the numbers of autograd's nodes; that a backward uses it later is seen as it runs.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from torch import Tensor

from trainledger.spec.units import counted, format_flops, format_nbytes
from trainledger.trace.annotate.annotation import LOOP, Mark
from trainledger.trace.annotate.graphs import Graph
from trainledger.trace.annotate.source import Files, Holder, Shape, added_to, attributes_of, sums_up, variables_of

# Parts of a line that have a frame of their own; in them the line goes on.
_WITHIN_A_LINE = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>")

_MOST_ENDS = 10_000  # of iterations, remembered of one loop


class Tally(NamedTuple):
    """FLOPs done and bytes moved so far, bytes live now; how many autograd nodes and optimizer steps there were."""

    flops: int
    moved: int
    live: int
    nodes: int
    steps: int


class Turns(NamedTuple):
    """A loop that was left: its head, the tally when it was entered, and when each iteration that made nodes ended."""

    file: str
    head: int
    entered: Tally
    ends: list[Tally]


@dataclass(slots=True)
class Loop:
    """What the iterations of one loop did, over all times it was entered.

    ``grown`` are live bytes gained between the ends of iterations, ``pairs`` between how many.
    """

    iterations: int = 0
    entered: int = 0
    flops: int = 0
    moved: int = 0
    grown: int = 0
    pairs: int = 0

    def done(self, before: Tally, after: Tally, live_at_last_end: int | None) -> None:
        self.iterations += 1
        self.flops += after.flops - before.flops
        self.moved += after.moved - before.moved
        if live_at_last_end is not None:
            self.grown += after.live - live_at_last_end
            self.pairs += 1

    @property
    def marks(self) -> tuple[Mark, ...]:
        """The work of an iteration, and what each leaves alive; none of a loop without any."""
        if not self.iterations or not (self.flops or self.moved):
            return ()
        flops, moved = self.flops // self.iterations, self.moved // self.iterations
        work = f"{format_flops(flops)} and {format_nbytes(moved)} moved each"
        grown = max(0, self.grown // self.pairs) if self.pairs else 0
        kept = f", {format_nbytes(grown)} more alive after each" if grown else ""
        return (Mark(LOOP, f"{counted(self.iterations, 'iteration')}, {work}{kept}", self.iterations, grown),)


class LineRuns:
    """Counts runs of lines in the files that are shown, on the thread that enters it.

    ``ended(file, line)`` is called when a line is done, ``left(turns, frame)`` when a loop is; ``tally`` gives what
    was done so far. Where a debugger or a coverage tool follows lines already, nothing is counted and ``counted`` is
    False.
    """

    def __init__(
        self,
        files: Files,
        ended: Callable[[str, int], None],
        tally: Callable[[], Tally],
        left: Callable[[Turns, FrameType], None] = lambda turns, frame: None,
    ) -> None:
        self.runs: Counter[tuple[str, int]] = Counter()
        self.loops: dict[tuple[str, int], Loop] = {}
        self.counted = True
        self._files = files
        self.ended = ended
        self.tally = tally
        self.left = left

    def __enter__(self) -> LineRuns:
        self.counted = sys.gettrace() is None
        if self.counted:
            sys.settrace(self._called)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.counted:
            sys.settrace(None)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        name = self._files.name(code.co_filename)
        if not name or code.co_name in _WITHIN_A_LINE:
            return None
        frame.f_trace_lines = True
        return _Running(self, name, self._files.shape(code.co_filename)).happened


@dataclass(slots=True)
class _Open:
    """A loop that a frame is in: since when its iteration runs, and whether it has reached the body."""

    head: int
    entered: Tally
    began: Tally
    in_body: bool = False
    last_end: int | None = None
    ends: list[Tally] = field(default_factory=list)


@dataclass(slots=True)
class _Running:
    """Follows the lines of one frame."""

    runs: LineRuns
    file: str
    shape: Shape
    line: int = 0
    open: list[_Open] = field(default_factory=list)

    def happened(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._reach(frame)
        elif event == "return":
            if self.line:
                self.runs.ended(self.file, self.line)
            while self.open:
                self._leave(frame)
        return self.happened

    def _reach(self, frame: FrameType) -> None:
        now = frame.f_lineno
        before, shape = self.line, self.shape
        statement = shape.first.get(now, now)
        if before:
            self.runs.ended(self.file, before)
        self.line = now
        if statement in shape.definitions:
            return
        first, last = shape.blocks.get(statement, (0, 0))
        if before and first <= before <= last:
            # A with statement is left
            return
        # A loop on one line
        again = now == before and shape.loops.get(now, (0, 0))[0] == now
        if again or not before or statement != shape.first.get(before, before):
            self.runs.runs[self.file, statement] += 1
        if self.open or statement in shape.loops:
            self._follow_loops(statement, frame)

    def _follow_loops(self, statement: int, frame: FrameType) -> None:
        while self.open:
            top = self.open[-1]
            first, last = self.shape.loops[top.head]
            if statement == top.head or first <= statement <= last:
                break
            self._leave(frame)
        if statement not in self.shape.loops:
            if self.open:
                self.open[-1].in_body = True
            return
        if self.open and self.open[-1].head == statement:
            top = self.open[-1]
            top.in_body = top.in_body or self.shape.loops[statement][0] == statement
            top.began, top.in_body = self._leave_iteration(top), False
            return
        if self.open:
            self.open[-1].in_body = True
        now = self.runs.tally()
        self.open.append(_Open(statement, now, now))
        self.runs.loops.setdefault((self.file, statement), Loop()).entered += 1

    def _leave(self, frame: FrameType) -> None:
        of = self.open.pop()
        self._leave_iteration(of)
        if of.ends:
            self.runs.left(Turns(self.file, of.head, of.entered, of.ends), frame)

    def _leave_iteration(self, of: _Open) -> Tally:
        now = self.runs.tally()
        if of.in_body:
            self.runs.loops[self.file, of.head].done(of.began, now, of.last_end)
            of.last_end = now.live
            if now.nodes > of.began.nodes and len(of.ends) < _MOST_ENDS:
                of.ends.append(now)
        return now


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
        numbers = [turns.entered.nodes, *(end.nodes for end in ends)]
        grown = -1
        for holder, tensors, iterations in self._holders(frame, numbers, turns):
            if grown < 0:
                held = self._graph.nbytes_between(numbers[0], numbers[-1])
                grown = min((last - first) // (len(ends) - 1), held // len(ends))
            own = max(tensor.untyped_storage().nbytes() for tensor in tensors)
            if grown - own <= 0:
                continue
            scalars, bounds = all(tensor.numel() == 1 for tensor in tensors), (numbers[0], numbers[-1])
            kept = Kept(f"{turns.file}:{turns.head}", holder, iterations, grown - own, bounds, scalars)
            kept.watched(tensors)
            self._found.append(kept)
            self._watched.append(kept)

    def ran(self, number: int) -> None:
        """A backward runs the node with this number."""
        for kept in self._watched:
            if kept.covers(number):
                kept.used = True

    @property
    def never_used(self) -> list[Kept]:
        """Of each loop, the largest that no backward has used."""
        largest: dict[str, Kept] = {}
        for kept in self._found:
            if not kept.used and (kept.loop not in largest or largest[kept.loop].nbytes < kept.nbytes):
                largest[kept.loop] = kept
        return list(largest.values())

    @property
    def unused_bounds(self) -> list[tuple[int, int]]:
        """The first and the last number of the nodes of all of them."""
        return [kept.bounds for kept in self._found if not kept.used]

    def _holders(
        self, frame: FrameType, numbers: list[int], turns: Turns
    ) -> Iterator[tuple[Holder, list[Tensor], int]]:
        """Variables of a frame that hold tensors with the graphs of several iterations."""

        body = self._files.shape(frame.f_code.co_filename).loops.get(turns.head, (0, 0))

        def of(value: Any) -> list[Tensor]:
            if not isinstance(value, (*_COLLECTIONS, dict)):
                return []
            found = {_iteration(tensor, numbers): tensor for tensor in _tensors_of(value)}
            return [tensor for iteration, tensor in found.items() if iteration is not None]

        for name, value in variables_of(frame):
            if isinstance(value, Tensor):
                if value.numel() == 1 and _iteration(value, numbers) is not None:
                    line, added = added_to(name, frame, self._files, within=body)
                    if line and sums_up(name, line, frame, self._files):
                        yield Holder(name, "variable", line, added), [value], len(turns.ends)
            elif isinstance(value, (*_COLLECTIONS, dict)):
                if len(tensors := of(value)) >= _FEWEST_HELD:
                    place = added_to(name, frame, self._files, within=body)
                    yield Holder(name, type(value).__name__, *place), tensors, len(tensors)
            else:
                for inner, held in attributes_of(value):
                    if len(tensors := of(held)) >= _FEWEST_HELD:
                        place = added_to(inner, frame, self._files, attribute=True, within=body)
                        yield Holder(f"{name}.{inner}", "attribute", *place), tensors, len(tensors)


def _iteration(tensor: Tensor, numbers: list[int]) -> int | None:
    """In which iteration the node of a tensor was made; None outside of them all."""
    if tensor.grad_fn is None:
        return None
    number = tensor.grad_fn._sequence_nr()
    return bisect_right(numbers, number) if numbers[0] <= number < numbers[-1] else None


def _tensors_of(value: Any, deep: bool = True) -> Iterator[Tensor]:
    """The tensors in a container and in the containers in it."""
    held = list(value.values()) if isinstance(value, dict) else list(value)
    for tensor in held[-_MOST_LOOKED_AT:]:
        if isinstance(tensor, Tensor):
            yield tensor
        elif deep and isinstance(tensor, (*_COLLECTIONS, dict)):
            yield from _tensors_of(tensor, deep=False)
