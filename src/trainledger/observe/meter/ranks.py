"""Which rank is slow: each tells the first what it computes in a step, through the store that ranks began with.

No collective is called, so nothing can wait: what has not come yet is looked for again at the next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from trainledger.observe.meter.phases import GRADIENT_WAIT
from trainledger.observe.meter.watch import WINDOW, Finding, slow_rank


class RankTimes:
    """The seconds that a rank computes, without waits for others, as a median over a window of steps."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._store = _store() if ranks > 1 else None
        self._own: deque[float] = deque(maxlen=WINDOW)
        self._asked: list[tuple[int, list[str]]] = []
        self._steps = 0
        self._slow = ""

    def exchange(self, step: int, phases: Mapping[str, float]) -> list[Finding]:
        """Take this rank's step; on the first rank, what is now known of all."""
        self._own.append(sum(each for name, each in phases.items() if name != GRADIENT_WAIT))
        self._steps += 1
        if self._store is None:
            return []
        if self._steps % WINDOW == 0:
            self._store.set(_key(step, self._rank), repr(median(self._own)))
            if self._rank == 0:
                self._asked.append((step, [_key(step, each) for each in range(self._ranks)]))
        return self._answered() if self._rank == 0 else []

    def _answered(self) -> list[Finding]:
        if not self._asked or self._store is None or not self._store.check(self._asked[0][1]):
            return []
        step, keys = self._asked.pop(0)
        found = slow_rank({rank: float(self._store.get(key)) for rank, key in enumerate(keys)}, step)
        for key in keys:
            self._store.delete_key(key)
        before, self._slow = self._slow, "" if found is None else found.sentence.split(" computes")[0]
        return [] if found is None or before == self._slow else [found]


def _key(step: int, rank: int) -> str:
    return f"trainledger/{step}/{rank}"


def _store() -> Any:
    """The store of the default group; None where this torch keeps it elsewhere."""
    from torch.distributed import distributed_c10d

    found = getattr(distributed_c10d, "_get_default_store", None)
    return None if found is None else found()
