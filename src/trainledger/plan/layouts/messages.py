"""Seconds of what ranks that share states tell each other, for all columns of a block at once.

Shapes as in `plan.layouts.bounds`: S ways to run the pipeline, J stages that differ, V variants, U ways to share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainledger.plan.layouts.grid import ALONE, RESHARDS, SHARING, Spread
from trainledger.plan.layouts.stages import Pipelines
from trainledger.predict.collective_time import placement
from trainledger.spec.layout import Layout

if TYPE_CHECKING:
    from trainledger.plan.layouts.bounds import Block, Bounds

KEEPS = SHARING.index((3, False))
OPTIMIZER, GRADIENTS = SHARING.index((1, None)), SHARING.index((2, None))
LARGE = float(2**28)  # bytes of a message whose time is all bandwidth


class Messages:
    """The collectives of ranks that share states, and the sends of a pipeline."""

    def __init__(
        self, bounds: Bounds, block: Block, spreads: Sequence[Spread], ways: Pipelines, standing: dict[str, Any]
    ) -> None:
        import numpy as np

        self.bounds, self.block, self.ways, self.standing = bounds, block, ways, standing
        self.times = times = bounds.costs.times
        self.sharing = np.array([each.sharing for each in spreads])
        shards, replicas = (np.array([getattr(each, name) for each in spreads]) for name in ("shard", "replicate"))
        layout = Layout()
        vars(layout).update(tensor=block.tensor, context=block.context, pipeline=block.pipeline, expert=block.expert,
                            shard=shards, replicate=replicas)  # fmt: skip
        self.shared = shared = shards * block.context
        per_node = times.fabric.devices_per_node
        near = placement(layout, "shard" if block.context == 1 else "shard x context", shared, per_node)
        far = placement(layout, "replicate", replicas, per_node)
        self.gather_rate = times.collective("all_gather", LARGE, near) / LARGE
        self.sum_rate = times.collective("all_reduce", LARGE, far) / LARGE
        table, first = bounds.tables.get(True), block.variants[0]
        self.gather = self.reduce = np.zeros((*ways.first.shape, len(spreads)))  # of all layers of a stage, once
        if table is not None and (self.sharing >= GRADIENTS).any():
            groups = [(near, shared)]
            if block.expert > 1:
                group = "shard / expert" if block.context == 1 else "shard x context / expert"
                groups.append((placement(layout, group, shared // block.expert, per_node), shared // block.expert))
            else:
                groups.append((near, shared))
            for run, both in enumerate(zip(table.gather, table.reduce, strict=True)):
                count = ways.layers[:, :, run, None]
                for (place, ranks), gather, reduce in zip(groups, *both, strict=True):
                    if not (gather[first] or reduce[first]):
                        continue
                    one = times.collective("all_gather", gather[first] / 2, place)
                    two = times.collective("reduce_scatter", reduce[first], place)
                    two = two + times.collective("all_reduce", reduce[first] / ranks, far)
                    self.gather, self.reduce = self.gather + count * one, self.reduce + count * two

    def per_micro_batch(self) -> tuple[Any, Any, Any]:
        """Gathers of a forward and of a backward, and reductions, where blocks do so every time: [S, J, 1, U]."""
        import numpy as np

        alone = self.block.pipeline == 1
        reshards, keeps = self.sharing == RESHARDS, (self.sharing == KEEPS) & alone
        gather = np.where(reshards | keeps, self.gather + self.standing["outside"] * self.gather_rate, 0.0)
        again = np.where(reshards, self.gather, 0.0)
        reduce = np.where(reshards | keeps | ((self.sharing == GRADIENTS) & alone), self.reduce, 0.0)
        return gather[:, :, None], again[:, :, None], reduce[:, :, None]

    def once(self) -> tuple[Any, Any, Any]:
        """What is gathered before the first forward, reduced after the last backward, and summed beside that."""
        import numpy as np

        several = self.block.pipeline > 1
        keeps = (self.sharing == KEEPS) & several
        before = np.where(keeps, self.gather, 0.0)
        after = np.where(keeps | ((self.sharing == GRADIENTS) & several), self.reduce, 0.0)
        nbytes = self.standing["computed"] * self.bounds.gradient_nbytes
        scattered = nbytes * (self.gather_rate + self.sum_rate / self.shared)
        beside = np.where(self.sharing == OPTIMIZER, scattered, 0.0)
        beside = np.where(self.sharing == ALONE, nbytes * self.sum_rate, beside)
        return before[:, :, None], after[:, :, None], beside[:, :, None]

    def updated(self, owned: Any) -> Any:
        """Gathering what the optimizer has updated, where each rank needs all of it."""
        import numpy as np

        whole = (self.sharing == OPTIMIZER) | (self.sharing == GRADIENTS)
        return np.where(whole, owned * self.shared * self.bounds.parameter_nbytes * self.gather_rate, 0.0)

    def send(self) -> Any:
        """From one stage to the next: [V, 1]."""
        block, fabric = self.block, self.times.fabric
        layout = Layout(tensor=block.tensor, context=block.context, pipeline=block.pipeline, shard=block.data_ranks)
        place = placement(layout, "pipeline", block.pipeline, fabric.devices_per_node)
        stream = next(iter(self.bounds.tables.values())).stream[block.variants]
        return self.times.collective("send", stream, place)[:, None]
