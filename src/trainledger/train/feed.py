"""What the loop asks of whoever brings the batches, and the feed that a run file's data gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from trainledger.data.loader import Loader, open_loader
from trainledger.spec.run import Run
from trainledger.train.step import Batch


class Feed(Protocol):
    """Where batches come from: pure functions of the run and of data that ``fingerprint`` names."""

    @property
    def fingerprint(self) -> str:
        """Equal for data that gives equal batches; a run is not resumed on other data."""

    @property
    def tokenizer_definition(self) -> str | None:
        """The text of the tokenizer.json that is kept beside the run, if there is one."""

    @property
    def unigram_entropy(self) -> float | None:
        """Loss in nats of a model that knows only how often each token occurs, if known."""

    @property
    def validation_sequences(self) -> int:
        """How many sequences `validation` gives."""

    def batches(self, first_step: int) -> Iterator[Sequence[Batch]]:
        """The micro-batches of step index ``first_step`` (0 is the first), of the next step, and so on."""

    def validation(self) -> Iterable[Batch]:
        """The same held-out batches each time."""

    def close(self) -> None:
        """Let go of files and threads."""


OpenFeed = Callable[[Run, torch.device], Feed]


@dataclass(frozen=True)
class StoreFeed:
    """The token store of a run file's data, read ahead by its loader."""

    loader: Loader

    @property
    def fingerprint(self) -> str:
        return self.loader.store.fingerprint

    @property
    def tokenizer_definition(self) -> str:
        return self.loader.store.tokenizer().definition

    @property
    def unigram_entropy(self) -> float:
        return self.loader.unigram_entropy

    @property
    def validation_sequences(self) -> int:
        return min(self.loader.eval_sequences, self.loader.store.validation.sequences(self.loader.seq_len))

    def batches(self, first_step: int) -> Iterator[Sequence[Batch]]:
        return self.loader.batches(first_step)

    def validation(self) -> Iterable[Batch]:
        return self.loader.validation()

    def close(self) -> None:
        self.loader.close()


def open_store(run: Run, device: torch.device) -> StoreFeed:
    """The feed of ``run.data``, prepared where it is not yet; raises `InvalidInput` as preparing does."""
    return StoreFeed(open_loader(run, device))
