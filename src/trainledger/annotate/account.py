"""The account of a program: work and memory of each line, and of all lines together."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from trainledger.annotate.annotation import Shown, Work
from trainledger.annotate.copies import Copies
from trainledger.ledger.core.record import Event, Storage

MOST_SHOWN = 12  # tensors shown of one line


class Sum:
    """Work that grows."""

    __slots__ = ("allocated", "flops", "operations", "read", "written")

    def __init__(self) -> None:
        self.flops = self.read = self.written = self.allocated = self.operations = 0

    def add(self, flops: int, read: int, written: int, allocated: int) -> None:
        self.flops += flops
        self.read += read
        self.written += written
        self.allocated += allocated
        self.operations += 1

    @property
    def work(self) -> Work:
        return Work(self.flops, self.read, self.written, self.allocated, self.operations)


class LineAccount:
    """What one line did so far; ``live`` and ``live_of_backward`` are bytes it made that are there now."""

    __slots__ = (
        "alive", "alive_of_backward", "backward", "copies", "live", "live_of_backward", "most_alive", "own",
        "ran_backward", "ran_lines", "recompute", "shown", "views",
    )  # fmt: skip

    def __init__(self) -> None:
        self.own, self.backward, self.recompute = Sum(), Sum(), Sum()
        self.live = self.alive = self.most_alive = self.live_of_backward = self.alive_of_backward = 0
        self.views: Counter[str] = Counter()
        self.copies = Copies()
        self.ran_backward: Sum | None = None  # what a call of backward() ran, accounted for at the forward's lines
        self.ran_lines: set[str] = set()
        self.shown: dict[Shown, None] = {}


class Account:
    """Adds up operations and memory by line; ``gone`` is called with each piece of memory that was freed.

    ``live`` and ``most`` are bytes live now and at most, without those that were live before the program.
    """

    def __init__(self) -> None:
        self.lines: dict[str, LineAccount] = {}
        self.total = Sum()
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
        found = self.lines.get(line)
        if found is None:
            found = self.lines[line] = LineAccount()
        return found

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

    def freed(self, record: Storage) -> None:
        """Memory was freed, at any moment: it is accounted for when the next line or operation is."""
        if self.total.operations:  # what is freed before all operations was never live in the program
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
