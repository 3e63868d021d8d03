"""The learning rate of a step: a pure function of the recipe and the step's index."""

from __future__ import annotations

import math

from trainledger.spec.recipe import Cosine, Linear, Recipe, WarmupStableDecay


def learning_rate(recipe: Recipe, step: int) -> float:
    """The learning rate of the step with index ``step`` (the first is 0).

    Linear warm-up reaches the peak at index ``warmup_steps - 1``; from there the rate goes to
    ``final_ratio`` of the peak at the last step: along a half cosine (Loshchilov and Hutter 2017, without
    restarts), a line, or (``wsd``, Hu et al. 2024, section 4) flat and then a line over the last ``decay_fraction``.

    >>> schedule = Linear(final_ratio=0.0)
    >>> recipe = Recipe(seq_len=8, global_batch=1, steps=11, learning_rate=1.0, schedule=schedule)
    >>> [round(learning_rate(recipe, k), 3) for k in (0, 5, 10)]
    [1.0, 0.5, 0.0]
    """
    peak, last = recipe.learning_rate, recipe.total_steps - 1
    schedule = recipe.schedule
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if not isinstance(schedule, Linear):
        return peak
    top = max(schedule.warmup_steps - 1, 0)  # the last index at the peak
    if isinstance(schedule, WarmupStableDecay):
        top = max(top, last - round(schedule.decay_fraction * recipe.total_steps))
    progress = min(max(step - top, 0) / max(last - top, 1), 1.0)
    height = (1 + math.cos(math.pi * progress)) / 2 if isinstance(schedule, Cosine) else 1 - progress
    return peak * (schedule.final_ratio + (1 - schedule.final_ratio) * height)


def sampled_steps(recipe: Recipe, most: int) -> list[int]:
    """About ``most`` indices of steps, evenly spaced, with the first, the last and those where the schedule turns.

    >>> sampled_steps(Recipe(seq_len=8, global_batch=1, steps=1000), 5)
    [0, 249, 499, 749, 999]
    """
    last, schedule = recipe.total_steps - 1, recipe.schedule
    turns = [schedule.warmup_steps - 1, schedule.warmup_steps]
    if isinstance(schedule, WarmupStableDecay):
        turns.append(last - round(schedule.decay_fraction * recipe.total_steps))
    spaced = [last * at // max(1, most - 1) for at in range(most)]
    return sorted({each for each in (*spaced, *turns) if 0 <= each <= last})


def due(step: int, every: int | None) -> bool:
    """Whether something that happens every so many steps happens after this one."""
    return every is not None and step % every == 0
