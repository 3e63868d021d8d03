"""A run small enough to train in a second, and batches that need no corpus: what the engine's tests stand on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from trainledger.engine.train.observer import Observer, TrainingState
from trainledger.engine.train.parallel.mesh import local, offset_of
from trainledger.engine.train.step import Batch, derive
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields, with_fields
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.recipe import Checkpoints, Evaluation, Recipe
from trainledger.spec.run import Run
from trainledger.spec.schedule import Cosine

TINY = from_fields(
    ModelSpec,
    {
        "vocab_size": 64,
        "d_model": 32,
        "n_layers": 2,
        "attention.n_heads": 4,
        "attention.n_kv_heads": 2,
        "feed_forward.d_ff": 48,
        "max_seq_len": 16,
    },
)
SHORT = Recipe(
    seq_len=16, global_batch=4, steps=6, learning_rate=1e-2, schedule=Cosine(warmup_steps=2),
    checkpoints=Checkpoints(every=2, keep_last=3), evaluation=Evaluation(every=3, sequences=4),
)  # fmt: skip


def tiny_run(model: dict[str, Any] | None = None, **recipe: Any) -> Run:
    """The tiny run with some fields of its model and recipe replaced."""
    return Run(model=with_fields(TINY, model or {}), recipe=with_fields(SHORT, recipe))


class CountingFeed:
    """Sequences that count upwards from a random start: learnable, and a pure function of (seed, step)."""

    fingerprint = "counting"
    tokenizer_definition: str | None = None
    unigram_entropy: float | None = float(np.log(64))
    end_id: int | None = 0  # where counting begins anew
    remarks: Sequence[str] = ()
    shares: Mapping[str, float] = {"": 1.0}

    def __init__(
        self, run: Run, device: torch.device, *, rank: int = 0, ranks: int = 1, progress: bool = False
    ) -> None:
        self.run, self.device = run, device
        self.rank, self.ranks = rank, ranks
        self.closed = False

    def sequences(self, seed: int, n_sequences: int) -> torch.Tensor:
        start_B1 = np.random.default_rng(seed).integers(0, self.run.model.vocab_size, (n_sequences, 1))
        ids_BT = (start_B1 + np.arange(self.run.recipe.seq_len + 1)) % self.run.model.vocab_size
        return torch.from_numpy(ids_BT).to(self.device)

    def micro_batches(self, ids_BT: torch.Tensor) -> list[Batch]:
        parts = torch.split(ids_BT, self.run.device_batch)
        return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in parts]

    @property
    def validation_sequences(self) -> Mapping[str, int]:
        return {"": self.run.recipe.evaluation.sequences}

    def batches(self, first_step: int) -> Iterator[Sequence[Batch]]:
        step, seed = first_step, derive(self.run.recipe.seed, "order of the data")
        while True:
            whole = self.sequences(seed + step, self.run.recipe.global_batch)
            yield self.micro_batches(whole.chunk(self.ranks)[self.rank])
            step += 1

    def documents(self, step: int) -> Sequence[str]:
        return [f"{step} (batch {step})"]

    def validation(self, source: str = "") -> Iterable[Batch]:
        return self.micro_batches(self.sequences(1, self.run.recipe.evaluation.sequences))

    def close(self) -> None:
        self.closed = True


POISON = 63  # a token whose embedding `Poisoned` makes so large that the gradient of its batch is not finite


class PoisonedFeed(CountingFeed):
    """Counts without the poisoned token, which only the first sequence of some batches (``bad``) has.

    The batches of ``left_out`` (from and to) are passed over, as if they were not in the data.
    """

    bad: tuple[int, ...] = ()
    left_out: tuple[int, int] = (0, 0)

    def batches(self, first_step: int) -> Iterator[Sequence[Batch]]:
        index, seed = first_step, derive(self.run.recipe.seed, "order of the data")
        begin, end = self.left_out
        while True:
            there = index + (end - begin) * (index >= begin)
            whole = self.sequences(seed + there, self.run.recipe.global_batch) % POISON
            if there in self.bad:
                whole[0, 0] = POISON
            yield self.micro_batches(whole.chunk(self.ranks)[self.rank])
            index += 1

    def validation(self, source: str = "") -> list[Batch]:
        return self.micro_batches(self.sequences(1, self.run.recipe.evaluation.sequences) % POISON)


def poisoned(bad: Sequence[int], left_out: tuple[int, int] = (0, 0)) -> type[PoisonedFeed]:
    """A feed whose batches of these indices (0 is the first step's) have the poisoned token."""
    return type("Poisoned", (PoisonedFeed,), {"bad": tuple(bad), "left_out": left_out})


class UnreadableFeed(CountingFeed):
    """Cannot read one batch, by its index, of the steps or of the held-out text, on one data rank."""

    at: tuple[str, int, int] = ("", 0, 0)  # steps or held-out, data rank, index

    def _read(self, what: str, batches: Iterable[Any]) -> Iterator[Any]:
        for index, each in enumerate(batches):
            if (what, self.rank, index) == self.at:
                rule = "is corrupt: its CRC-32 is not the recorded one between byte 0 and 1048576"
                raise InvalidInput([Problem("data.cache", "00000.train.u16", rule)])
            yield each

    def batches(self, first_step: int) -> Iterator[Sequence[Batch]]:
        return self._read("steps", super().batches(first_step))

    def validation(self, source: str = "") -> Iterator[Batch]:
        return self._read("held-out", super().validation())


def unreadable(what: str, rank: int, index: int) -> type[UnreadableFeed]:
    """A feed with such a batch."""
    return type("Unreadable", (UnreadableFeed,), {"at": (what, rank, index)})


class Poisoned(Observer):
    """Before the first step of a run: a row of the embedding that is finite, and whose gradients are not."""

    def on_start(self, state: TrainingState) -> None:
        if state.step == 0:
            with torch.no_grad():
                for name, each in state.model.named_parameters():
                    if name.startswith("embed_tokens"):
                        local(each)[_row(each)] = 3e38  # a sum of two is infinite


def _row(table: torch.Tensor) -> slice:
    """Where this rank has the poisoned row: nowhere, or in one place."""
    begin = offset_of(table)[0] if isinstance(table, DTensor) else 0
    at = POISON - begin
    return slice(max(at, 0), max(at, 0) + 1) if at >= 0 else slice(0, 0)
