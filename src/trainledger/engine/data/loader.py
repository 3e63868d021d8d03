"""Batches on a device, read ahead by a thread.

Shapes: B sequences of a micro-batch, T = seq_len.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainledger.engine.data.mixture import Mixture, Source, held_out_batches, mixed_batch, open_mixture
from trainledger.engine.data.pairs import Pairs, open_pairs
from trainledger.engine.data.store import Tokens
from trainledger.spec.run import Run
from trainledger.spec.units import format_percent


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
    if file["kind"] == "json":
        return f"{file['path']} record {at[0] + 1}"
    return f"{file['path']} byte {at[0]}" + (" of its text" if file["compression"] else "")


Batch = tuple[Tensor, Tensor]  # inputs_BT and targets_BT, int64
# Two: one that is being copied while one is used; more would hold memory and gain nothing, as a batch takes 1.5 ms to
# read.
STEPS_AHEAD = 2


class Loader:
    """The batches of a run: those of any step on, and the held-out ones.

    ``rank`` of ``ranks`` gets its rows of every global batch. ``seconds_waited`` is how long the training loop has
    stood waiting for data, in all iterations together. Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        seed: int,
        seq_len: int,
        global_batch: int,
        micro_batch: int,
        eval_sequences: int = 64,
        device: torch.device | str = "cpu",
        rank: int = 0,
        ranks: int = 1,
        remarks: Sequence[str] = (),
    ) -> None:
        if global_batch % (micro_batch * ranks):
            raise ValueError(f"a batch of {global_batch} is not made of {ranks} ranks' micro-batches of {micro_batch}")
        mixture.check_lengths(seq_len)
        self.mixture = mixture
        self.seed, self.seq_len, self.eval_sequences = seed, seq_len, eval_sequences
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.rank, self.ranks = rank, ranks
        self.device = torch.device(device)
        self.seconds_waited = 0.0
        self.remarks = remarks
        self._ahead: _ReadAhead | None = None

    @property
    def fingerprint(self) -> str:
        """The name of the data; equal for data that gives equal batches."""
        return self.mixture.fingerprint

    @property
    def tokenizer_definition(self) -> str:
        """The text of the tokenizer.json that made the tokens."""
        return self.mixture.tokenizer().definition

    @property
    def validation_sequences(self) -> Mapping[str, int]:
        """How many sequences `validation` gives of each source, by name."""
        return self.mixture.evaluated(self.eval_sequences, self.seq_len)

    @property
    def shares(self) -> dict[str, float]:
        """The share of the sequences that are from each source, by name; a corpus alone has the empty name."""
        return {source.name: source.share for source in self.mixture.sources}

    @property
    def end_id(self) -> int:
        """The token that ends each document."""
        return self.mixture.sources[0].store.end_id

    @property
    def unigram_entropy(self) -> float:
        """Loss in nats of a model that knows only how often each token occurs."""
        return self.mixture.unigram_entropy_nats

    def batches(self, first_step: int) -> Iterator[tuple[Batch, ...]]:
        """The micro-batches of step ``first_step`` (0 is the first), of the next step, and so on without end.

        Every tensor has separate memory. One iteration at a time: a new one ends the one before. What goes wrong
        while reading is raised here.
        """
        self.close()
        ahead = self._ahead = _ReadAhead(self._read_step, first_step, self.device)
        try:
            while True:
                began = time.perf_counter()
                pending = ahead.get()
                self.seconds_waited += time.perf_counter() - began
                if pending is None:
                    return
                yield pending.arrived()
        finally:
            ahead.close()

    def documents(self, step: int) -> list[str]:
        """The documents that the global batch of step index ``step`` has tokens of, in its order, each once."""
        return documents_of_step(
            self.mixture, seed=self.seed, step=step, global_batch=self.global_batch, seq_len=self.seq_len
        )

    def validation(self, source: str = "") -> Iterator[Batch]:
        """The held-out sequences of a source, the same each time.

        ``eval_sequences`` are those of all sources, dealt out as these are mixed; no more of one than there are.
        """
        count = self.validation_sequences[source]
        for rows in held_out_batches(self.mixture, source, count=count, at_once=self.micro_batch, seq_len=self.seq_len):
            inputs_BT, targets_BT = halves(rows)
            yield inputs_BT.to(self.device), targets_BT.to(self.device)

    def close(self) -> None:
        """End the thread that reads ahead."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _read_step(self) -> Callable[[int], list[Batch]]:
        # A function without the loader in it, so that a forgotten loader can be collected and its thread ended.
        mixture, micro_batch = self.mixture, self.micro_batch
        names = ("seed", "global_batch", "seq_len", "rank", "ranks")
        sizes: dict[str, int] = {name: getattr(self, name) for name in names}

        def read_step(step: int) -> list[Batch]:
            rows = mixed_batch(mixture, step=step, **sizes)
            return [halves(rows[first : first + micro_batch]) for first in range(0, len(rows), micro_batch)]

        return read_step


def open_loader(
    run: Run, device: torch.device | str, *, rank: int = 0, ranks: int = 1, progress: bool = True
) -> Loader | Pairs:
    """The loader of a run file's data for data rank ``rank`` of ``ranks``, prepared where it is not yet; of preferences
    their `Pairs`.

    Raises InvalidInput for a corpus that cannot be prepared, a vocabulary larger than the model's, and a split shorter
    than a sequence.
    """
    recipe = run.recipe
    if recipe.objective.answers:
        return open_pairs(run, device, rank=rank, ranks=ranks)
    mixture = open_mixture(run.data, vocab_size=run.model.vocab_size, progress=progress)
    mixture.check_vocabulary(run.model.vocab_size)
    return Loader(
        mixture,
        seed=recipe.seed,
        seq_len=recipe.seq_len,
        global_batch=recipe.global_batch,
        micro_batch=run.device_batch,
        eval_sequences=recipe.evaluation.sequences,
        device=device,
        rank=rank,
        ranks=ranks,
        remarks=_epochs_said(mixture, run),
    )


def _epochs_said(mixture: Mixture, run: Run) -> list[str]:
    """How often a run goes through each source of a mixture."""
    if len(mixture.sources) == 1:
        return []
    recipe = run.recipe
    rows = recipe.total_steps * recipe.global_batch
    epochs = mixture.epochs(rows, seed=recipe.seed, seq_len=recipe.seq_len)
    said = [f"{source.name} {epochs[source.name]:.3g} ({format_percent(source.share)})" for source in mixture.sources]
    return [f"Epochs that the run takes of each source (and its share of the sequences): {', '.join(said)}."]


def halves(rows: Tokens) -> Batch:
    """What the model sees and what it shall say next: [B, T + 1] tokens as two contiguous [B, T] tensors of int64."""
    inputs_BT, targets_BT = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
    return torch.from_numpy(inputs_BT), torch.from_numpy(targets_BT)


@dataclass(frozen=True)
class _Pending:
    """A step's micro-batches, whose copy to the device may still be under way on a separate stream."""

    batches: tuple[Batch, ...]
    copied: Any = None

    def arrived(self) -> tuple[Batch, ...]:
        """The micro-batches, safe to use on the current stream."""
        if self.copied is not None:
            current = torch.cuda.current_stream()
            current.wait_event(self.copied)
            for batch in self.batches:
                for tensor in batch:
                    # The memory came from the copying stream; it must not be given out again before this one is done.
                    tensor.record_stream(current)
        return self.batches


class _ReadAhead:
    """A thread that reads steps in order and holds at most `STEPS_AHEAD` of them ready."""

    def __init__(self, read_step: Callable[[int], list[Batch]], first_step: int, device: torch.device) -> None:
        self._ready: queue.Queue[_Pending | BaseException | None] = queue.Queue(maxsize=STEPS_AHEAD)
        self._ended = threading.Event()
        arguments = (read_step, first_step, device, self._ready, self._ended)
        self._thread = threading.Thread(target=_read_on, args=arguments, name="trainledger data", daemon=True)
        self._thread.start()
        # At the end of a program, too: a thread that runs while the interpreter goes takes it down with an abort.
        self._close = weakref.finalize(self, _end, self._thread, self._ended)

    def get(self) -> _Pending | None:
        """The next step; None after `close`. Raises what the thread met."""
        while not self._ended.is_set():
            try:
                found = self._ready.get(timeout=1.0)
            except queue.Empty:
                continue
            if isinstance(found, BaseException):
                raise found
            return found
        return None

    def close(self) -> None:
        self._close()


def _end(thread: threading.Thread, ended: threading.Event) -> None:
    ended.set()
    if thread is not threading.current_thread():
        thread.join()


def _read_on(
    read_step: Callable[[int], list[Batch]],
    step: int,
    device: torch.device,
    ready: queue.Queue[_Pending | BaseException | None],
    ended: threading.Event,
) -> None:
    stream: Any = None
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    while not ended.is_set():
        item: _Pending | BaseException
        try:
            item = _on_device(read_step(step), device, stream)
        except BaseException as error:  # raised again in the thread that asked
            item = error
        step += 1
        while not ended.is_set():
            try:
                ready.put(item, timeout=0.1)
                break
            except queue.Full:
                continue
        if isinstance(item, BaseException):
            return


def _on_device(batches: Sequence[Batch], device: torch.device, stream: Any) -> _Pending:
    if stream is None:
        return _Pending(tuple((inputs_BT.to(device), targets_BT.to(device)) for inputs_BT, targets_BT in batches))
    with torch.cuda.stream(stream):
        moved = tuple(
            (
                inputs_BT.pin_memory().to(device, non_blocking=True),
                targets_BT.pin_memory().to(device, non_blocking=True),
            )
            for inputs_BT, targets_BT in batches
        )
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(stream)
    return _Pending(moved, copied)
