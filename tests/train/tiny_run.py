"""A run small enough to train in a second, and batches that need no corpus: what the engine's tests stand on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import from_fields, with_fields
from trainledger.spec.recipe import Checkpoints, Cosine, Evaluation, Recipe
from trainledger.spec.run import Run
from trainledger.train.step import Batch, derive

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
    def validation_sequences(self) -> int:
        return self.run.recipe.evaluation.sequences

    def batches(self, first_step: int) -> Iterator[Sequence[Batch]]:
        step, seed = first_step, derive(self.run.recipe.seed, "order of the data")
        while True:
            whole = self.sequences(seed + step, self.run.recipe.global_batch)
            yield self.micro_batches(whole.chunk(self.ranks)[self.rank])
            step += 1

    def validation(self) -> list[Batch]:
        return self.micro_batches(self.sequences(1, self.run.recipe.evaluation.sequences))

    def close(self) -> None:
        self.closed = True
