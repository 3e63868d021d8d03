"""The stages of a pipeline that differ: how many layers of each run they have, and what they hold in flight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainledger.frozen import frozen
from trainledger.ledger.parallel.pipeline import chunks_of, in_flight_by_chunk
from trainledger.plan.layouts.grid import Stages
from trainledger.spec.layout import Layout
from trainledger.spec.rules.layout import BESIDE_ANOTHER


@frozen
class Part:
    """A chunk of layers: how many of each run of layers it has, and whether the embedding or the head."""

    layers: tuple[int, ...]
    begins: bool
    ends: bool


@frozen
class StageKind:
    """The first of the stages that have the same chunks."""

    stage: int
    chunks: tuple[Part, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of each run, of all chunks together."""
        return tuple(map(sum, zip(*(each.layers for each in self.chunks), strict=True)))

    @property
    def first(self) -> bool:
        return any(each.begins for each in self.chunks)

    @property
    def last(self) -> bool:
        return any(each.ends for each in self.chunks)


def layout_of(stages: Stages, *, paired: bool = False) -> Layout:
    """A layout with nothing but these stages; ``paired`` says that experts' tokens overlap another micro-batch."""
    return Layout(
        pipeline=stages.pipeline, schedule=stages.schedule, virtual_stages=stages.virtual_stages,
        stage_layers=stages.layers, overlap=("gradients", "experts") if paired else ("gradients",),
    )  # fmt: skip


def kinds_of(stages: Stages, runs: Sequence[int]) -> tuple[StageKind, ...]:
    """All stages in order; ``runs`` are how many layers each run of equal ones has."""
    layout, total = layout_of(stages), sum(runs)
    found = []
    for stage in range(stages.pipeline):
        chunks = chunks_of(layout, total, stage)
        parts = tuple(Part(_of_runs(each.first, each.count, runs), each.begins, each.ends) for each in chunks)
        found.append(StageKind(stage, parts))
    return tuple(found)


def distinct(kinds: Sequence[StageKind]) -> tuple[StageKind, ...]:
    """Of stages that are alike the first, which has the most in flight."""
    found: dict[Any, StageKind] = {}
    for each in kinds:
        found.setdefault(each.chunks, each)
    return tuple(found.values())


def _of_runs(first: int, count: int, runs: Sequence[int]) -> tuple[int, ...]:
    """How many of the layers from ``first`` on are of each run."""
    found, at = [], 0
    for size in runs:
        found.append(max(0, min(first + count, at + size) - max(first, at)))
        at += size
    return tuple(found)


class Pipelines:
    """Several ways to run pipelines of the same length as arrays: S ways, J stages that differ, K runs of layers.

    A way with fewer such stages than the others has its last one again. Figures of a stage: ``layers`` [S, J, K],
    ``first`` and ``last`` [S, J], the last of the stages alike ``place`` [S, J] and how many of each are before it
    ``before`` [S, J, J], ``tail`` [S, J] the run of its last layer (-1: none in its last chunk; ``tails`` [S, J, K] has
    a one there) and whether that chunk has more, ``chunks`` [S]. Of ways in which experts' tokens can overlap
    another micro-batch (``paired`` [S]) ``alone`` [S, J] are the forwards of a chunk that overlap none.
    """

    def __init__(self, ways: Sequence[Stages], runs: Sequence[int]) -> None:
        import numpy as np

        self.ways = tuple(ways)
        self.pipeline = ways[0].pipeline
        every = [kinds_of(each, runs) for each in ways]
        self.kinds = [distinct(each) for each in every]
        size, most, several = len(ways), max(map(len, self.kinds)), len(runs)
        self.layers = np.zeros((size, most, several))
        self.first, self.last = np.zeros((size, most)), np.zeros((size, most))
        self.place, self.before = np.zeros((size, most)), np.zeros((size, most, most))
        self.tail, self.longer = np.full((size, most), -1), np.zeros((size, most), bool)
        self.ends = np.zeros((size, most))
        self.chunks = np.array([each.virtual_stages for each in ways])
        self.zero_bubble = np.array([each.schedule == "zero-bubble" for each in ways])
        self.interleaved = [each.schedule == "interleaved" for each in ways]
        self.paired = np.array([each.schedule in BESIDE_ANOTHER and each.pipeline > 1 for each in ways])
        for way, (kinds, stages) in enumerate(zip(self.kinds, every, strict=True)):
            places = {each.chunks: index for index, each in enumerate(kinds)}
            order = [places[each.chunks] for each in stages]
            for number in range(most):
                index = min(number, len(kinds) - 1)
                self._fill(way, number, kinds[index])
                last = len(order) - 1 - order[::-1].index(index)
                self.place[way, number] = last
                for other in range(len(kinds)):
                    self.before[way, number, other] = order[:last].count(other)
        self.tails = (self.tail[..., None] == np.arange(several)) * 1.0
        behind = self.pipeline - 1 - self.place
        ahead = 2 * behind + (self.chunks[:, None] - 1) * self.pipeline + 1
        self.alone = np.where(np.array(self.interleaved)[:, None], ahead, behind)
        self._held: dict[tuple[int, bool], Any] = {}
        self._last: Any = None

    def _fill(self, way: int, number: int, kind: StageKind) -> None:
        self.layers[way, number] = kind.layers
        self.first[way, number], self.last[way, number] = kind.first, kind.last
        *_, tail = kind.chunks
        self.ends[way, number] = tail.ends
        runs = [index for index, count in enumerate(tail.layers) if count]
        self.tail[way, number] = runs[-1] if runs else -1
        self.longer[way, number] = sum(tail.layers) > 1

    def held(self, micro_batches: int, *, paired: bool = False) -> Any:
        """In flight with so many micro-batches, [S, J, K + 4]: layers of each run, embeddings, heads, messages
        that were received less those that were sent, chunks. ``paired`` as in `layout_of`.
        """
        import numpy as np

        if (micro_batches, paired) not in self._held:
            size, most, several = self.layers.shape
            found = np.zeros((size, most, several + 4))
            for way, (stages, kinds) in enumerate(zip(self.ways, self.kinds, strict=True)):
                layout = layout_of(stages, paired=paired)
                for number in range(most):
                    kind = kinds[min(number, len(kinds) - 1)]
                    counts = in_flight_by_chunk(layout, kind.stage, micro_batches)
                    row = found[way, number]
                    for count, chunk in zip(counts, kind.chunks, strict=True):
                        row[:several] += count * np.array(chunk.layers)
                        row[several:] += count * np.array([chunk.begins, chunk.ends, chunk.ends - chunk.begins, 1])
            self._held[micro_batches, paired] = found
        return self._held[micro_batches, paired]

    def last_chunks(self) -> Any:
        """What one micro-batch of the last chunk holds, as `held` has it: [S, J, K + 4]."""
        import numpy as np

        if self._last is not None:
            return self._last
        size, most, several = self.layers.shape
        found = np.zeros((size, most, several + 4))
        for way, kinds in enumerate(self.kinds):
            for number in range(most):
                *_, chunk = kinds[min(number, len(kinds) - 1)].chunks
                found[way, number] = [*chunk.layers, chunk.begins, chunk.ends, chunk.ends - chunk.begins, 1]
        self._last = found
        return found
