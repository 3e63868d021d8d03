"""What the loop asks of whoever brings the batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch

from trainledger.spec.run import Run
from trainledger.train.step import Batch


class Feed(Protocol):
    """Where batches come from; both calls must be pure functions of what the feed was made with."""

    @property
    def unigram_entropy(self) -> float | None:
        """Entropy in nats of a token drawn from the corpus without context, if known."""

    def batches(self, first_step: int) -> Iterator[Sequence[Batch]]:
        """The micro-batches of step index ``first_step`` (0 is the first), of the next step, and so on."""

    def validation(self) -> Iterable[Batch]:
        """The same held-out batches each time."""

    def close(self) -> None:
        """Let go of files and threads."""


OpenFeed = Callable[[Run, torch.device], Feed]
