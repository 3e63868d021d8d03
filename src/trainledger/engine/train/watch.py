"""Steps out of the ordinary: a loss or gradient norm far above what it was lately."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from trainledger.engine.train.metrics import Metrics
from trainledger.engine.train.observer import StepRecord
from trainledger.engine.train.step import Feed
from trainledger.spec.problem import InvalidInput
from trainledger.spec.recipe import Watch

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
        facts = {each.name: {"value": each.value, "usual": each.usual, "median": each.median} for each in spikes}
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
