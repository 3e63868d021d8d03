"""The stages of a pipeline that differ, with what they hold in flight, and the static memory of their ranks.

Shapes as in `plan.layouts.bounds`: S ways to run the pipeline, J stages that differ, K runs of equal layers, U ways to
share states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from trainledger.forecast.plan.layouts.grid import UNSHARDED, ZERO_MODES, Stages, runs_of
from trainledger.ledger.parallel.rank_plan import chunks_of, rank_plan
from trainledger.ledger.parallel.schedule import in_flight_by_chunk
from trainledger.ledger.ranks import static_memory
from trainledger.spec.frozen import frozen
from trainledger.spec.layout import Layout
from trainledger.spec.rules.layout import BESIDE_ANOTHER
from trainledger.spec.run import Run

# (tensor, expert, ranks that share, replicas are several)
Ranks = tuple[int, int, int, bool]
AMOUNTS = ("resident", "gradients", "gathered", "outside", "owned", "computed", "experts")
ROUNDING = 4096  # bytes by which a sum of parts may pass the whole: pieces of each part are filled up on their own


@frozen
class Part:
    """A chunk of layers: how many of each run of layers it has, and whether the embedding or the head."""

    layers: tuple[int, ...]
    begins: bool
    ends: bool

    @property
    def amounts(self) -> tuple[int, ...]:
        """What one micro-batch in it keeps, as `Pipelines.held` has it."""
        return *self.layers, self.begins, self.ends, self.ends - self.begins, 1


@frozen
class StageKind:
    """The first of the stages that have the same chunks."""

    stage: int
    chunks: tuple[Part, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of each run, of all chunks together."""
        return tuple(map(sum, zip(*(chunk.layers for chunk in self.chunks), strict=True)))

    @property
    def first(self) -> bool:
        return any(chunk.begins for chunk in self.chunks)

    @property
    def last(self) -> bool:
        return any(chunk.ends for chunk in self.chunks)


def layout_of(stages: Stages, *, paired: bool = False) -> Layout:
    """A layout with nothing but these stages; ``paired`` says that experts' tokens overlap another micro-batch."""
    return Layout(
        pipeline=stages.pipeline,
        schedule=stages.schedule,
        virtual_stages=stages.virtual_stages,
        stage_layers=stages.layers,
        overlap=("gradients", "experts") if paired else ("gradients",),
    )


def kinds_of(stages: Stages, runs: Sequence[int]) -> tuple[StageKind, ...]:
    """All stages in order; ``runs`` are how many layers each run of equal ones has."""
    layout, total = layout_of(stages), sum(runs)
    found = []
    for stage in range(stages.pipeline):
        chunks = chunks_of(layout, total, stage)
        parts = tuple(Part(_of_runs(chunk.first, chunk.count, runs), chunk.begins, chunk.ends) for chunk in chunks)
        found.append(StageKind(stage, parts))
    return tuple(found)


def distinct(kinds: Sequence[StageKind]) -> tuple[StageKind, ...]:
    """Of stages that are alike the first, which has the most in flight."""
    stage_kinds: dict[Any, StageKind] = {}
    for kind in kinds:
        stage_kinds.setdefault(kind.chunks, kind)
    return tuple(stage_kinds.values())


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
    ``before`` [S, J, J], ``tails`` [S, J, K] with a one at the run of the last layer of its last chunk, ``ends`` [S, J]
    whether that chunk has the head, ``chunks`` [S], ``last_chunks`` [S, J, K + 4] what a micro-batch of the last chunk
    keeps, as `held`. Of ways in which experts' tokens can overlap another micro-batch (``paired`` [S]) ``alone`` [S, J]
    are the forwards of a chunk that overlap none.
    """

    def __init__(self, ways: Sequence[Stages], runs: Sequence[int]) -> None:
        import numpy as np

        self.ways = tuple(ways)
        self.pipeline = ways[0].pipeline
        every = [kinds_of(each, runs) for each in ways]
        some = [distinct(each) for each in every]
        size, most, several = len(ways), max(map(len, some)), len(runs)
        self.kinds = [(*each, *[each[-1]] * (most - len(each))) for each in some]
        self.layers = np.array([[stage_kind.layers for stage_kind in kinds] for kinds in self.kinds], float)
        self.first = np.array([[stage_kind.first for stage_kind in kinds] for kinds in self.kinds], float)
        self.last = np.array([[stage_kind.last for stage_kind in kinds] for kinds in self.kinds], float)
        self.ends = np.array([[stage_kind.chunks[-1].ends for stage_kind in kinds] for kinds in self.kinds], float)
        self.last_chunks = np.array(
            [[stage_kind.chunks[-1].amounts for stage_kind in kinds] for kinds in self.kinds], float
        )
        self.place, self.before = np.zeros((size, most)), np.zeros((size, most, most))
        self.tails = np.zeros((size, most, several))
        self.chunks = np.array([each.virtual_stages for each in ways])
        self.zero_bubble = np.array([each.schedule == "zero-bubble" for each in ways])
        self.interleaved = [each.schedule == "interleaved" for each in ways]
        self.paired = np.array([each.schedule in BESIDE_ANOTHER and each.pipeline > 1 for each in ways])
        for way, (kinds, stages) in enumerate(zip(self.kinds, every, strict=True)):
            order = [stage.chunks for stage in stages]
            for number, kind in enumerate(kinds):
                last = len(order) - 1 - order[::-1].index(kind.chunks)
                self.place[way, number] = last
                for other, stage_kind in enumerate(some[way]):
                    self.before[way, number, other] = order[:last].count(stage_kind.chunks)
                for run in [index for index, count in enumerate(kind.chunks[-1].layers) if count][-1:]:
                    self.tails[way, number, run] = 1
        behind = self.pipeline - 1 - self.place
        ahead = 2 * behind + (self.chunks[:, None] - 1) * self.pipeline + 1
        self.alone = np.where(np.array(self.interleaved)[:, None], ahead, behind)
        self._held: dict[tuple[int, bool], Any] = {}

    def held(self, micro_batches: int, *, paired: bool = False) -> Any:
        """In flight with so many micro-batches, [S, J, K + 4]: layers of each run, embeddings, heads, messages
        that were received less those that were sent, chunks. ``paired`` as in `layout_of`.
        """
        import numpy as np

        if (micro_batches, paired) not in self._held:
            found = np.zeros(self.last_chunks.shape)
            for way, (stages, kinds) in enumerate(zip(self.ways, self.kinds, strict=True)):
                layout = layout_of(stages, paired=paired)
                for number, kind in enumerate(kinds):
                    counts = in_flight_by_chunk(layout, kind.stage, micro_batches)
                    for count, chunk in zip(counts, kind.chunks, strict=True):
                        found[way, number] += count * np.array(chunk.amounts)
            self._held[micro_batches, paired] = found
        return self._held[micro_batches, paired]


class States:
    """Tables of the static memory of ranks, made when they are first needed."""

    def __init__(self, run: Run, ranks: Sequence[Ranks], *, backend: str) -> None:
        self.run = run
        self.ranks = tuple(ranks)
        self.backend = backend
        self.runs = runs_of(run)
        # [amount, ranks] of a rank that has all layers; and of the parts of a stage.
        self.whole = cache(lambda zero_mode: self._ask(zero_mode, None, 0, False))
        self._parts = cache(self._ask_parts)

    def of(self, ways: Pipelines, zero_mode: Any, columns: Any) -> dict[str, Any]:
        """Each of `AMOUNTS` of the stages of some pipelines, [S, J, U], shared in these ways among these ranks."""
        import numpy as np

        size, most, _ = ways.layers.shape
        table = np.empty((len(AMOUNTS), size, most, len(columns)))
        for mode in np.unique(zero_mode):
            at = np.flatnonzero(zero_mode == mode)
            if ways.pipeline == 1:
                table[..., at] = self.whole(int(mode))[:, None, None, columns[at]]
                continue
            for interleaved in set(ways.interleaved):
                which = np.flatnonzero(np.array(ways.interleaved) == interleaved)
                before, *layers, after = (part[:, columns[at]] for part in self._parts(int(mode), interleaved))
                total = np.einsum("sjk,kau->asju", ways.layers[which], np.array(layers))
                total = total + ways.first[which][..., None] * before[:, None, None]
                total = total + ways.last[which][..., None] * after[:, None, None]
                table[:, which[:, None, None], np.arange(most)[None, :, None], at] = total
        return dict(zip(AMOUNTS, table, strict=True))

    def _ask_parts(self, zero_mode: int, interleaved: bool) -> list[Any]:
        """What is before all layers, a layer of each run, what is after."""
        layers = self.run.model.n_layers
        found = [self._ask(zero_mode, (0, layers, 0), 0, interleaved)]
        first = 0
        for size in self.runs:
            found.append(self._ask(zero_mode, (first, 1, layers - first - 1), 1, interleaved))
            first += size
        return [*found, self._ask(zero_mode, (0, layers, 0), 2, interleaved)]

    def _ask(self, zero_mode: int, cut: tuple[int, ...] | None, stage: int, interleaved: bool) -> Any:
        import numpy as np

        tensor, expert, shared, several = (_sizes([rank[at] for rank in self.ranks]) for at in range(4))
        zero, reshard = ZERO_MODES[zero_mode]
        layout = Layout(
            zero=zero,
            reshard_after_forward=reshard,
            prefetch=self.run.layout.prefetch,
            pipeline=1 if cut is None else 3,
            stage_layers=cut,
        )
        if interleaved and cut is not None:  # a second chunk without layers: buffers are what makes the difference
            layout = replace(
                layout,
                schedule="interleaved",
                virtual_stages=2,
                stage_layers=(*cut, 0, 0, 0) if stage < 2 else (0, 0, 0, *cut),
            )
        shard = 1 if zero_mode == UNSHARDED else np.maximum(np.maximum(shared, 2), expert)
        vars(layout).update(
            tensor=tensor, expert=1 if zero_mode == UNSHARDED else expert, shard=shard, replicate=1 + several * 1
        )
        recipe = replace(self.run.recipe, micro_batch=1)
        vars(recipe).update(global_batch=shard * (1 + several * 1))
        run = replace(self.run, recipe=recipe, layout=layout)
        static = static_memory(rank_plan(run, stage), backend=self.backend)
        rows = [np.broadcast_to(np.asarray(getattr(static, name), float), len(self.ranks)) for name in AMOUNTS]
        return np.array(rows)


def _sizes(values: Sequence[int]) -> Any:
    import numpy as np

    return int(values[0]) if len(set(values)) == 1 else np.array(values, np.int64)
