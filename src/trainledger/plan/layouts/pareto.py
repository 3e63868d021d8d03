"""Of very many bounded layouts those that are worth an account: the quickest, and those that save most memory."""

from __future__ import annotations

from typing import Any

MOST_TIMES_BEST = 4.0  # a layout so much slower than the best is on no Pareto front that matters


class Candidates:
    """Rows of (seconds, bytes, block, stages, variant, sharding), at most about twice ``most`` of them at a time."""

    def __init__(self, most: int) -> None:
        import numpy as np

        self.most = most
        self.slowest = np.inf
        self.best = np.inf
        self._rows: list[Any] = []
        self._waiting = 0
        self._front = np.zeros((0, 6))

    def add(self, seconds: Any, nbytes: Any, block: int, allowed: Any) -> None:
        """The layouts of a block that are ``allowed`` and fit, [ways, variants, shardings] each."""
        import numpy as np

        if not allowed.any():
            return
        self.best = min(self.best, float(seconds[allowed].min()))
        # Most can be rejected by bytes alone: those on the front that are quickest need most.
        most = self._front[0, 1] if len(self._front) else np.inf
        saves = (nbytes < most) & (seconds < MOST_TIMES_BEST * self.best)
        rows = _rows(seconds, nbytes, block, allowed & (saves | (seconds < self.slowest)))
        quick = rows[rows[:, 0] < self.slowest]
        if len(quick):
            self._rows.append(quick)
            self._waiting += len(quick)
            if self._waiting > 2 * self.most:
                self._cut()
        saves = rows[:, 0] < MOST_TIMES_BEST * self.best
        if len(self._front):
            # Of each time the least memory so far, of the layouts on the front that are no slower.
            place = np.searchsorted(self._front[:, 0], rows[:, 0], side="right") - 1
            saves &= rows[:, 1] < np.where(place < 0, np.inf, self._front[place, 1])
        if saves.any():
            rows = np.concatenate([self._front, rows[saves]])
            self._front = rows[pareto(rows[:, 0], rows[:, 1])]

    def _cut(self) -> None:
        import numpy as np

        rows = np.concatenate(self._rows) if self._rows else np.zeros((0, 6))
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))][: self.most]
        self._rows, self._waiting = [rows], len(rows)
        if len(rows) == self.most:
            self.slowest = rows[-1, 0]

    def quickest(self) -> Any:
        """The rows by seconds; of equal ones those that need less memory come first."""
        self._cut()
        return self._rows[0]

    def front(self) -> Any:
        """The rows that no other beats in both seconds and bytes, the quickest first."""
        return self._front


def _rows(seconds: Any, nbytes: Any, block: int, which: Any) -> Any:
    import numpy as np

    places = [each.astype(float) for each in np.nonzero(which)]
    return np.stack([seconds[which], nbytes[which], np.full(len(places[0]), float(block)), *places], axis=1)


def pareto(seconds: Any, nbytes: Any) -> Any:
    """The places of those that no other beats in both, the quickest first.

    >>> import numpy as np
    >>> pareto(np.array([3.0, 1.0, 2.0, 2.5]), np.array([1.0, 9.0, 4.0, 5.0])).tolist()
    [1, 2, 0]
    """
    import numpy as np

    order = np.lexsort((nbytes, seconds))
    least = np.minimum.accumulate(nbytes[order])
    first = np.ones(len(order), bool)
    first[1:] = nbytes[order][1:] < least[:-1]
    return order[first]
