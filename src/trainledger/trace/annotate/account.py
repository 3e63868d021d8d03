"""The account of a program: work and memory of each line, and of all lines together."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from trainledger.ledger.core.record import Event, Storage
from trainledger.trace.annotate.annotation import Shown, Work
from trainledger.trace.annotate.copies import Copies

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

    def appear(self, event: Event) -> None:
        """Memory is there that no operation has made, such as that of a file that was read."""
        self.settle()
        name = event.facts["line"]
        line = self.of(name, changed=True)
        for record in event.allocated:
            self._at[record] = (name, False, record.nbytes)
            line.live += record.nbytes
            self.live += record.nbytes
            for each in (line.own, self.total):
                each.add(0, 0, 0, record.nbytes, operations=0)
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
