"""What helps a run that has grown: a layout that is searched for, more context ranks, a model for longer sequences."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import lcm
from typing import Any

from trainledger import catalog
from trainledger.forecast.plan.edges import last_holding
from trainledger.forecast.plan.layouts.grid import shared_layers
from trainledger.forecast.plan.limits import Judge
from trainledger.forecast.plan.sizes import Sweep, grow, regrown, sequence_step, whole_batch, with_sequence
from trainledger.spec.frozen import frozen
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.parts import field_at, from_fields
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run
from trainledger.spec.run_text import layout_overrides
from trainledger.spec.units import round_up

_SHAPE = ("d_model", "n_layers", "vocab_size", "attention.n_heads", "attention.n_kv_heads", "feed_forward.d_ff")
_ROUND = 1024  # tokens
_RANKS = (2, 4, 8, 16, 32, 64)
Planner = Callable[[Run], Run | None]  # gives a run the layout that it searches for; None where none fits


def longer_model(spec: ModelSpec, tokens: int) -> str | None:
    """The catalog's model of the same shape, or else of the same family, whose positions reach ``tokens``.

    Of a family, the model of the nearest width; None where the catalog has no such model.

    >>> from trainledger.catalog import model
    >>> longer_model(from_fields(ModelSpec, model("llama-3-8b")), 32768)
    'llama-3.1-8b'
    """
    family = spec.name.partition("-")[0]
    found: list[tuple[bool, int, str]] = []
    for name in catalog.model_names():
        other = from_fields(ModelSpec, catalog.model(name))
        same = all(field_at(other, path) == field_at(spec, path) for path in _SHAPE)
        if other.max_seq_len >= tokens and (same or name.partition("-")[0] == family):
            found.append((not same, abs(other.d_model - spec.d_model), name))
    return min(found, default=(False, 0, None))[2]


@frozen
class ContextRanks:
    """A layout with more context ranks that keeps a limit: the overrides that make it, and how far it then holds."""

    changes: tuple[str, ...]
    devices: int
    holds: int


def context_ranks(planned: Run, longer: Run, holds: Callable[[Run], bool], farthest: int) -> ContextRanks | None:
    """The fewest context ranks with which a ``longer`` run holds, and its longest sequence up to ``farthest``.

    That is in steps of 1,024 tokens. None where no layout of `with_context_ranks` holds.
    """
    for run in with_context_ranks(longer, planned.recipe.tokens_per_step):
        if holds(run):
            further = _in_round_steps(grow(run, "sequence", max(1, farthest // run.recipe.seq_len)))
            last = last_holding(lambda index: holds(further.at(index)), len(further.values))  # noqa: B023
            assert last is not None
            return ContextRanks(layout_overrides(planned, run), run.layout.devices, further.values[last])
    return None


def _in_round_steps(sweep: Sweep) -> Sweep:
    """A sweep of sequences with its first value, then only those that are multiples of 1,024 tokens."""
    start, step = sweep.values[0], sequence_step(sweep.at(0))
    apart = lcm(step, _ROUND)
    indices = [
        0,
        *((value - start) // step for value in range(start - start % apart + apart, sweep.values[-1] + 1, apart)),
    ]
    return replace(sweep, values=[sweep.values[index] for index in indices], at=lambda index: sweep.at(indices[index]))


def with_context_ranks(run: Run, tokens_per_step: int) -> Iterator[Run]:
    """The run with more and more context ranks: taken from its data ranks, then on more devices.

    Its sequences are as long, or longer by as little as the ranks ask for; a step keeps about ``tokens_per_step``.
    Only runs that obey all rules.
    """
    for more_devices in (False, True):
        for ranks in _RANKS:
            layout = _split(run.layout, ranks, more_devices)
            if layout is None:
                continue
            spread = replace(run, layout=layout, cluster=replace(run.cluster, count=layout.devices))
            step = sequence_step(spread)
            longer = with_sequence(spread, round_up(run.recipe.seq_len, step))
            unit = whole_batch(longer)
            batch = max(1, tokens_per_step // (longer.recipe.seq_len * unit)) * unit
            found = replace(longer, recipe=replace(longer.recipe, global_batch=batch))
            if next(run_problems(found), None) is None:
                yield found


def _split(layout: Layout, ranks: int, more_devices: bool) -> Layout | None:
    """The layout with so many times the context ranks; None where its data ranks cannot give them."""
    context = layout.context * ranks
    if more_devices:
        return replace(layout, context=context)
    for axis in ("shard", "replicate"):
        size = getattr(layout, axis)
        if size % ranks == 0:
            fewer: dict[str, Any] = {axis: size // ranks, "context": context}
            return replace(layout, **fewer)
    return None


def following(run: Run, axis: str, reach: int, keep_tokens: bool, planner: Planner, judge: Judge) -> Sweep:
    """The sweep on a grid of values (1, 1.5, 2, 3, 4 ... times the planned one), the layout following the size.

    Beyond a size at which the search finds nothing, nothing more is searched for; but with more devices it is.
    """
    sweep = regrown(run, axis, reach, keep_tokens=keep_tokens)
    grid = [0]
    factor = 2
    while factor <= 2 * reach:
        for twice in (factor, factor * 3 // 2):
            near = bisect_right(sweep.values, sweep.values[0] * twice // 2) - 1
            if near > grid[-1]:
                grid.append(near)
        factor *= 2
    layouts, chosen = [run], {0: run}
    found_nothing = len(grid)

    def at(index: int) -> Run:
        nonlocal found_nothing
        if index not in chosen:
            grown = sweep.at(grid[index])
            kept = (_laid_out_as(layout, grown) for layout in reversed(layouts))
            found = next((each for each in kept if judge.laid_out_well(each)), None)
            if found is None and (index < found_nothing or axis == "devices"):
                found = planner(grown)
                if found is None:
                    found_nothing = index
                else:
                    layouts.append(found)
            chosen[index] = _laid_out_as(layouts[-1], grown) if found is None else found
        return chosen[index]

    carries = f"{sweep.carries}{'; ' if sweep.carries else ''}the layout that the search finds"
    return replace(sweep, values=tuple(sweep.values[each] for each in grid), at=at, carries=carries)


def _laid_out_as(known: Run, run: Run) -> Run:
    """A run with the layout, micro-batch and recomputation of another; its own layers go over the stages."""
    layout = known.layout
    if layout.stage_layers is not None or run.model.n_layers != known.model.n_layers:
        layers = shared_layers(run.model.n_layers, layout.pipeline * layout.virtual_stages)
        if sum(layout.stage_layers or (0,)) != run.model.n_layers:
            layout = replace(layout, stage_layers=layers or None)
    recipe = replace(
        run.recipe, micro_batch=known.recipe.micro_batch, activation_checkpointing=known.recipe.activation_checkpointing
    )
    return replace(run, layout=layout, recipe=recipe)
