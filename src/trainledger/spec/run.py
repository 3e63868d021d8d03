"""A run: everything that one run file says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field

from trainledger.frozen import frozen
from trainledger.spec.cluster import Cluster
from trainledger.spec.data import DataSpec
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.problem import Problem
from trainledger.spec.recipe import Recipe


@frozen(kw_only=True)
class Run:
    """Model, recipe, layout, cluster and data of one run."""

    model: ModelSpec
    recipe: Recipe
    layout: Layout = field(default_factory=Layout)
    cluster: Cluster = field(default_factory=Cluster)
    data: DataSpec = field(default_factory=DataSpec)

    def problems(self) -> Iterator[Problem]:
        """Everything that the fields of the run say against each other."""
        for part in (self.model, self.recipe, self.layout):
            yield from part.problems()
        if self.recipe.seq_len > self.model.max_seq_len:
            rule = f"is longer than model.max_seq_len = {self.model.max_seq_len}"
            yield Problem("recipe.seq_len", self.recipe.seq_len, rule, self.model.max_seq_len)
