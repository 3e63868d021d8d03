"""The account of every distinct rank of a run that is spread over devices."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from trainledger.frozen import frozen
from trainledger.ledger.array import Leaf
from trainledger.ledger.entry import Int, Ledger
from trainledger.ledger.rank import Rank, rank_of, shard_shape
from trainledger.ledger.step import account_of
from trainledger.spec.run import Run


@frozen
class RankAccount:
    """The ledger of a rank, and how many ranks have one like it.

    ``stage`` is its stage of the pipeline counted from 0, ``place`` the first of its places among the ranks that shard.
    ``first`` and ``last`` say what stands on it beside layers: the embedding, the head and the loss.
    """

    stage: int
    place: int
    count: Int
    layers: Int
    first: bool
    last: bool
    in_flight: Int
    ledger: Ledger

    @property
    def title(self) -> str:
        """What sets the rank apart, in words.

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
    data-parallel, tensor and context axes may be arrays, and then those with the largest pieces stand for all; the
    number of stages is an int, as it decides what there is.
    """
    found = []
    for stage in range(run.layout.pipeline):
        for place, alike in _places(run, stage):
            rank = rank_of(run, stage, place)
            found.append(
                RankAccount(
                    stage=stage, place=place, count=alike * run.layout.devices // (run.layout.pipeline * _pieces(run)),
                    layers=sum(each.count for each in rank.chunks), first=rank.chunks[0].begins,
                    last=rank.chunks[-1].ends, in_flight=_in_flight(rank), ledger=account_of(rank, backend=backend),
                )
            )  # fmt: skip
    return tuple(found)


def account_of_stage(run: Run, stage: int, *, backend: str = "cpu") -> Ledger:
    """The ledger of the rank of a stage that has the largest pieces; sizes may be arrays."""
    return account_of(rank_of(run, stage), backend=backend)


def _in_flight(rank: Rank) -> Int:
    from trainledger.ledger.pipeline import in_flight

    return in_flight(rank.layout, rank.stage, rank.run.grad_accum)


def _pieces(run: Run) -> Any:
    """How many places there are among the ranks that shard."""
    return run.layout.shard_ranks if run.layout.zero == 3 else 1


def _places(run: Run, stage: int) -> Iterator[tuple[int, Any]]:
    """The first place with each set of pieces, and how many have it."""
    ranks = _pieces(run)
    if not isinstance(ranks, int):
        yield 0, ranks
        return
    if ranks == 1:
        yield 0, 1
        return
    rank = rank_of(run, stage)
    leaves = [each for chunk in rank.chunks for pattern, _ in rank.leaves(chunk).in_order() for each in pattern]
    shared = [(leaf, rank.group_of(leaf).ranks) for leaf in leaves]
    uneven = [(leaf, among) for leaf, among in shared if _is_uneven(leaf, among)]
    if not uneven:
        yield 0, ranks
        return
    found = sorted({0, *(place for leaf, among in uneven for place in _changes(leaf, among, ranks))})
    starts = [0]
    for place in found[1:]:
        if _pieces_at(uneven, place) != _pieces_at(uneven, starts[-1]):
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


def _pieces_at(uneven: list[tuple[Leaf, int]], place: int) -> list[tuple[Any, ...]]:
    """The pieces that the rank at a place has."""
    return [shard_shape(leaf, ranks, place) for leaf, ranks in uneven]
