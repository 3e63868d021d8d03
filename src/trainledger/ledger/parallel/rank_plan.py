"""The plan of one rank of a run: its part of the model, its parameters, and the ranks that share them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import mul

from trainledger.ledger.core.graph import Leaf
from trainledger.ledger.core.leaves import ModelLeaves, component_of
from trainledger.ledger.core.record import Group
from trainledger.ledger.core.sizes import between, is_one, share
from trainledger.ledger.entry import Int
from trainledger.ledger.model.parameters import Part, leaves_of
from trainledger.ledger.parallel.pipeline import Chunk, chunks_of, cut, ends_apart, standing_apart
from trainledger.ledger.parallel.tensor import local_model
from trainledger.spec.frozen import frozen
from trainledger.spec.layers import LayerRun, layer_runs
from trainledger.spec.layout import Layout
from trainledger.spec.run import Run


@frozen
class ChunkPlan:
    """Layers that a rank runs in a row: which of the model they are, and the parameters that their forward reads."""

    chunk: Chunk
    leaves: ModelLeaves


@frozen
class RankPlan:
    """What a rank has of a run, resolved once and then followed (`ledger.step.follow`).

    ``run`` is the run as this rank sees it (its part of the model's widths, its tokens of a sequence), ``whole`` the
    run itself. ``stage`` of the pipeline is counted from 0. ``owned`` are the
    parameters, or the pieces of them, that its optimizer updates. State is shared over the ranks of ``group``, that of
    experts over those of ``expert_group``; ``replicas`` hold the same pieces. ``sharded``: any state is; ``gathers``:
    parameters are, and are gathered block by block.

    Leaves carry gradients while a plan is followed, so each account has a separate plan.
    """

    run: Run
    whole: Run
    stage: int
    chunks: tuple[ChunkPlan, ...]
    owned: ModelLeaves
    group: Group
    expert_group: Group
    replicas: Group
    sharded: bool
    gathers: bool

    @property
    def layout(self) -> Layout:
        return self.run.layout

    @property
    def whole_experts(self) -> bool:
        """Whether no other rank that shards has this rank's experts, so that they are neither gathered nor reduced."""
        return self.gathers and not is_one(self.layout.expert) and is_one(self.expert_group.ranks)

    def group_of(self, leaf: Leaf) -> Group:
        """The ranks that share a parameter's state; those of an expert are the ranks that hold the same experts."""
        return self.expert_group if component_of(leaf.path) == "experts" else self.group

    def by_group(self, *chunks: ModelLeaves) -> Iterator[tuple[Group, list[tuple[Leaf, Int]]]]:
        """The trained parameters with how often each comes, by the ranks that share their state."""
        found: dict[str, tuple[Group, list[tuple[Leaf, Int]]]] = {}
        for pattern, count in (run for leaves in chunks for run in leaves.in_order()):
            for each in pattern:
                if each.trained:
                    group = self.group_of(each)
                    found.setdefault(group.axes, (group, []))[1].append((each, count))
        yield from found.values()

    def piece(self, leaf: Leaf) -> Int:
        """Elements of a rank's piece of a parameter, as many as the rank with the most has.

        Where parameters are gathered pieces are rows, as FSDP2 cuts them, else equal parts of all elements in a row.
        """
        ranks = self.group_of(leaf).ranks
        return reduce(mul, shard_shape(leaf, ranks)) if self.gathers else share(leaf.elements, ranks)

    def pieces(self, some: Sequence[tuple[Leaf, Int]]) -> Int:
        """Elements of a rank's pieces of some parameters."""
        return sum(self.piece(leaf) * count for leaf, count in some)


def rank_plan(run: Run, stage: int = 0, place: int = 0) -> RankPlan:
    """The plan of a rank of a run, by its stage and its place among those that shard."""
    layout, local = run.layout, local_run(run)
    sharded = not is_one(layout.shard_ranks)
    group = Group("shard" if is_one(layout.context) else "shard x context", layout.shard_ranks)
    experts = group
    if not is_one(layout.expert):
        experts = Group(f"{group.axes} / expert", layout.shard_ranks // layout.expert if layout.zero else 1)
    chunks = chunks_of(layout, run.model.n_layers, stage)
    parts = _parts(local, chunks)
    apart = max(1, layout.prefetch) if sharded and layout.zero > 1 else 0
    leaves = [_leaves(local, replace(each, runs=standing_apart(each.runs, apart)) if apart else each) for each in parts]
    plan = RankPlan(
        run=local, whole=run, stage=stage,
        chunks=tuple(ChunkPlan(chunk, own) for chunk, own in zip(chunks, leaves, strict=True)),
        owned=_leaves(local, _joined(parts)) if sharded or len(leaves) > 1 else leaves[0],
        group=group, expert_group=experts, replicas=_replicas(layout),
        sharded=sharded, gathers=sharded and layout.zero == 3,
    )  # fmt: skip
    if not sharded:
        return plan
    return replace(plan, owned=_shards(plan, place) if plan.gathers else _parts_of_update(plan))


def _replicas(layout: Layout) -> Group:
    """The ranks that hold the same pieces: where nothing is sharded, all with their own tokens."""
    if layout.zero or (is_one(layout.shard) and is_one(layout.context)):
        return Group("replicate", layout.replicate)
    return Group("context" if not is_one(layout.context) else "shard", layout.replicas)


def local_run(run: Run) -> Run:
    """The run as one of its ranks sees it."""
    layout, recipe = run.layout, run.recipe
    if layout.alone:
        return run
    if not is_one(layout.context):
        recipe = replace(recipe, seq_len=run.rank_tokens)
    return replace(run, model=local_model(run.model, layout.tensor), recipe=recipe)


def parts_of(run: Run, stage: int) -> tuple[Part, ...]:
    """The part of the model in each chunk of a stage; stages with equal chunks compute the same."""
    return _parts(local_run(run), chunks_of(run.layout, run.model.n_layers, stage))


def _parts(local: Run, chunks: Sequence[Chunk]) -> tuple[Part, ...]:
    return tuple(Part(_runs_of(local, each), each.begins, each.ends) for each in chunks)


def _runs_of(local: Run, chunk: Chunk) -> tuple[LayerRun, ...]:
    runs = cut(layer_runs(local.model, local.recipe), chunk)
    if chunk.begins and chunk.ends:
        return runs
    both = local.recipe.activation_checkpointing.kind in ("offload", "from-start")
    return ends_apart(runs, first=both or not chunk.begins, last=both or not chunk.ends)


def _joined(parts: Sequence[Part]) -> Part:
    runs = tuple(run for each in parts for run in each.runs)
    return Part(runs, any(each.begins for each in parts), any(each.ends for each in parts))


def _leaves(local: Run, part: Part) -> ModelLeaves:
    """The parameters of a part of the model; expert ranks have only their experts."""
    leaves, ranks = leaves_of(local.model, local.recipe, part), local.layout.expert
    if is_one(ranks):
        return leaves

    def own(leaf: Leaf) -> Leaf:
        if component_of(leaf.path) != "experts":
            return leaf
        return Leaf(leaf.path, (leaf.shape[0] // ranks, *leaf.shape[1:]), trained=leaf.trained)

    return leaves.changed(own)


def _shards(plan: RankPlan, place: int) -> ModelLeaves:
    """Each parameter cut along dim 0 into pieces of ceil(rows / ranks), the last ranks with fewer or none (FSDP2)."""

    def shard(leaf: Leaf) -> Leaf:
        shape = shard_shape(leaf, plan.group_of(leaf).ranks, place)
        return Leaf(leaf.path, shape, trained=leaf.trained, whole=leaf.shape)

    return plan.owned.changed(shard)


def _parts_of_update(plan: RankPlan) -> ModelLeaves:
    """Of each trained parameter a part of its elements in a row, all padded to as many (ZeRO-1 and 2).

    What is not trained has no state to share. Of matrices that go over the ranks whole (Megatron-LM's layer-wise Muon)
    a rank has as many elements on average.
    """

    def part(leaf: Leaf) -> Leaf:
        elements = plan.piece(leaf)
        shape = (elements, *(1 for _ in leaf.shape[1:])) if leaf.decayed else (elements,)
        return Leaf(leaf.path, shape, whole=leaf.shape) if leaf.trained else leaf

    return plan.owned.changed(part)


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
