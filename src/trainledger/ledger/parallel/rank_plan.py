"""One rank of a layout: the run as it sees it, and the parameters that it computes with and that it owns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainledger.frozen import frozen
from trainledger.ledger.core.arithmetic import between, is_one, share
from trainledger.ledger.core.graph import Leaf
from trainledger.ledger.core.leaves import ModelLeaves, component_of
from trainledger.ledger.entry import Int
from trainledger.ledger.model.parameters import Part, leaves_of
from trainledger.ledger.parallel.collectives import Group
from trainledger.ledger.parallel.pipeline import Chunk, chunks_of, cut, ends_apart, standing_apart
from trainledger.ledger.parallel.tensor import local_model
from trainledger.spec.layout import Layout
from trainledger.spec.recompute import LayerRun, layer_runs
from trainledger.spec.run import Run


@frozen
class Rank:
    """A rank: its stage of the pipeline and its place in the group that shards, both counted from 0.

    ``run`` is the run as this rank sees it: its part of the model's widths, its tokens of a sequence.
    """

    run: Run
    whole: Run
    stage: int
    place: int
    chunks: tuple[Chunk, ...]

    @property
    def layout(self) -> Layout:
        return self.run.layout

    @property
    def gathers(self) -> bool:
        """Whether parameters are sharded, and gathered block by block."""
        return self.sharded and self.layout.zero == 3

    @property
    def sharded(self) -> bool:
        """Whether any state is sharded."""
        return not is_one(self.layout.shard_ranks)

    def group_of(self, leaf: Leaf) -> Group:
        """The ranks that share a parameter's state; those of an expert are the ranks that hold the same experts."""
        if component_of(leaf.path) == "experts" and not is_one(self.layout.expert):
            return Group(f"{self.group.axes} / expert", self.layout.shard_ranks // self.layout.expert)
        return self.group

    @property
    def group(self) -> Group:
        """The ranks that share all but experts."""
        return Group("shard" if is_one(self.layout.context) else "shard x context", self.layout.shard_ranks)

    @property
    def replicas(self) -> Group:
        """The ranks that hold the same shards."""
        return Group("replicate", self.layout.replicate)

    def runs_of(self, chunk: Chunk) -> tuple[LayerRun, ...]:
        runs = cut(layer_runs(self.run.model, self.run.recipe), chunk)
        if chunk.begins and chunk.ends:
            return runs
        both = self.run.recipe.activation_checkpointing in ("offload", "from-start")
        return ends_apart(runs, first=both or not chunk.begins, last=both or not chunk.ends)

    @property
    def parts(self) -> tuple[Part, ...]:
        """What each of its chunks is of the model; stages with equal ones compute the same."""
        return tuple(Part(self.runs_of(each), each.begins, each.ends) for each in self.chunks)

    def leaves(self, chunk: Chunk) -> ModelLeaves:
        """The parameters that a chunk's forward reads."""
        runs = self.runs_of(chunk)
        if self.sharded and self.layout.zero > 1:
            runs = standing_apart(runs, max(1, self.layout.prefetch))
        return self._local(leaves_of(self.run.model, self.run.recipe, Part(runs, chunk.begins, chunk.ends)))

    def owned(self) -> ModelLeaves:
        """The parameters, or the shards of them, that this rank's optimizer updates.

        Sharded parameters are cut along dim 0 into pieces of ceil(rows / ranks), the last ranks with fewer rows or none
        (FSDP2); an optimizer's state alone is cut from all parameters of a group in a row (ZeRO-1 and 2 as DeepSpeed
        and Megatron-LM have it), the last piece filled up.
        """
        part = Part(
            tuple(run for chunk in self.chunks for run in self.runs_of(chunk)),
            any(each.begins for each in self.chunks), any(each.ends for each in self.chunks),
        )  # fmt: skip
        leaves = self._local(leaves_of(self.run.model, self.run.recipe, part))
        if not self.sharded:
            return leaves
        return self._shards(leaves) if self.gathers else self._flat(leaves)

    def _local(self, leaves: ModelLeaves) -> ModelLeaves:
        """Expert ranks hold their own experts only."""
        ranks = self.layout.expert
        if is_one(ranks):
            return leaves

        def own(leaf: Leaf) -> Leaf:
            if component_of(leaf.path) != "experts":
                return leaf
            return Leaf(leaf.path, (leaf.shape[0] // ranks, *leaf.shape[1:]), trained=leaf.trained)

        return leaves.changed(own)

    def _shards(self, leaves: ModelLeaves) -> ModelLeaves:
        def shard(leaf: Leaf) -> Leaf:
            return Leaf(leaf.path, shard_shape(leaf, self.group_of(leaf).ranks, self.place), trained=leaf.trained)

        return leaves.changed(shard)

    def _flat(self, leaves: ModelLeaves) -> ModelLeaves:
        """All parameters that decay as one piece, and all that do not as another; of expert ranks experts apart.

        Those of a rank are shared by the ranks that hold the same experts (Megatron-LM: its optimizer has a group of
        its own for expert data parallelism).
        """
        named: dict[str, Leaf] = {}
        for group, some in self.by_group(leaves):
            for name, decayed in (("decayed", True), ("not decayed", False)):
                elements = sum(each.elements * count for each, count in some if each.decayed == decayed)
                if not (isinstance(elements, int) and elements == 0):
                    rows = share(elements, group.ranks)
                    path = name if group.axes == self.group.axes else f"mlp.experts.{name}"
                    named[path] = Leaf(path, (rows, 1) if decayed else (rows,))
        return ModelLeaves(before=named, segments=(), after={}, head=None)

    def by_group(self, leaves: ModelLeaves) -> Iterator[tuple[Group, list[tuple[Leaf, Int]]]]:
        """The trained parameters with how often each comes, by the ranks that share their state."""
        found: dict[str, tuple[Group, list[tuple[Leaf, Int]]]] = {}
        for pattern, count in leaves.in_order():
            for each in pattern:
                if each.trained:
                    group = self.group_of(each)
                    found.setdefault(group.axes, (group, []))[1].append((each, count))
        yield from found.values()


def shard_shape(leaf: Leaf, ranks: Int, place: int = 0) -> tuple[Int, ...]:
    """The shape of the piece that the rank at ``place`` has: rows of dim 0.

    Stacked experts that do not go evenly over the ranks are cut along dim 1 (torchtitan does so where experts are
    fewer than ranks).
    """
    dim = 1 if component_of(leaf.path) == "experts" and not _divides(ranks, leaf.shape[0]) else 0
    rows = leaf.shape[dim]
    piece = share(rows, ranks)
    place = place % ranks if isinstance(ranks, int) else place  # expert ranks repeat the places of those that share
    own = piece if place == 0 else between(rows - place * piece, 0, piece)
    return (*leaf.shape[:dim], own, *leaf.shape[dim + 1 :])


def _divides(ranks: Int, size: Int) -> bool:
    return isinstance(ranks, int) and isinstance(size, int) and size % ranks == 0


def rank_of(run: Run, stage: int = 0, place: int = 0) -> Rank:
    """A rank of a run, by its stage and its place among those that shard."""
    layout = run.layout
    local = run
    if not layout.alone:
        recipe = run.recipe
        if not is_one(layout.context):
            recipe = replace(recipe, seq_len=recipe.seq_len // layout.context)
        local = replace(run, model=local_model(run.model, layout.tensor), recipe=recipe)
    return Rank(local, run, stage, place, chunks_of(layout, run.model.n_layers, stage))
