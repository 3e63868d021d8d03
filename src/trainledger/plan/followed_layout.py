"""A layout that follows the size of a run: where the one before passes a limit, the search gives the next one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

from trainledger.plan.limits import Judge
from trainledger.plan.sizes import regrown
from trainledger.plan.sweep import Sweep
from trainledger.spec.run import Run

Planner = Callable[[Run], Run | None]  # gives a run the layout that it searches for; None where none fits


def following(run: Run, axis: str, reach: int, keep_tokens: bool, planner: Planner, judge: Judge) -> Sweep:
    """The sweep on a grid of values (1, 1.5, 2, 3, 4 ... times the planned one), the layout following the size."""
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

    def at(index: int) -> Run:
        if index not in chosen:
            grown = sweep.at(grid[index])
            kept = (_laid_out_as(each, grown) for each in reversed(layouts))
            found = next((each for each in kept if judge.laid_out_well(each)), None)
            if found is None:
                found = planner(grown)
                if found is not None:
                    layouts.append(found)
            chosen[index] = _laid_out_as(layouts[-1], grown) if found is None else found
        return chosen[index]

    carries = f"{sweep.carries}{'; ' if sweep.carries else ''}the layout that the search finds"
    return replace(sweep, values=tuple(sweep.values[each] for each in grid), at=at, carries=carries)


def _laid_out_as(known: Run, run: Run) -> Run:
    """A run with the layout, micro-batch and recomputation of another."""
    recipe = replace(
        run.recipe,
        micro_batch=known.recipe.micro_batch,
        activation_checkpointing=known.recipe.activation_checkpointing,
    )
    return replace(run, layout=known.layout, recipe=recipe)
