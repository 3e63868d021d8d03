"""A run: everything that one run file says."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from trainledger.frozen import frozen
from trainledger.spec.cluster import Cluster
from trainledger.spec.data import DataSpec
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.recipe import Recipe


@frozen(kw_only=True)
class Run:
    """Model, recipe, layout, cluster and data of one run."""

    model: ModelSpec
    recipe: Recipe
    layout: Layout = field(default_factory=Layout)
    cluster: Cluster = field(default_factory=Cluster)
    data: DataSpec = field(default_factory=DataSpec)

    def __repr__(self) -> str:
        recipe, layout, usual = self.recipe, self.layout, Layout()
        axes = ("replicate", "shard", "context", "tensor", "pipeline", "expert")
        spread = [f"{each} {getattr(layout, each)}" for each in axes if getattr(layout, each) != getattr(usual, each)]
        said = [
            f"{recipe.global_batch} x {recipe.seq_len} tokens a step", recipe.precision, recipe.optimizer,
            *(["layout auto"] if layout.auto else []), *spread, f"{self.cluster.count} x {self.cluster.device}",
        ]  # fmt: skip
        return f"Run({self.model.name}: {', '.join(said)})"

    @property
    def device_batch(self) -> Any:
        """Sequences in one forward of a data rank: ``recipe.micro_batch``, or all that it gets in a step."""
        if self.recipe.micro_batch is not None:
            return self.recipe.micro_batch
        share = self.recipe.global_batch // self.layout.data_ranks
        return 1 if isinstance(share, int) and share == 0 else share  # fewer sequences than ranks: refused elsewhere

    @property
    def grad_accum(self) -> Any:
        """Micro-batches of a data rank in one optimizer step."""
        return self.recipe.global_batch // (self.device_batch * self.layout.data_ranks)
