"""Batches on several ranks: what one of them cannot read ends all of them with its sentence's exit code.

The others are already in a step that this rank has a part in. So it takes that step with a stand-in, and says what went
wrong where the ranks next agree, before any update is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from trainledger.engine.train.ranks import Ranks
from trainledger.engine.train.step import Batch
from trainledger.spec.run import Run


class Reading:
    """Reads for one rank; ``failed`` once it could not, until `refuse` has told all."""

    def __init__(self, run: Run, ranks: Ranks) -> None:
        self._run, self._ranks = run, ranks
        self._error: Exception | None = None

    @property
    def failed(self) -> bool:
        return self._error is not None

    def step(self, batches: Iterator[Sequence[Batch]]) -> Sequence[Batch]:
        """The next step's micro-batches, or others of their shapes; one rank alone raises what went wrong."""
        try:
            return next(batches)
        except Exception as error:
            self._keep(error)
            return [self._stand_in(self._run.device_batch)] * self._run.grad_accum

    def held_out(self, batches: Iterable[Batch], sequences: int) -> Iterator[Batch]:
        """Batches of so many sequences, or others of their shapes from where they cannot be read."""
        left = sequences
        try:
            for each in batches:
                left -= len(each[0])
                yield each
        except Exception as error:
            self._keep(error)
            while left > 0:
                rows = min(self._run.device_batch, left)
                left -= rows
                yield self._stand_in(rows)

    def refuse(self) -> None:
        """Raise on all ranks where one has failed: there its own error, elsewhere `EndedElsewhere`.

        All ranks must call this at the same point.
        """
        self._ranks.together(self._raise)

    def _keep(self, error: Exception) -> None:
        if self._ranks.size == 1:
            raise error
        self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _stand_in(self, rows: int) -> Batch:
        ids_BT = torch.zeros(rows, self._run.recipe.seq_len, dtype=torch.int64, device=self._ranks.device)
        return ids_BT, ids_BT
