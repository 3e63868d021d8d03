"""What a run writes down as it goes: its curve, `state.json` and its spikes; by the first rank alone.

The curve (``metrics.jsonl``) is one JSON object per line, written as things happen. On resume the file is cut back to
the checkpoint's step, so that it has each step once. A spike is a loss or gradient norm far above what it was lately.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from errno import ENOENT
from pathlib import Path
from statistics import median
from typing import Any

import torch

from trainledger.engine.train.facts import steps_without_line
from trainledger.engine.train.observer import EvaluationRecord, StepRecord, TrainingState
from trainledger.engine.train.ranks import Ranks
from trainledger.engine.train.run_directory import Say, write_state
from trainledger.engine.train.step import Feed
from trainledger.spec.durable import opened, parse_json, sync, text_sha256, write_atomically
from trainledger.spec.plain import finite
from trainledger.spec.problem import InvalidInput
from trainledger.spec.recipe import Watch
from trainledger.spec.runfile import digest


class Metrics:
    """Appends lines to ``metrics.jsonl``; each is handed to the system before the next step begins."""

    def __init__(self, run_dir: Path, *, after: int) -> None:
        """Open the file for a session that begins ``after`` that many steps; later lines are cut off."""
        self.path = run_dir / "metrics.jsonl"
        self.damaged = cut_back(self.path, after)  # lines that were left out
        self._file = self.path.open("a", encoding="utf-8")

    def step(self, record: StepRecord) -> None:
        self.write(asdict(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        fields = asdict(record)
        del fields["unigram_entropy"]
        if not record.by_source:
            del fields["by_source"]
        self.write(fields)

    def event(self, event: str, step: int, **facts: object) -> None:
        """start, resume, checkpoint, finish, interrupted or failed."""
        self.write({"event": event, "step": step, **facts})

    def sync(self) -> None:
        """Have the lines on the disk, so that no checkpoint is ahead of its curve; OSError where they were deleted."""
        os.fsync(self._file.fileno())
        if not os.fstat(self._file.fileno()).st_nlink:
            raise FileNotFoundError(ENOENT, "was deleted while the run went on", str(self.path))

    def close(self) -> None:
        self._file.close()

    def write(self, fields: Mapping[str, object]) -> None:
        """Append a line; JSON has no NaN and no infinity, so that what is not finite is written as null."""
        self._file.write(json.dumps(finite(dict(fields))) + "\n")
        self._file.flush()


class NoMetrics(Metrics):
    """The metrics of a rank that is not the first: nothing is written."""

    damaged = 0

    def __init__(self) -> None:
        """No file."""

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass

    def write(self, fields: Mapping[str, object]) -> None:
        pass


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics file; what a crash cut short, or what has no whole number of steps, is left out."""
    return (each for each in _every_line(path) if each is not None)


def _every_line(path: Path) -> Iterator[dict[str, Any] | None]:
    """The lines of a metrics file, None for each that is damaged."""
    if not path.exists():
        return
    with io.TextIOWrapper(opened(path), encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                fields = parse_json(line)
            except ValueError:
                if not line.endswith("\n"):
                    return  # the last one, torn by a crash
                fields = None
            yield (
                fields
                if isinstance(fields, dict) and type(step := fields.get("step", 0)) is int and step >= 0
                else None
            )


def cut_back(path: Path, after: int) -> int:
    """Drop the lines of steps beyond ``after`` and damaged ones, in one motion; how many were damaged."""
    if not path.exists():
        return 0
    lines = list(_every_line(path))
    kept = [json.dumps(line) + "\n" for line in lines if line is not None and line.get("step", 0) <= after]
    write_atomically(path, "".join(kept))
    sync(path)
    return lines.count(None)


STEPS_BEFORE = 20  # of a window that is not full yet: fewer say little of what is usual
SMALLEST_DEVIATION = 1e-3  # of the median: a curve that has been still is not out of the ordinary at its next tremor
MOST_NAMED, MOST_KEPT = 4, 1000  # documents in a sentence, and in a line of the metrics
NAMES = {"loss": "loss", "grad_norm": "gradient norm"}


@dataclass(frozen=True)
class Spike:
    """A value above what is usual: the median of the window and so many median absolute deviations."""

    name: str  # as in the metrics
    value: float
    median: float
    deviation: float
    deviations: float  # as many are usual

    @property
    def usual(self) -> tuple[float, float]:
        """The range of usual values."""
        most = self.deviations * self.deviation
        return self.median - most, self.median + most

    def __str__(self) -> str:
        low, high = self.usual
        return f"{NAMES[self.name]} {self.value:.4g} (usual {max(low, 0):.4g} to {high:.4g}, median {self.median:.4g})"


# Median and median absolute deviation, as one spike in the window would move a mean and a standard deviation so far
# that the next one is usual.
class SpikeWatch:
    """Knows the last values of a run, and tells a step whose values are spikes, with the documents of its batch."""

    def __init__(self, watch: Watch, feed: Feed, say: Callable[[str], None]) -> None:
        self.watch, self.feed, self.say = watch, feed, say
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=watch.window) for name in NAMES}

    def remember(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take what lines of metrics say in the place of what is known."""
        for each in self._recent.values():
            each.clear()
        for line in lines:
            for name, value in _finite(line):
                self._recent[name].append(value)

    def see(self, record: StepRecord, metrics: Metrics, batch: int) -> None:
        """Take the values of a step, which had the batch of that index. A spike is a sentence and an event."""
        spikes = self.spikes({name: getattr(record, name) for name in NAMES})
        if not spikes:
            return
        documents = self.documents(batch)
        facts = {spike.name: {"value": spike.value, "usual": spike.usual, "median": spike.median} for spike in spikes}
        metrics.event("spike", record.step, above_usual=facts, documents=documents[:MOST_KEPT])
        self.say(f"Step {record.step} has {' and '.join(map(str, spikes))}; {listed(documents)}.")

    def documents(self, batch: int) -> Sequence[str]:
        """The documents of a batch by its index, none where they cannot be read."""
        try:
            return self.feed.documents(batch)
        except (InvalidInput, OSError, ValueError, IndexError, KeyError, TypeError) as error:
            self.say(f"The documents of batch {batch} (the first is 0) cannot be named: {error}")
            return ()

    def spikes(self, values: Mapping[str, Any]) -> list[Spike]:
        """Take the values of a step; those that are spikes. What is no finite number is no value."""
        found = []
        for name, value in _finite(values):
            recent = self._recent[name]
            spike = self._spike(name, value, recent)
            if spike is not None:
                found.append(spike)
            recent.append(value)
        return found

    def _spike(self, name: str, value: float, recent: deque[float]) -> Spike | None:
        most = self.watch.deviations
        if most is None or len(recent) < min(STEPS_BEFORE, self.watch.window):
            return None
        middle = median(recent)
        deviation = max(median(abs(each - middle) for each in recent), SMALLEST_DEVIATION * abs(middle))
        spike = Spike(name, value, middle, deviation, most)
        return spike if value > spike.usual[1] else None


def _finite(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """What is watched of a step, as far as it is a finite number."""
    for name in NAMES:
        value = values.get(name)
        if isinstance(value, float) and math.isfinite(value):
            yield name, value


def listed(documents: Sequence[str]) -> str:
    """The documents of a batch, as the rest of a sentence.

    >>> listed(["7 (a.txt byte 0)"]), listed([str(each) for each in range(9)])
    ('its batch is of document 7 (a.txt byte 0)', 'its batch is of documents 0, 1, 2, 3 and 5 more (metrics.jsonl)')
    """
    if not documents:
        return "the documents of its batch are not known"
    named, more = ", ".join(documents[:MOST_NAMED]), len(documents) - MOST_NAMED
    rest = f" and {more} more (metrics.jsonl)" if more > 0 else ""
    return f"its batch is of document{'s' if len(documents) > 1 else ''} {named}{rest}"


_FIGURES = ("step", "loss", "validation_loss", "unigram_entropy", "seconds", "initial_weights")


class Records:
    """The records of a run that one process keeps; on other ranks than the first nothing reaches a file."""

    def __init__(self, state: TrainingState, feed: Feed, ranks: Ranks, say: Say) -> None:
        self.metrics: Metrics = NoMetrics()
        self._state, self._ranks = state, ranks
        self._watch, self._say = SpikeWatch(state.run.recipe.watch, feed, say), say

    def open(self) -> None:
        """Go on with the file of the curve after the run's step, and know again what was usual by then."""
        if not self._ranks.first:
            return
        self.metrics.close()
        self.metrics = Metrics(self._state.run_dir, after=self._state.step)
        known = [line for line in read_lines(self.metrics.path) if "loss" in line]
        self._watch.remember(known)
        if lacking := steps_without_line(known, self._state.step):
            self._say(f"{self.metrics.path} {lacking}.")

    def watch(self, record: StepRecord) -> None:
        """Compare a step with what is usual; a spike is a sentence and an event."""
        if self._ranks.first:
            self._watch.see(record, self.metrics, self._batch(record.step))

    def documents(self, step: int) -> Sequence[str]:
        """The documents of the batch of a step (counted from 1); none on other ranks than the first."""
        return self._watch.documents(self._batch(step)) if self._ranks.first else ()

    def write_state(self, how: str, **more: object) -> dict[str, Any]:
        """Replace the run's `state.json` by its figures and ``more``; what it has now."""
        facts = {**figures(self._state), **more}
        if self._ranks.first:
            write_state(self._state.run_dir, how, **facts)
        return facts

    def note_end(self, how: str, why: str, **more: object) -> None:
        """Write how a run ended early, where the disk still has room."""
        try:
            self.metrics.event(how, self._state.step, why=why)
            self.write_state(how, why=why, **more)
        except OSError:
            pass  # the exception has the reason for the end; a full disk must not replace it

    def _batch(self, step: int) -> int:
        return step - 1 + self._state.guard.batches_left_out


def figures(state: TrainingState) -> dict[str, Any]:
    """The state of a run, as JSON stores it: what is not finite is null."""
    values = {name: getattr(state, name) for name in _FIGURES}
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return {**finite, "tokens": state.step * state.run.recipe.tokens_per_step}


def figures_to_go_on(state: TrainingState, feed: Feed) -> dict[str, Any]:
    """What a run goes on with, beside its tensors."""
    found = {**figures(state), "digest": digest(state.run), "data": feed.fingerprint}
    found |= {"threads": torch.get_num_threads(), "guard": state.guard.facts()}
    definition = feed.tokenizer_definition
    found["tokenizer"] = None if definition is None else text_sha256(definition)
    if state.scaler is not None:
        found["loss_scale"] = state.scaler.facts()
    return found
