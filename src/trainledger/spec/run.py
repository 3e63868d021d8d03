"""A run: everything that one run file says."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from trainledger.spec.cluster import Cluster
from trainledger.spec.data import DataSpec
from trainledger.spec.frozen import frozen
from trainledger.spec.layout import AXES, Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.recipe import Recipe


@frozen(kw_only=True)
class Origin:
    """Where a run was read, which of its fields were given there, and which were assumed.

    ``source`` is a file's path or a model's name, empty for a run made in Python. ``explicit`` and ``assumed`` hold
    names such as ``recipe.seq_len``; ``notes`` are sentences on what the source says that a run does not hold.
    """

    source: str = ""
    explicit: frozenset[str] = frozenset()
    assumed: tuple[str, ...] = ()
    searched: bool = False  # the layout is the result of a search
    notes: tuple[str, ...] = ()


@frozen(kw_only=True)
class Run:
    """Model, recipe, layout, cluster and data of one run; ``origin`` is ignored when runs are compared."""

    model: ModelSpec
    recipe: Recipe
    layout: Layout = field(default_factory=Layout)
    cluster: Cluster = field(default_factory=Cluster)
    data: DataSpec = field(default_factory=DataSpec)
    origin: Origin = field(default_factory=Origin)

    def __eq__(self, other: object) -> bool:
        return self._content == other._content if isinstance(other, Run) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._content)

    @property
    def _content(self) -> tuple[object, ...]:
        return self.model, self.recipe, self.layout, self.cluster, self.data

    def __repr__(self) -> str:
        recipe, layout, usual = self.recipe, self.layout, Layout()
        axes = (*AXES, "expert")
        spread = [f"{each} {getattr(layout, each)}" for each in axes if getattr(layout, each) != getattr(usual, each)]
        said = [
            f"{recipe.global_batch} x {recipe.seq_len} tokens a step", recipe.precision.kind, recipe.optimizer.kind,
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
    def width_factor(self) -> Any:
        """How much wider the model is than muP's base model; 1 without muP."""
        return 1 if self.recipe.mup is None else self.model.d_model / self.recipe.mup.base_width

    @property
    def rank_tokens(self) -> Any:
        """Tokens of a sequence that a rank has: context ranks share them."""
        return self.recipe.seq_len // self.layout.context

    @property
    def grad_accum(self) -> Any:
        """Micro-batches of a data rank in one optimizer step."""
        return self.recipe.global_batch // (self.device_batch * self.layout.data_ranks)
