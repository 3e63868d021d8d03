"""What a micro-batch's backward takes longer than the first's, for each parameter that a rank computes.

It adds its gradients to those before it.
"""

from __future__ import annotations

from dataclasses import replace

from trainledger.ledger.memory.static_memory import static_memory
from trainledger.ledger.parallel.rank_plan import rank_plan
from trainledger.ledger.step import follow
from trainledger.plan.layouts.grid import UNSHARDED, ZERO3_RESHARDS, ZERO_MODES
from trainledger.predict.clock import BUFFERING, Clock
from trainledger.spec.layout import Layout
from trainledger.spec.run import Run

_SHARD, _MICRO_BATCHES = 8, 4
FLIGHT = "in flight"  # the loop over micro-batches that a stage begins before its first backward


class GradientAccumulation:
    """Reads it off the ledger of one stage for each way to share states."""

    def __init__(self, run: Run, clock: Clock, *, backend: str) -> None:
        self.run, self.clock, self.backend = run, clock, backend
        self._known: dict[int, float] = {}

    def seconds(self, zero_mode: int, *, pipeline: int) -> float:
        """Seconds for each element; 0 where blocks reduce every time, and a rank adds up small pieces only."""
        alone = pipeline == 1
        if zero_mode == ZERO3_RESHARDS or (alone and zero_mode > 1) or self.run.recipe.lora_rank is not None:
            return 0.0
        if zero_mode not in self._known:
            self._known[zero_mode] = self._read(zero_mode)
        return self._known[zero_mode]

    def _read(self, zero_mode: int) -> float:
        zero, reshard = ZERO_MODES[zero_mode]
        layers = self.run.model.n_layers
        layout = Layout(
            zero=zero, reshard_after_forward=reshard, shard=1 if zero_mode == UNSHARDED else _SHARD, pipeline=2,
            stage_layers=(layers, 0),
        )  # fmt: skip
        recipe = replace(self.run.recipe, micro_batch=1, global_batch=_MICRO_BATCHES * layout.shard)
        model = self.run.model.served  # no pipeline has them, and an element costs the same
        rank = rank_plan(replace(self.run, model=model, layout=layout, recipe=recipe))
        first = later = 0.0
        for each in follow(rank, backend=self.backend):
            if each.phase == "backward" and each.kind != "collective" and each.name not in BUFFERING:
                around = each.loop[0][0] if each.loop else ""
                if around.startswith(FLIGHT):
                    later += self.clock.roofline.time(each).seconds / each.loop[0][1]
                elif not around.startswith("micro") and each.name != "add_":  # what blocks reduce is always added
                    first += self.clock.roofline.time(each).seconds
        return (later - first) / float(max(1, static_memory(rank, backend=self.backend).computed))
