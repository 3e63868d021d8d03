"""How often each line runs, and what an iteration of each loop does."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from trainledger.trace.annotate.source import Files, Shape

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
            return  # a with statement is left
        again = now == before and shape.loops.get(now, (0, 0))[0] == now  # a loop on one line
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
