"""Which steps of a run other processes disturbed, told by an observer that watches the processor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainledger.measure.contention import Sample, watched
from trainledger.train.observer import Observer


class QuietSteps(Observer):
    """Watches every step; ``disturbed`` are the numbers of those in which others took the processor.

    Where the system does not say (no /proc/stat), no step counts as disturbed and ``unknown`` is true.
    """

    def __init__(self) -> None:
        self.samples: dict[int, Sample] = {}

    @property
    def disturbed(self) -> frozenset[int]:
        return frozenset(step for step, sample in self.samples.items() if sample.disturbed)

    @property
    def unknown(self) -> bool:
        return any(sample.others is None for sample in self.samples.values())

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        with watched(torch.get_num_threads()) as sample:
            yield
        self.samples[step] = sample
