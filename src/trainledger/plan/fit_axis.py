"""A line of runs that differ in one size, and the place on it where they stop to fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import lcm
from typing import Any

from trainledger.frozen import frozen
from trainledger.ledger.model.parameters import parameters
from trainledger.plan.family import Family
from trainledger.spec.model import ModelSpec
from trainledger.spec.problem import Problem, shown
from trainledger.spec.rules.run import memory_problems
from trainledger.spec.run import Run

_MOST = 2**27  # places on a line of numbers
MOST_SHARDS = 2**14  # beyond the rows of a matrix, what is gathered is mostly padding
_GAP = 4096  # how far apart two runs that obey all rules may lie
_AHEAD = 8  # members of a family that are tried beyond the edge, as memory does not follow parameters to the byte


@frozen
class Axis:
    """Runs by place, in the order of what they need; None where rules forbid the place."""

    places: int
    at: Callable[[int], Run | None]
    start: int = 0
    ahead: int = 0

    def next(self, place: int) -> tuple[int, Run] | None:
        """The first place from here on that rules allow, and its run."""
        for each in range(place, min(self.places, place + _GAP)):
            run = self.at(each)
            if run is not None:
                return each, run
        return None


def edge(axis: Axis, fits: Callable[[Run], bool]) -> tuple[tuple[int, Run] | None, tuple[int, Run] | None]:
    """The last run for which ``fits`` holds and the first for which it does not: neighbours, None where there is none.

    From ``axis.start`` steps are doubled until the answer turns, then halved; ``axis.ahead`` further places are tried
    after that.
    """

    def holds(place: int) -> bool:
        found = axis.next(place)
        return found is not None and fits(found[1])

    step = 1
    if holds(axis.start):
        low = axis.start
        while low + step < axis.places and holds(low + step):
            low, step = low + step, 2 * step
        high = min(low + step, axis.places)
    else:
        high = axis.start
        while high - step >= 0 and not holds(high - step):
            high, step = high - step, 2 * step
        low = max(high - step, 0)
        if high - step < 0 and not holds(0):
            return None, axis.next(0)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    last = axis.next(low)
    assert last is not None
    beyond = axis.next(last[0] + 1)
    tried = beyond
    for _ in range(axis.ahead):
        tried = axis.next(tried[0] + 1) if tried is not None else None
        if tried is not None and fits(tried[1]):
            last, beyond = tried, axis.next(tried[0] + 1)
    while beyond is not None and fits(beyond[1]):  # a later one fits, and so may its neighbour
        last, beyond = beyond, axis.next(beyond[0] + 1)
    return last, beyond


def models(run: Run, family: Family) -> Axis:
    """The run with each member of a family as its model."""

    def at(place: int) -> Run | None:
        spec = family[place]
        longest = max(spec.max_seq_len, run.recipe.seq_len)
        return _allowed(_with(run, model={"max_seq_len": longest}, spec=spec))

    return Axis(len(family), at, start=family.nearest(parameters(run.model).total), ahead=_AHEAD)


def sequence_unit(run: Run) -> int:
    """Sequences are tried in steps of so many tokens: 128, or what ranks that split them ask for."""
    layout = run.layout
    return lcm(128, layout.context * (2 if layout.context > 1 else 1) * (layout.tensor if layout.tensor > 1 else 1))


def sequences(run: Run) -> Axis:
    """The run with longer and longer sequences; the model's own limit is lifted."""
    unit = sequence_unit(run)

    def at(place: int) -> Run | None:
        tokens = (place + 1) * unit
        longest = max(run.model.max_seq_len, tokens)
        return _allowed(_with(run, recipe={"seq_len": tokens}, model={"max_seq_len": longest}))

    return Axis(_MOST // unit, at, start=max(0, run.recipe.seq_len // unit - 1))


def micro_batches(run: Run) -> Axis:
    """The run with larger and larger micro-batches, as many of them in a step as before."""

    def at(place: int) -> Run | None:
        batch = (place + 1) * run.layout.data_ranks * run.grad_accum
        return _allowed(_with(run, recipe={"micro_batch": place + 1, "global_batch": batch}))

    return Axis(2**20, at, start=run.device_batch - 1)


def shards(run: Run) -> Axis:
    """The run with its states shared by more and more ranks: what a rank holds falls along it.

    The micro-batch and about the global batch stay, so that fewer ranks take more micro-batches each.
    """
    return Axis(MOST_SHARDS, lambda place: on_shards(run, place + 1), start=min(run.layout.shard, MOST_SHARDS) - 1)


def on_shards(run: Run, ranks: int) -> Run | None:
    """The run with its states sharded over so many ranks; None where rules forbid it."""
    return _allowed(_sharded(run, ranks))


def why_not_sharded(run: Run) -> str:
    """The rule that forbids to share states over two ranks, beside its field; empty where none does."""
    return next((f"{each.field} = {shown(each.value)} {each.rule}" for each in broken(_sharded(run, 2))), "")


def _sharded(run: Run, ranks: int) -> Run:
    per_step = run.device_batch * ranks
    batch = max(1, run.recipe.global_batch // per_step) * per_step
    recipe = {"micro_batch": run.device_batch, "global_batch": batch}
    return _with(run, recipe=recipe, layout={"replicate": 1, "shard": ranks})


def _with(run: Run, *, spec: ModelSpec | None = None, **sections: dict[str, Any]) -> Run:
    """The run with fields of its sections changed, and as many devices as its layout takes."""
    changed = replace(
        run,
        model=replace(run.model if spec is None else spec, **sections.get("model", {})),
        recipe=replace(run.recipe, **sections.get("recipe", {})),
        layout=replace(run.layout, **sections.get("layout", {})),
    )
    if changed.layout.alone:
        return changed
    return replace(changed, cluster=replace(run.cluster, count=changed.layout.devices))


def _allowed(run: Run) -> Run | None:
    return None if any(True for _ in broken(run)) else run


def broken(run: Run) -> list[Problem]:
    """What rules say against a run, as far as its memory and its layout go."""
    return list(memory_problems(run))
