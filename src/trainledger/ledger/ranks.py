"""The account of every distinct rank of a run that is spread over devices, its static memory, and its figures.

Static memory follows no operation, so it is quick, and its sizes may be arrays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainledger.ledger.core.graph import Leaf, ModelLeaves
from trainledger.ledger.core.sizes import several, sizes_of
from trainledger.ledger.core.tape import Tape
from trainledger.ledger.entry import HOST, Int
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.parallel.context import left_out
from trainledger.ledger.parallel.micro_batches import Work
from trainledger.ledger.parallel.rank_plan import (
    RankPlan,
    in_flight,
    in_flight_by_chunk,
    parts_of,
    rank_plan,
    shard_shape,
)
from trainledger.ledger.step import follow, follow_places, resident_of
from trainledger.spec.dtypes import nbytes_in
from trainledger.spec.frozen import frozen
from trainledger.spec.layout import Layout
from trainledger.spec.plain import read_json, write_json
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run


@frozen
class RankAccount:
    """The ledger of a rank, and how many ranks have one like it.

    ``stage`` is its stage of the pipeline counted from 0, ``place`` the first of its places among the ranks that shard.
    ``first`` and ``last`` say what it has in addition to layers: the embedding, the head and the loss. ``alike`` is the
    first stage whose ranks do the same in each micro-batch, though with others in flight; None where that is not known.
    """

    stage: int
    place: int
    count: Int
    layers: Int
    first: bool
    last: bool
    in_flight: Int
    ledger: Ledger
    alike: int | None = None

    @property
    def title(self) -> str:
        """What distinguishes the rank, in words.

        >>> RankAccount(0, 0, 8, 4, True, False, 2, Ledger(())).title
        'first stage'
        """
        if self.first and self.last:
            name = "every rank"
        elif self.first or self.last:
            name = "first stage" if self.first else "last stage"
        else:
            name = f"stage {self.stage + 1}"
        return name if self.place == 0 else f"{name}, shard {self.place + 1}"


def accounts(run: Run, *, backend: str = "cpu") -> tuple[RankAccount, ...]:
    """The ledger of each distinct rank of a run, stage by stage; the counts add up to its devices.

    All ranks of a stage are alike but where pieces of parameters are uneven: then the last ones have less. Sizes of
    data-parallel, tensor and context axes may be arrays, and then those with the largest pieces count for all; the
    number of stages is an int, as it decides what there is.
    """
    found: list[RankAccount] = []
    known: dict[Any, list[RankAccount]] = {}
    for stage in range(run.layout.pipeline):
        key = _kind(run, stage)
        if key not in known:
            known[key] = list(_accounts_of_stage(run, stage, backend))
            found += known[key]
            continue
        counts, flying = _rounds(run, stage), in_flight(run.layout, stage, run.grad_accum)
        for each in known[key]:
            ledger = _with_rounds(each.ledger, counts)
            found.append(replace(each, stage=stage, in_flight=flying, ledger=ledger))
    return tuple(found)


def _accounts_of_stage(run: Run, stage: int, backend: str) -> Iterator[RankAccount]:
    first = rank_plan(run, stage)
    places = list(_places(first))
    ranks = [first, *(rank_plan(run, stage, place) for place, _ in places[1:])]
    chunks = [each.chunk for each in ranks[0].chunks]
    for (place, alike), ledger in zip(places, follow_places(ranks, backend=backend), strict=True):
        yield RankAccount(
            stage=stage, place=place, count=alike * run.layout.devices // (run.layout.pipeline * _pieces(run)),
            layers=sum(each.count for each in chunks), first=chunks[0].begins, last=chunks[-1].ends,
            in_flight=in_flight(run.layout, stage, run.grad_accum), ledger=ledger, alike=stage,
        )  # fmt: skip


def heaviest_stages(run: Run) -> tuple[int, ...]:
    """The first stage of each kind, one of which holds the most: later ones of a kind have no more in flight."""
    found: dict[Any, int] = {}
    for stage in range(run.layout.pipeline):
        found.setdefault(_kind(run, stage), stage)
    return tuple(found.values())


def _kind(run: Run, stage: int) -> Any:
    """Equal for stages whose entries are the same but for how often their loops over micro-batches run."""
    if not isinstance(run.model.n_layers, int):
        return stage
    return parts_of(run, stage), tuple(
        (name, not isinstance(count, int) or count > 0) for name, count in _rounds(run, stage).items()
    )


def _rounds(run: Run, stage: int) -> dict[str, Int]:
    """How often each loop over micro-batches runs (`ledger.parallel.micro_batches.run_micro_batches` has them)."""
    micro_batches = run.grad_accum
    *earlier, last = in_flight_by_chunk(run.layout, stage, micro_batches)
    rounds = {"in flight": last - 1, "micro-batches": micro_batches - last}
    for index, count in enumerate(earlier):
        rounds |= {f"in flight {index}": count, f"micro-batches {index}": micro_batches - count}
    return rounds


def _with_rounds(ledger: Ledger, rounds: dict[str, Int]) -> Ledger:
    """The same ledger where these loops run so often. Nothing else depends on that."""
    known: dict[Any, Any] = {}  # loops by what they were
    entries = []
    for each in ledger.entries:
        loop = each.loop
        if loop and loop[0][0] in rounds:
            if id(loop) not in known:
                name = loop[0][0]
                known[id(loop)] = ((name, rounds[name]), *loop[1:])
            entries.append(each.in_loops(known[id(loop)]))
        else:
            entries.append(each)
    return replace(ledger, entries=tuple(entries))


def account_of_stage(run: Run, stage: int, *, backend: str = "cpu") -> Ledger:
    """The ledger of the rank of a stage that has the largest pieces; sizes may be arrays."""
    return follow(rank_plan(run, stage), backend=backend)


def _pieces(run: Run) -> Any:
    """How many places there are among the ranks that shard."""
    return run.layout.shard_ranks if run.layout.zero == 3 else 1


def _places(rank: RankPlan) -> Iterator[tuple[int, Any]]:
    """The first place with each set of pieces, and how many have it; ``rank`` is at the first of all."""
    ranks = _pieces(rank.whole)
    if not isinstance(ranks, int):
        yield 0, ranks
        return
    if ranks == 1:
        yield 0, 1
        return
    leaves = [leaf for each in rank.chunks for pattern, _ in each.leaves.in_order() for leaf in pattern]
    shared = [(leaf, rank.group_of(leaf).ranks) for leaf in leaves]
    uneven = [(leaf, among) for leaf, among in shared if _is_uneven(leaf, among)]
    if not uneven:
        yield 0, ranks
        return
    found = sorted({0, *(place for leaf, among in uneven for place in _changes(leaf, among, ranks))})
    starts = [0]
    for place in found[1:]:
        if any(shard_shape(leaf, among, place) != shard_shape(leaf, among, starts[-1]) for leaf, among in uneven):
            starts.append(place)
    for at, until in pairwise([*starts, ranks]):
        yield at, until - at


def _changes(leaf: Leaf, among: int, ranks: int) -> Iterator[int]:
    """The places from which on pieces may be other ones: after the last whole piece, and after a smaller one.

    Ranks that share among fewer than all begin again after so many.
    """
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


@frozen
class StaticMemory:
    """Bytes of a rank by what they are.

    ``resident`` is there before the step, batch and buffers left out (but for weights in 8 bits). ``gradients`` are
    those of all parameters once each has had a backward, ``gathered`` the whole parameters that are held from the first
    forward to the last backward, and ``outside`` else those of them outside the blocks. ``owned`` are the
    elements that its optimizer updates, and ``computed`` those that it computes with, of which ``experts`` are of
    expert ranks.
    """

    resident: Int
    gradients: Int
    gathered: Int
    outside: Int
    owned: Int
    computed: Int
    experts: Int = 0


def static_memory(rank: RankPlan, *, backend: str) -> StaticMemory:
    """The static memory of a rank; at least so much is live at some moment of the step."""
    precision = rank.run.recipe.precision
    tape = Tape(precision, backend)
    sizes = sizes_of(rank.run, backend)
    works = tuple(Work(tape, rank, sizes, each) for each in rank.chunks)
    owned = rank.owned
    resident = sum(nbytes for name, nbytes in resident_of(rank, works, owned, 0) if name not in (HOST, "buffers"))
    resident += sum(each.copies_nbytes for each in works)
    outside = sum(_gathered(rank, [(each.leaves.outside, 1)]) for each in works) if rank.gathers else 0
    whole = rank.gathers and not rank.layout.reshards
    gathered = sum(_gathered(rank, each.leaves.in_order()) for each in works) if whole else 0
    return StaticMemory(
        resident=resident,
        gradients=sum(_gradients(each) for each in works),
        gathered=nbytes_in(gathered, precision.arriving) if whole else 0,
        outside=0 if whole else nbytes_in(outside, precision.arriving),
        owned=owned.elements(),
        computed=sum(each.leaves.elements() for each in works),
        experts=sum(_experts(rank, each.leaves) for each in works),
    )


def _experts(rank: RankPlan, leaves: ModelLeaves) -> Int:
    """Elements of what other ranks share than all else."""
    groups = rank.by_group(leaves)
    return sum(sum(leaf.elements * n for leaf, n in some) for group, some in groups if group.axes != rank.group.axes)


def _gradients(work: Work) -> Int:
    """Bytes of a chunk's gradients in addition to buffers that are there all the time."""
    if work.buffered:
        return 0
    precision, sharded = work.tape.precision, work.sharded
    if sharded is not None and not sharded.once:
        return nbytes_in(sharded.own_elements(), precision.gradients)
    least = min((precision.gradients, precision.arriving), key=lambda each: nbytes_in(8, each))
    return nbytes_in(work.leaves.elements(), least)


def _gathered(rank: RankPlan, runs: Iterable[tuple[tuple[Leaf, ...], Int]]) -> Int:
    """Elements of the parameters that several ranks share; experts may be on one rank only."""
    return sum(
        count * sum(leaf.elements * several(rank.group_of(leaf).ranks) for leaf in pattern) for pattern, count in runs
    )


@frozen(kw_only=True)
class Figures:
    """Figures of a rank's optimizer step: FLOPs of matmuls, bytes kept for backward, at the peak, in collectives."""

    matmul_flops: int
    kept_nbytes: int
    peak_nbytes: int
    sent_nbytes: int


@frozen(kw_only=True)
class RankFigures:
    """A rank, its account's figures, and the metered ones."""

    rank: int
    title: str
    predicted: Figures
    measured: Figures


def figures(ledger: Ledger, layout: Layout | None = None) -> Figures:
    """The figures of a rank's ledger; with a ``layout`` of its account, less the attention that its ranks leave out."""
    attention = ledger.filter(lambda each: each.kind == "attention").flops
    masked = 0 if layout is None else int(attention * left_out(layout))
    return Figures(
        matmul_flops=ledger.matmul_flops - masked, kept_nbytes=ledger.kept_nbytes, peak_nbytes=ledger.peak().nbytes,
        sent_nbytes=ledger.total("payload"),
    )  # fmt: skip


def account_of(run: Run, rank: int, *, kernels: str) -> RankAccount:
    """The account of one rank of a run, numbered as in the device mesh."""
    stage, place = place_of(run.layout, rank)
    of_stage = [each for each in accounts(run, backend=kernels) if each.stage == stage]
    return max((each for each in of_stage if each.place <= place), key=lambda each: each.place)


def place_of(layout: Layout, rank: int) -> tuple[int, int]:
    """The stage of a rank, and its place among those that shard its stage.

    >>> place_of(Layout(pipeline=2, shard=2, tensor=2), 6)
    (1, 1)
    """
    of_a_stage = layout.devices // layout.pipeline
    return rank // of_a_stage, rank % of_a_stage // layout.tensor % (layout.shard * layout.context)


def read_ranks(run_dir: Path) -> tuple[RankFigures, ...]:
    """What ranks have written into a run's directory, by rank; what is damaged is left out."""
    found = []
    for path in sorted((run_dir / "ranks").glob("*.json")):
        try:
            found.append(read_json(RankFigures, path))
        except InvalidInput:
            continue
    return tuple(found)


def write_rank(run_dir: Path, found: RankFigures) -> None:
    """Keep a rank's figures in the run's directory."""
    folder = run_dir / "ranks"
    folder.mkdir(exist_ok=True)
    write_json(found, folder / f"{found.rank:05d}.json")
