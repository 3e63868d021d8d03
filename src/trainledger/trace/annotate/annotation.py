"""What each line of a program costs: the answer, and the account that adds it up while the program runs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from trainledger.ledger.entry import Event, Storage
from trainledger.report.document import Answer
from trainledger.spec.frozen import frozen
from trainledger.spec.units import counted, format_flops, format_nbytes
from trainledger.trace.annotate.copies import Copies

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
class Annotation(Answer, report="pages.annotate"):
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
        return tuple(finding for finding in self.findings if finding.weight == PROBLEM)

    @property
    def remarks(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.weight == REMARK)

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
        found = [f"{finding.line}: {finding.kind}: {finding.what}" for finding in self.findings]
        return "\n".join([head, *found, self.ended]).rstrip()


MOST_SHOWN = 12  # tensors shown of one line


@dataclass(slots=True)
class LineAccount:
    """What one line did so far; ``live`` and ``live_of_backward`` are bytes it made that are there now.

    ``ran_backward`` is what a call of backward() ran, accounted for at the ``ran_lines`` of the forward.
    """

    own: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    recompute: Work = field(default_factory=Work)
    live: int = 0
    alive: int = 0
    most_alive: int = 0
    live_of_backward: int = 0
    alive_of_backward: int = 0
    views: Counter[str] = field(default_factory=Counter)
    copies: Copies = field(default_factory=Copies)
    ran_backward: Work | None = None
    ran_lines: set[str] = field(default_factory=set)
    shown: dict[Shown, None] = field(default_factory=dict)

    @property
    def marks(self) -> list[Mark]:
        """Views, copies by their reason, and what a call of backward() ran."""
        marks = [Mark(VIEW, ", ".join(self.views), self.views.total())] if self.views else []
        copies: dict[str, Mark] = {}
        for (why, _, inside, backward), copy in self.copies.items():
            what = f"{why}, {copy.source} to {copy.to}" if why == "dtype" else why
            where = " in backward" if backward else f" inside {inside}" if inside else ""
            why_and_where = f"{what}{f' by {copy.call}' if copy.call and not inside else ''}{where}"
            before = copies.get(why_and_where, Mark(COPY))
            copies[why_and_where] = Mark(COPY, why_and_where, before.times + copy.times, before.nbytes + copy.nbytes)
        marks += copies.values()
        ran = self.ran_backward
        if ran is not None and ran.operations:
            lines = counted(len(self.ran_lines - {""}), "line")
            what = f"ran {format_flops(ran.flops)} for {lines}, shown at those lines"
            marks.append(Mark(BACKWARD, what, ran.operations, ran.allocated))
        return marks


class Account:
    """Adds up operations and memory by line; ``gone`` is called with each piece of memory that was freed.

    ``live`` and ``most`` are bytes live now and at most, without those that were live before the program.
    """

    def __init__(self) -> None:
        self.lines: dict[str, LineAccount] = {}
        self.total = Work()
        self.live = self.most = 0
        self.gone: Callable[[Storage], None] = lambda _: None
        self._freed: deque[Storage] = deque()  # and not yet accounted for
        self._of_backward: set[str] = set()
        self._changed: set[str] = set()  # lines that have not ended since
        self._at: dict[Storage, tuple[str, bool, int]] = {}  # live memory: line, whether of backward, bytes

    def of(self, line: str, *, changed: bool = False) -> LineAccount:
        """The account of "file:line"; that of "" is of what no line shown caused.

        A line that is ``changed`` is seen to when it ends.
        """
        if changed:
            self._changed.add(line)
        line_account = self.lines.get(line)
        if line_account is None:
            line_account = self.lines[line] = LineAccount()
        return line_account

    def take(self, event: Event) -> LineAccount:
        """Account for an operation at its line."""
        self.settle()
        facts = event.facts
        name = facts["line"]
        line = self.of(name)
        phase = facts["phase"]
        allocated = 0
        for record in event.allocated:
            allocated += record.nbytes
            self._at[record] = (name, phase == "backward", record.nbytes)
        into = line.backward if phase == "backward" else line.recompute if phase == "recompute" else line.own
        amounts = (facts["flops"], facts["read"], facts["written"], allocated)
        into.add(*amounts)
        self._changed.add(name)
        self.total.add(*amounts)
        if allocated:
            if phase == "backward":
                line.live_of_backward += allocated
                self._of_backward.add(name)
            else:
                line.live += allocated
            self.live += allocated
            self.most = max(self.most, self.live)
        return line

    def appear(self, event: Event) -> None:
        """Memory is there that no operation has made, such as that of a file that was read."""
        self.settle()
        name = event.facts["line"]
        line = self.of(name, changed=True)
        for record in event.allocated:
            self._at[record] = (name, False, record.nbytes)
            line.live += record.nbytes
            self.live += record.nbytes
            for work in (line.own, self.total):
                work.add(0, 0, 0, record.nbytes, operations=0)
        self.most = max(self.most, self.live)

    def freed(self, record: Storage) -> None:
        """Memory was freed, at any moment: it is accounted for when the next line or operation is."""
        if (
            self.total.operations or record in self._at
        ):  # what is freed before all operations was never live in the program
            self._freed.append(record)

    def settle(self) -> None:
        """Account for memory that was freed since the last operation."""
        while self._freed:
            record = self._freed.popleft()
            self.live -= record.nbytes
            name, of_backward, nbytes = self._at.pop(record, ("", False, 0))
            if nbytes:
                line = self.of(name, changed=True)
                if of_backward:
                    line.live_of_backward -= nbytes
                    self._of_backward.add(name)
                else:
                    line.live -= nbytes
            self.gone(record)

    def end_line(self, file: str, number: int) -> None:
        """Note what is alive of a line when it is done, and of all that backward ran if it is a line that called it."""
        self.settle()
        if not self._changed:  # most lines of plain Python
            return
        name = f"{file}:{number}"
        if name not in self._changed:
            return
        self._changed.discard(name)
        line = self.lines[name]
        line.alive = line.live
        line.most_alive = max(line.most_alive, line.live)
        if line.ran_backward is not None:
            for each in self._of_backward:
                self.lines[each].alive_of_backward = self.lines[each].live_of_backward
            self._of_backward.clear()
