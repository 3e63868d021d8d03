"""Which documents a batch has tokens of, and where they stand in the corpus."""

from __future__ import annotations

from typing import Any

from trainledger.data.sampler import sequences_of_step
from trainledger.data.store import TokenStore


def documents_of_step(store: TokenStore, *, seed: int, step: int, global_batch: int, seq_len: int) -> list[str]:
    """The documents that the global batch of a step (the first is 0) has tokens of, in its order, each once.

    Each is its number in the train split and its place: ``4711 (corpus/a.jsonl byte 90210)``.
    """
    n = store.train.sequences(seq_len)
    chosen = sequences_of_step(n, seed=seed, step=step, global_batch=global_batch, first=0, count=global_batch)
    found: dict[int, tuple[int, int, int]] = {}
    for sequence in chosen.tolist():
        found.update(store.train.documents_in(sequence * seq_len, seq_len + 1))
    files: list[dict[str, Any]] = store.index["corpus"]["files"]
    return [f"{number} ({_place(files[source], at)})" for number, (source, *at) in found.items()]


def _place(file: dict[str, Any], at: list[int]) -> str:
    """Where a document begins in its file, as the messages of preparing say it."""
    if file["kind"] == "parquet":
        return f"{file['path']} row group {at[0]} row {at[1]}"
    return f"{file['path']} byte {at[0]}" + (" of its text" if file["compression"] else "")
