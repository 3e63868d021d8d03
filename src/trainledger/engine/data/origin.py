"""The documents of a batch's tokens, and their positions in the corpus."""

from __future__ import annotations

from typing import Any

from trainledger.engine.data.mixture import Mixture, Source


def documents_of_step(mixture: Mixture, *, seed: int, step: int, global_batch: int, seq_len: int) -> list[str]:
    """The documents that the global batch of a step (the first is 0) has tokens of, in its order, each once.

    Each is its number in the train split and its place: ``4711 (corpus/a.jsonl byte 90210)``; of several sources
    their name precedes it.
    """
    rows: dict[int, tuple[Source, int]] = {}
    begin = step * global_batch
    for source, at, sequences in mixture.sequences(seed=seed, begin=begin, count=global_batch, seq_len=seq_len):
        for row, sequence in zip(at.tolist(), sequences.tolist(), strict=True):
            rows[row] = source, sequence
    found: dict[str, None] = {}
    for _, (source, sequence) in sorted(rows.items()):
        files: list[dict[str, Any]] = source.store.index["corpus"]["files"]
        for number, (file, *place) in source.store.train.documents_in(sequence * seq_len, seq_len + 1):
            found[f"{source.name} {number} ({_place(files[file], place)})".lstrip()] = None
    return list(found)


def _place(file: dict[str, Any], at: list[int]) -> str:
    """Where a document begins in its file, as the messages of preparing say it."""
    if file["kind"] == "parquet":
        return f"{file['path']} row group {at[0]} row {at[1]}"
    return f"{file['path']} byte {at[0]}" + (" of its text" if file["compression"] else "")
