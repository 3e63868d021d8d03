"""The plan of one rank of a run: its layers, its parameters, and the ranks that share them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from operator import mul
from typing import Any

from trainledger.ledger.core.graph import Leaf, ModelLeaves, component_of
from trainledger.ledger.core.sizes import between, greater, is_one, is_zero, share
from trainledger.ledger.entry import Group, Int
from trainledger.ledger.model.parameters import Part, leaves_of
from trainledger.ledger.parallel.tensor import local_model
from trainledger.spec.frozen import frozen
from trainledger.spec.layers import LayerRun, layer_runs, layers_between
from trainledger.spec.layout import Layout
from trainledger.spec.run import Run

BY_ROWS = ("o_proj", "down_proj")  # layers that tensor ranks cut by their inputs


@frozen
class Chunk:
    """Consecutive layers of a rank: ``count`` of them from ``first`` on, with the parameters before or after all."""

    first: Int
    count: Int
    begins: bool
    ends: bool


def chunks_of(layout: Layout, n_layers: Int, stage: int) -> tuple[Chunk, ...]:
    """The chunks of one stage in order; of V chunks to a rank, the stage has every P-th (Narayanan et al. 2021).

    >>> chunks_of(Layout(pipeline=2), 8, 1)
    (Chunk(first=4, count=4, begins=False, ends=True),)
    """
    stages, total = layout.pipeline, layout.pipeline * layout.virtual_stages
    # Of V chunks to a rank every P-th (Narayanan et al. 2021, section 2.2): stages are shorter, and so is the bubble.
    chunks = []
    for number in range(stage, total, stages):
        if layout.stage_layers is None:
            count = n_layers // total
            first = number * count
        else:
            count, first = layout.stage_layers[number], sum(layout.stage_layers[:number])
        chunks.append(Chunk(first, count, number == 0, number == total - 1))
    return tuple(chunks)


def cut(runs: tuple[LayerRun, ...], chunk: Chunk) -> tuple[LayerRun, ...]:
    """The runs of layers that fall into a chunk; a group that is recomputed together ends with its chunk."""
    if chunk.begins and chunk.ends:
        return runs
    if len(runs) == 1 and len(runs[0].kinds) == 1:
        return (LayerRun(runs[0].kinds, runs[0].groups, chunk.count),)
    return tuple(layers_between(runs, chunk.first, chunk.first + chunk.count))


def ends_apart(runs: tuple[LayerRun, ...], *, first: bool, last: bool) -> tuple[LayerRun, ...]:
    """The layers of a stage with the first or the last round separate.

    The input of a stage's first block is kept to the end, the output of its last is sent and freed: a loop cannot
    say so of the others. Runs of no layers are left out.
    """
    runs = tuple(run for run in runs if not is_zero(run.count))
    if first and runs:
        count = runs[0].count
        runs = (*_counted(runs[0], between(count, 0, 1), greater(count - 1, 0)), *runs[1:])
    if last and runs:
        count = runs[-1].count
        runs = (*runs[:-1], *_counted(runs[-1], greater(count - 1, 0), between(count, 0, 1)))
    return runs


def _counted(run: LayerRun, *counts: Int) -> Iterator[LayerRun]:
    for count in counts:
        if not is_zero(count):
            yield LayerRun(run.kinds, run.groups, count)


def standing_apart(runs: tuple[LayerRun, ...], ahead: int) -> tuple[LayerRun, ...]:
    """The same layers with the first ``ahead`` rounds and the last round of each run separate."""
    # The block before leaves what FSDP2 keeps while a block runs, so the first and last differ from the others. Counts
    # that are arrays become arrays of zeros and ones.
    found: list[LayerRun] = []
    for run in runs:
        counts = [between(run.count - number, 0, 1) for number in range(ahead)]
        counts += [greater(run.count - 1 - ahead, 0), between(run.count - ahead, 0, 1)]
        found += _counted(run, *counts)
    return tuple(found)


@frozen
class ChunkPlan:
    """Layers that a rank runs in a row: which of the model they are, and the parameters that their forward reads.

    ``reference`` are those of a second, frozen model that runs before it.
    """

    chunk: Chunk
    leaves: ModelLeaves
    reference: ModelLeaves | None = None


@frozen
class RankPlan:
    """What a rank has of a run, resolved once and then followed (`ledger.step.follow`).

    ``run`` is the run as this rank sees it (its part of the model's widths, its tokens of a sequence), ``whole`` the
    run itself. ``stage`` of the pipeline is counted from 0, ``place`` is its first among the ranks that shard.
    ``owned`` are the parameters, or the pieces of them, that its optimizer updates. State is shared over the ranks of
    ``group``, that of experts over those of ``expert_group``; ``replicas`` hold the same pieces. ``sharded``: any state
    is; ``gathers``: parameters are, and are gathered block by block.

    Leaves carry gradients while a plan is followed, so each account has a separate plan.
    """

    run: Run
    whole: Run
    stage: int
    place: int
    chunks: tuple[ChunkPlan, ...]
    owned: ModelLeaves
    group: Group
    expert_group: Group
    replicas: Group
    sharded: bool
    gathers: bool

    def __eq__(self, other: object) -> bool:
        # All else follows from these; leaves are of one account and equal no others.
        known = (self.run, self.whole, self.stage, self.place)
        return isinstance(other, RankPlan) and known == (other.run, other.whole, other.stage, other.place)

    @property
    def layout(self) -> Layout:
        return self.run.layout

    @property
    def first(self) -> bool:
        """The rank has the embedding."""
        return self.chunks[0].chunk.begins

    @property
    def last(self) -> bool:
        """The rank has the head and takes the loss."""
        return self.chunks[-1].chunk.ends

    def offload(self, backend: str) -> str | None:
        """The model states that are in host memory (`Recipe.offload`); None where the device's memory is the host's."""
        return None if backend == "cpu" else self.run.recipe.offload

    @property
    def sends_gradients(self) -> bool:
        """Offloaded gradients leave as they arrive: reduced block by block, or where there is nothing to reduce."""
        whole = not self.sharded and is_one(self.replicas.ranks) and is_one(self.layout.pipeline)
        return whole or (self.sharded and self.layout.zero > 1)

    @property
    def layers(self) -> Int:
        return sum(chunk.chunk.count for chunk in self.chunks)

    @property
    def experts_apart(self) -> bool:
        """The ranks that share experts' states are others than those that share all else."""
        return self.layout.folds or not is_one(self.layout.expert)

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
            for leaf in pattern:
                if leaf.trained:
                    group = self.group_of(leaf)
                    found.setdefault(group.axes, (group, []))[1].append((leaf, count))
        yield from found.values()

    def piece(self, leaf: Leaf) -> Int:
        """Elements of a rank's piece of a parameter, as many as the rank with the most has."""
        # Where parameters are gathered pieces are rows, as FSDP2 cuts them, else equal parts of all elements in a row.
        ranks = self.group_of(leaf).ranks
        return reduce(mul, shard_shape(leaf, ranks)) if self.gathers else share(leaf.elements, ranks)

    def pieces(self, some: Sequence[tuple[Leaf, Int]]) -> Int:
        """Elements of a rank's pieces of some parameters."""
        return sum(self.piece(leaf) * count for leaf, count in some)


def rank_plan(run: Run, stage: int = 0, place: int = 0) -> RankPlan:
    """The plan of a rank of a run, by its stage and its place among those that shard."""
    layout, local = run.layout, local_run(run)
    group = Group("shard" if is_one(layout.context) else "shard x context", layout.shard_ranks)
    experts = group
    if layout.folds or not is_one(layout.expert):
        experts = Group(f"{group.axes} / expert", layout.expert_replicas if layout.zero else 1)
    sharded = not (is_one(group.ranks) and is_one(experts.ranks))
    chunks = chunks_of(layout, run.model.n_layers, stage)
    parts = _parts(local, chunks)
    apart = max(1, layout.prefetch) if sharded and layout.zero > 1 else 0
    joined = Part(tuple(r for part in parts for r in part.runs), parts[0].begins, parts[-1].ends)
    leaves = [_leaves(local, replace(part, runs=standing_apart(part.runs, apart)) if apart else part) for part in parts]
    plan = RankPlan(
        run=local, whole=run, stage=stage, place=place,
        chunks=tuple(
            ChunkPlan(chunk, own, _reference(local, chunk, apart)) for chunk, own in zip(chunks, leaves, strict=True)
        ),
        owned=_leaves(local, joined) if sharded or len(leaves) > 1 else leaves[0],
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
    return replace(run, model=local_model(run.model, layout.tensor, layout.expert_tensor), recipe=recipe)


def parts_of(run: Run, stage: int) -> tuple[Part, ...]:
    """The part of the model in each chunk of a stage; stages with equal chunks compute the same."""
    return _parts(local_run(run), chunks_of(run.layout, run.model.n_layers, stage))


def _parts(local: Run, chunks: Sequence[Chunk]) -> tuple[Part, ...]:
    return tuple(Part(_runs_of(local, chunk), chunk.begins, chunk.ends) for chunk in chunks)


def _runs_of(local: Run, chunk: Chunk) -> tuple[LayerRun, ...]:
    runs = cut(layer_runs(local.model, local.recipe), chunk)
    if chunk.begins and chunk.ends:
        return runs
    both = local.recipe.activation_checkpointing.ends_apart
    return ends_apart(runs, first=both or not chunk.begins, last=both or not chunk.ends)


def _leaves(local: Run, part: Part) -> ModelLeaves:
    """The parameters of a part of the model; expert ranks have only their experts, tensor ranks split eh_proj."""
    leaves, ranks, tensor = leaves_of(local.model, local.recipe, part), local.layout.expert, local.layout.tensor
    if is_one(ranks) and is_one(tensor):
        return leaves
    for leaf in leaves.every():
        module = leaf.path.split(".")
        # Its outputs are gathered before a block begins (multi_token_prediction.py, _concat_embeddings).
        if leaf.path.endswith("eh_proj.weight"):
            leaf.resize(leaf.shape[0] // tensor)
        elif component_of(leaf.path) == "experts" and not is_one(ranks):
            leaf.resize(leaf.shape[0] // ranks)
        elif module[-1] == "lora_magnitude" and module[-2] in BY_ROWS and not is_one(tensor):
            leaf.over = Group("tensor", tensor)
    return leaves


def _reference(local: Run, chunk: Chunk, apart: int) -> ModelLeaves | None:
    """The parameters of the frozen model beside this one (`Run.reference`), which no pipeline cuts."""
    plain = local.reference
    if plain is None:
        return None
    (part,) = _parts(plain, (chunk,))
    leaves = _leaves(plain, replace(part, runs=standing_apart(part.runs, apart)) if apart else part)
    for leaf in leaves.every():
        leaf.trained = False
    return leaves


def _shards(plan: RankPlan, place: int) -> ModelLeaves:
    """Each parameter cut along dim 0 into pieces of ceil(rows / ranks), the last ranks with fewer or none (FSDP2)."""

    def shard(leaf: Leaf) -> Leaf:
        shape = shard_shape(leaf, plan.group_of(leaf).ranks, place)
        return Leaf(leaf.path, shape, trained=leaf.trained, whole=leaf.shape)

    return plan.owned.changed(shard)


def _parts_of_update(plan: RankPlan) -> ModelLeaves:
    """Of each trained parameter a part of its elements in a row, all padded to as many (ZeRO-1 and 2)."""
    # What is not trained has no state to share. Of matrices that go over the ranks whole (Megatron-LM's layer-wise
    # Muon) a rank has as many elements on average.

    def part(leaf: Leaf) -> Leaf:
        elements = plan.piece(leaf)
        shape = (elements, *(1 for _ in leaf.shape[1:])) if leaf.decayed else (elements,)
        return Leaf(leaf.path, shape, whole=leaf.shape) if leaf.trained else leaf

    return plan.owned.changed(part)


def shard_shape(leaf: Leaf, ranks: Int, place: int = 0) -> tuple[Int, ...]:
    """The shape of the piece that the rank at ``place`` has: rows of dim 0."""
    # Stacked experts that do not go evenly over the ranks are cut along dim 1 (torchtitan does so where experts are
    # fewer than ranks).
    evenly = isinstance(ranks, int) and isinstance(leaf.shape[0], int) and leaf.shape[0] % ranks == 0
    dim = 1 if component_of(leaf.path) == "experts" and not evenly else 0
    rows = leaf.shape[dim]
    piece = share(rows, ranks)
    place = place % ranks if isinstance(ranks, int) else place  # expert ranks repeat the places of those that share
    own = piece if place == 0 else between(rows - place * piece, 0, piece)
    return (*leaf.shape[:dim], own, *leaf.shape[dim + 1 :])


def plans_of_stage(run: Run, stage: int) -> list[tuple[RankPlan, Any]]:
    """The plan of each distinct rank of a stage, and how many ranks have one like it."""
    first, layout = rank_plan(run, stage), run.layout
    pieces = layout.shard_ranks if layout.zero == 3 else 1
    places = list(_places(first, pieces))
    plans = [first, *(rank_plan(run, stage, place) for place, _ in places[1:])]
    return [
        (plan, alike * layout.devices // (layout.pipeline * pieces))
        for plan, (_, alike) in zip(plans, places, strict=True)
    ]


def _places(rank: RankPlan, ranks: Any) -> Iterator[tuple[int, Any]]:
    """The first place with each set of pieces, and how many have it; ``rank`` is at the first of all."""
    leaves = [leaf for chunk in rank.chunks for pattern, _ in chunk.leaves.in_order() for leaf in pattern]
    shared = [(leaf, rank.group_of(leaf).ranks) for leaf in leaves] if isinstance(ranks, int) and ranks > 1 else []
    uneven = [(leaf, among) for leaf, among in shared if _is_uneven(leaf, among)]
    found = sorted({0, *(place for leaf, among in uneven for place in _changes(leaf, among, ranks))})
    starts = [0]
    for place in found[1:]:
        if any(shard_shape(leaf, among, place) != shard_shape(leaf, among, starts[-1]) for leaf, among in uneven):
            starts.append(place)
    for at, until in pairwise([*starts, ranks]):
        yield at, until - at


def _changes(leaf: Leaf, among: int, ranks: int) -> Iterator[int]:
    """The places from which on pieces may be other ones: after the last whole piece, and after a smaller one."""
    # Ranks that share among fewer than all begin again after so many.
    whole = bisect_left(
        range(among), True, key=lambda place: shard_shape(leaf, among, place) != shard_shape(leaf, among)
    )
    for begin in range(0, ranks, among):
        yield from (each for each in (begin, begin + whole, begin + whole + 1) if each < ranks)


def _is_uneven(leaf: Leaf, ranks: Any) -> bool:
    if not isinstance(ranks, int) or ranks == 1:
        return False
    sizes = shard_shape(leaf, ranks, ranks - 1), shard_shape(leaf, ranks)
    return all(isinstance(size, int) for size in sizes[0]) and sizes[0] != sizes[1]
