"""What each line of a program costs: work, memory, marks, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from trainledger.report.document import Answer
from trainledger.spec.frozen import frozen
from trainledger.spec.units import format_flops, format_nbytes

VIEW, COPY, SYNC, BACKWARD, LOOP, OTHER = "view", "copy", "sync", "backward", "loop", "note"
PROBLEM, REMARK = "problem", "remark"


@dataclass
class Work:
    """What operations do together: FLOPs, bytes read, written and newly allocated, and how many they are.

    >>> Work(flops=8, read=2, written=2).intensity, Work(read=4).intensity, Work(flops=1).intensity
    (2.0, 0.0, None)
    """

    flops: int = 0
    read: int = 0
    written: int = 0
    allocated: int = 0
    operations: int = 0

    def add(self, flops: int, read: int, written: int, allocated: int, operations: int = 1) -> None:
        """Count more operations."""
        self.flops += flops
        self.read += read
        self.written += written
        self.allocated += allocated
        self.operations += operations

    def __add__(self, other: Work) -> Work:
        whole = replace(self)
        whole.add(**vars(other))
        return whole

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte moved; None where nothing is moved."""
        return self.flops / self.moved if self.moved else None


@frozen
class Mark:
    """Something to know of a line: a ``view`` (free), a ``copy``, a ``sync`` …; why in words, how often, how much."""

    kind: str
    why: str = ""
    times: int = 0
    nbytes: int = 0


@frozen
class Shown:
    """One tensor that a line made, or looked at anew: shape, strides in elements, dtype and device of the result."""

    operation: str
    kind: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str
    contiguous: bool


@frozen
class Line:
    """One line of a file. ``own`` is what it runs itself, ``backward`` what autograd runs for it later, and
    ``recompute`` what is computed a second time for it there (activation checkpointing).

    ``runs`` is how often it ran. ``alive`` are bytes that it made and that are still there when it is done for the
    last time, ``at_end`` those still there when the program ends, ``most_alive`` the most there were after any run of
    it, and ``alive_of_backward`` those that backward made for it, after the last backward.
    """

    number: int
    text: str
    runs: int = 0
    own: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    recompute: Work = field(default_factory=Work)
    alive: int = 0
    at_end: int = 0
    most_alive: int = 0
    alive_of_backward: int = 0
    marks: tuple[Mark, ...] = ()
    tensors: tuple[Shown, ...] = ()

    @property
    def work(self) -> Work:
        """All that is done for it."""
        return self.own + self.backward + self.recompute

    @property
    def busy(self) -> bool:
        """Whether there is anything to say of it."""
        return bool(self.work.operations or self.marks or self.alive)


@frozen
class File:
    """The lines of one file, all of them."""

    name: str
    lines: tuple[Line, ...]


@frozen
class Finding:
    """Something that costs and need not: where, what, how much of it, why, and what to write instead.

    ``weight`` is ``problem``, or ``remark`` for what may well be meant or can hardly be avoided. ``line`` is
    "file:line"; ``nbytes`` are those of all ``times`` together.
    """

    kind: str
    line: str
    what: str
    why: str
    instead: str
    times: int = 1
    nbytes: int = 0
    weight: str = PROBLEM
    expression: str = ""


@frozen
class Annotation(Answer, report="annotate"):
    """A program that ran under the tracer, line by line.

    ``elsewhere`` is the work that no line of the files shown caused; with it the lines sum to ``total``. ``ended`` is a
    sentence why the program stopped before its end, else empty. ``peak_nbytes`` is the most that was live at once.
    ``uncounted`` lists operators without a rule, with how often they ran and at which line first.
    """

    script: str
    files: tuple[File, ...]
    findings: tuple[Finding, ...]
    total: Work
    elsewhere: Work
    peak_nbytes: int
    live_nbytes: int
    steps: int
    backwards: int
    seconds: float
    fake: bool = False
    device: str = ""
    ended: str = ""
    outcome: str = "done"
    uncounted: tuple[tuple[str, int, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that are no mere remarks."""
        return tuple(each for each in self.findings if each.weight == PROBLEM)

    @property
    def remarks(self) -> tuple[Finding, ...]:
        return tuple(each for each in self.findings if each.weight == REMARK)

    def line(self, number: int, file: str = "") -> Line:
        """A line of the script, or of another file by the end of its name; LookupError where there is none."""
        for each in self.files:
            if each.name.endswith(file or self.script) and 1 <= number <= len(each.lines):
                return each.lines[number - 1]
        raise LookupError(f"no line {number} of {file or self.script} among {[each.name for each in self.files]}")

    def __repr__(self) -> str:
        head = (
            f"{self.script}: {format_flops(self.total.flops)}, {format_nbytes(self.total.moved)} moved, "
            f"{format_nbytes(self.peak_nbytes)} at most"
        )
        found = [f"{each.line}: {each.kind}: {each.what}" for each in self.findings]
        return "\n".join([head, *found, self.ended]).rstrip()
