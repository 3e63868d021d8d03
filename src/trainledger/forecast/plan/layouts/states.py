"""Static memory of a rank by how states are shared: parameters, optimizer state, gradients, and their elements.

`ledger.memory.static_memory` is asked once for a layer of each run of layers and for what is before and after
all, with arrays for the ranks; a stage has the sum of its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from trainledger.forecast.plan.layouts.grid import UNSHARDED, ZERO_MODES, runs_of
from trainledger.ledger.parallel.rank_plan import rank_plan
from trainledger.ledger.ranks import static_memory
from trainledger.spec.layout import Layout
from trainledger.spec.run import Run

# (tensor, expert, ranks that share, replicas are several)
Ranks = tuple[int, int, int, bool]
AMOUNTS = ("resident", "gradients", "gathered", "outside", "owned", "computed", "experts")
ROUNDING = 4096  # bytes by which a sum of parts may pass the whole: pieces of each part are filled up on their own


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

    def prepare(self, zero_mode: int, interleaved: bool, pipeline: int) -> None:
        """Ask for what `whole` or `stages` will need."""
        _ = self.whole(zero_mode) if pipeline == 1 else self._parts(zero_mode, interleaved)

    def stages(self, zero_mode: int, interleaved: bool, columns: Any, layers: Any, first: Any, last: Any) -> Any:
        """[amount, S, J, columns] of stages with so many layers of each run [S, J, K]."""
        import numpy as np

        before, *each, after = (part[:, columns] for part in self._parts(zero_mode, interleaved))
        total = np.einsum("sjk,kau->asju", layers, np.array(each))
        return total + first[..., None] * before[:, None, None] + last[..., None] * after[:, None, None]

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

        tensor, expert, shared, several = (_sizes([each[at] for each in self.ranks]) for at in range(4))
        zero, reshard = ZERO_MODES[zero_mode]
        layout = Layout(
            zero=zero, reshard_after_forward=reshard, prefetch=self.run.layout.prefetch,
            pipeline=1 if cut is None else 3, stage_layers=cut,
        )  # fmt: skip
        if interleaved and cut is not None:  # a second chunk without layers: buffers are what makes the difference
            layout = replace(layout, schedule="interleaved", virtual_stages=2,
                             stage_layers=(*cut, 0, 0, 0) if stage < 2 else (0, 0, 0, *cut))  # fmt: skip
        shard = 1 if zero_mode == UNSHARDED else np.maximum(np.maximum(shared, 2), expert)
        vars(layout).update(tensor=tensor, expert=1 if zero_mode == UNSHARDED else expert, shard=shard,
                            replicate=1 + several * 1)  # fmt: skip
        recipe = replace(self.run.recipe, micro_batch=1)
        vars(recipe).update(global_batch=shard * (1 + several * 1))
        run = replace(self.run, recipe=recipe, layout=layout)
        static = static_memory(rank_plan(run, stage), backend=self.backend)
        rows = [np.broadcast_to(np.asarray(getattr(static, name), float), len(self.ranks)) for name in AMOUNTS]
        return np.array(rows)


def _sizes(values: Sequence[int]) -> Any:
    import numpy as np

    return int(values[0]) if len(set(values)) == 1 else np.array(values, np.int64)
