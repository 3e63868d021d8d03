"""Seconds that depend on how ranks share states: their collectives, and adding up gradients of micro-batches.

Collectives are those of all columns of a block at once.

Shapes as in `plan.layouts.bounds`: S ways to run the pipeline, J stages that differ, V variants, U ways to share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trainledger.forecast.plan.layouts.block_costs import BlockCosts
from trainledger.forecast.plan.layouts.blocks import Block
from trainledger.forecast.plan.layouts.grid import UNSHARDED, ZERO3_RESHARDS, ZERO_MODES
from trainledger.forecast.plan.layouts.stages import Pipelines
from trainledger.forecast.predict.clock import BUFFERING, Clock
from trainledger.forecast.predict.collective import placement
from trainledger.ledger.parallel.rank_plan import rank_plan
from trainledger.ledger.ranks import static_memory
from trainledger.ledger.step import follow
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.frozen import frozen
from trainledger.spec.layout import Layout, overlaps
from trainledger.spec.run import Run

ZERO3_KEEPS = ZERO_MODES.index((3, False))
ZERO1, ZERO2 = ZERO_MODES.index((1, None)), ZERO_MODES.index((2, None))
_SHARD, _MICRO_BATCHES = 8, 4  # of the ledger in which the adding up of gradients is read
FLIGHT = "in flight"  # the loop over micro-batches that a stage begins before its first backward
LARGE = float(2**44)  # bytes of a message whose time is all bandwidth, for any ranks


@frozen
class Rates:
    """Seconds of the collectives of a block, for all of its columns: of each byte of a large message, and of layers.

    ``shared`` are the ranks that share states, those of ``expert`` the ones that hold the same experts; of ``layers``
    one of each run, to gather it and to reduce it.
    """

    shared: Any
    gather: Any
    expert: Any
    sum: Any
    layers: tuple[tuple[Any, Any], ...]


def experts_shared(block: Block, shared: Any) -> Any:
    """Where other ranks hold the same experts, [U] or [1], of so many that share states.

    Elsewhere experts are neither gathered nor reduced, and replicas sum their gradients once a step.
    """
    import numpy as np

    return shared > block.expert if block.expert > 1 else np.ones(1, bool)


def rates_of(clock: Clock, gathered: BlockCosts | None, blocks: Sequence[Block]) -> list[Rates]:
    """The rates of each block; the columns of all are computed together, as each block's are few.

    ``gathered`` are the costs of shapes whose parameters are gathered block by block, where there are some.
    """
    found: dict[int, Rates] = {}
    alike: dict[tuple[bool, bool], list[int]] = {}  # by the groups that there are
    for index, each in enumerate(blocks):
        alike.setdefault((each.context > 1, each.expert > 1), []).append(index)
    for (context, experts), places in alike.items():
        some = [blocks[index] for index in places]
        rates = _rates_of(clock, gathered, some, "shard x context" if context else "shard", experts)
        at = 0
        for index, each in zip(places, some, strict=True):
            own = slice(at, at := at + len(each.shardings))
            layers = tuple((gather[own], reduce[own]) for gather, reduce in rates.layers)
            found[index] = Rates(rates.shared[own], rates.gather[own], rates.expert[own], rates.sum[own], layers)
    return [found[index] for index in range(len(blocks))]


def _rates_of(clock: Clock, gathered: BlockCosts | None, blocks: Sequence[Block], group: str, experts: bool) -> Rates:
    """The columns of all blocks in a row, which have the same groups."""
    import numpy as np

    assert clock.fabric is not None
    sizes = [len(each.shardings) for each in blocks]

    def by_block(values: Sequence[Any]) -> Any:
        return np.repeat(np.array(values), sizes)

    axes = {name: by_block([getattr(each, name) for each in blocks])
            for name in ("tensor", "context", "pipeline", "expert")}  # fmt: skip
    shards, replicas = (
        np.array([getattr(sharding, name) for each in blocks for sharding in each.shardings])
        for name in ("shard", "replicate")
    )
    layout = Layout()
    vars(layout).update(axes, shard=shards, replicate=replicas)
    shared, per_node = shards * axes["context"], clock.fabric.devices_per_node
    near = placement(layout, group, shared, per_node)
    far = placement(layout, "replicate", replicas, per_node)
    gather = clock.collective("all_gather", LARGE, near) / LARGE
    total = clock.collective("all_reduce", LARGE, far) / LARGE
    groups = [(near, shared), (near, shared)]
    of_experts = gather
    if experts:
        ranks = shared // axes["expert"]
        groups[1] = (placement(layout, f"{group} / expert", ranks, per_node), ranks)
        of_experts = clock.collective("all_gather", LARGE, groups[1][0]) / LARGE
    if gathered is None:
        return Rates(shared, gather, of_experts, total, ())
    first = np.array([each.variants[0] for each in blocks])
    layers = []
    for run in range(gathered.gather.shape[1]):
        gathering = reducing = 0 * gather
        for which, (place, ranks) in enumerate(groups):
            payload, reduced = (
                by_block(gathered.gather[which, run, first]),
                by_block(gathered.reduce[which, run, first]),
            )
            there = ((payload > 0) | (reduced > 0)) & (ranks > 1)
            if there.any():
                gathering = gathering + there * clock.collective("all_gather", payload, place)
                reducing = reducing + there * clock.collective("reduce_scatter", reduced, place)
                reducing = reducing + there * clock.collective("all_reduce", reduced / ranks, far)
        layers.append((gathering, reducing))
    return Rates(shared, gather, of_experts, total, tuple(layers))


class Collectives:
    """The collectives of ranks that share states, and the sends of a pipeline; ``at`` are columns of the block."""

    def __init__(
        self, clock: Clock, block: Block, rates: Rates, at: Sequence[int], ways: Pipelines, states: dict[str, Any]
    ) -> None:
        import numpy as np

        self.clock, self.block, self.ways, self.states = clock, block, ways, states
        precision = clock.run.recipe.precision
        self.gradient_nbytes, self.parameter_nbytes = (
            nbytes_in(8, each) / 8 for each in (precision.gradients, precision.parameters)
        )
        self.zero_mode = np.array([block.shardings[index].zero_mode for index in at])
        self.shared, self.gather_rate, self.sum_rate = rates.shared[at], rates.gather[at], rates.sum[at]
        self.expert_rate = rates.expert[at]
        self.gather = self.reduce = np.zeros((*ways.first.shape, len(at)))  # of all layers of a stage, once
        if rates.layers and (self.zero_mode >= ZERO2).any():
            for run, (gather, reduce) in enumerate(rates.layers):
                count = ways.layers[:, :, run, None]
                self.gather, self.reduce = self.gather + count * gather[at], self.reduce + count * reduce[at]

    def per_micro_batch(self) -> tuple[Any, Any, Any]:
        """Gathers of a forward and of a backward, and reductions, where blocks do so every time: [S, J, 1, U]."""
        import numpy as np

        alone = self.block.pipeline == 1
        if not alone and not (self.zero_mode == ZERO3_RESHARDS).any():
            return (np.zeros((1, 1, 1, 1)),) * 3
        reshards, keeps = self.zero_mode == ZERO3_RESHARDS, (self.zero_mode == ZERO3_KEEPS) & alone
        gather = np.where(reshards | keeps, self.gather + self.states["outside"] * self.gather_rate, 0.0)
        again = np.where(reshards, self.gather, 0.0)
        reduce = np.where(reshards | keeps | ((self.zero_mode == ZERO2) & alone), self.reduce, 0.0)
        return gather[:, :, None], again[:, :, None], reduce[:, :, None]

    def once(self) -> tuple[Any, Any, Any]:
        """What is gathered before the first forward, reduced after the last backward, and summed during it."""
        import numpy as np

        several = self.block.pipeline > 1
        keeps = (self.zero_mode == ZERO3_KEEPS) & several
        before = np.where(keeps, self.gather, 0.0)
        after = np.where(keeps | ((self.zero_mode == ZERO2) & several), self.reduce, 0.0)
        nbytes = self.states["computed"] * self.gradient_nbytes
        scattered = self._shared_seconds(self.gradient_nbytes) + nbytes * self.sum_rate / self.shared
        overlapped = np.where(self.zero_mode == ZERO1, scattered, 0.0)
        overlapped = np.where(self.zero_mode == UNSHARDED, nbytes * self.sum_rate, overlapped)
        return before[:, :, None], after[:, :, None], overlapped[:, :, None]

    def _shared_seconds(self, nbytes: float) -> Any:
        """All parameters of each stage once over the ranks that share them, at so many bytes each: [S, J, U]."""
        experts = self.states["experts"]
        return nbytes * ((self.states["computed"] - experts) * self.gather_rate + experts * self.expert_rate)

    def updated(self) -> Any:
        """What nothing overlaps at the end: gathering what has been updated, where each rank needs all of it."""
        import numpy as np

        whole = (self.zero_mode == ZERO1) | (self.zero_mode == ZERO2)
        if overlaps(self.clock.run.layout, "parameters"):
            whole = whole & False
        most = np.max(self._shared_seconds(self.parameter_nbytes), axis=1)[:, None, :]
        return np.where(whole, most, 0.0) + self._whole_experts()

    def _whole_experts(self) -> Any:
        """Gradients of experts that no other rank that shards has, summed over replicas: [S, 1, U] or 0."""
        import numpy as np

        there = (self.zero_mode > ZERO2) & ~experts_shared(self.block, self.shared)
        seconds = self.states["experts"] * self.gradient_nbytes * self.sum_rate
        return np.where(there, seconds, 0.0).max(axis=1)[:, None, :]

    def send(self, nbytes: Any) -> Any:
        """Seconds from one stage to the next, [V, 1], of messages of so many bytes [V]."""
        assert self.clock.fabric is not None
        block = self.block
        layout = Layout(tensor=block.tensor, context=block.context, pipeline=block.pipeline, shard=block.data_ranks)
        place = placement(layout, "pipeline", block.pipeline, self.clock.fabric.devices_per_node)
        return self.clock.collective("send", nbytes, place)[:, None]


def accumulation_seconds(run: Run, clock: Clock, backend: str, zero_mode: int, *, alone: bool) -> float:
    """What a micro-batch's backward takes longer than the first's for each element, as it adds its gradients to those.

    Read off the ledger of one stage. 0 where blocks reduce every time, and a rank adds up small pieces only; ``alone``
    says that there is no pipeline.
    """
    if zero_mode == ZERO3_RESHARDS or (alone and zero_mode > 1) or run.recipe.lora is not None:
        return 0.0
    zero, reshard = ZERO_MODES[zero_mode]
    layout = Layout(
        zero=zero, reshard_after_forward=reshard, shard=1 if zero_mode == UNSHARDED else _SHARD, pipeline=2,
        stage_layers=(run.model.n_layers, 0),
    )  # fmt: skip
    recipe = replace(run.recipe, micro_batch=1, global_batch=_MICRO_BATCHES * layout.shard)
    model = run.model.served  # no pipeline has what predicts ahead, and an element costs the same
    rank = rank_plan(replace(run, model=model, layout=layout, recipe=recipe))
    first = later = 0.0
    for each in follow(rank, backend=backend):
        if each.phase == "backward" and each.kind != "collective" and each.name not in BUFFERING:
            around = each.loop[0][0] if each.loop else ""
            if around.startswith(FLIGHT):
                later += clock.roofline.time(each).seconds / each.loop[0][1]
            elif not around.startswith("micro") and each.name != "add_":  # what blocks reduce is always added
                first += clock.roofline.time(each).seconds
    return (later - first) / float(max(1, static_memory(rank, backend=backend).computed))
