"""Values that code read off fake tensors, where nobody knows them: how many, at which line, and what to say of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from trainledger.trace.recorder.source_lines import Lines


class Guesses:
    """Counts, by the user's line, values that were taken for 0.

    More than ``most`` at one line raise RuntimeError: a loop that waits for a value would never end.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._counts: Counter[str] = Counter()
        self._lines = Lines()

    def add(self) -> None:
        """One more, at the line that runs now."""
        line = self.line()
        self._counts[line] += 1
        if self._most is not None and self._counts[line] > self._most:
            raise RuntimeError(f"{line} has read more than {self._most:,} values that nobody knows")

    def line(self) -> str:
        """The line that runs now, in words where it is none of the user's."""
        return self._lines.here() or "a line that is not yours"

    def clear(self) -> None:
        """Begin anew."""
        self._counts.clear()

    def notes(self) -> Iterator[str]:
        """A sentence for each line."""
        for line, count in self._counts.items():
            values, are = ("value", "is") if count == 1 else ("values", "are")
            unknown = f"{count} {values} read at {line} {are} unknown and taken for 0"
            yield f"{unknown}: what depends on it may go another way"
