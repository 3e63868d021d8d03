"""The learning rate of every step, as a pure function of the recipe."""

from __future__ import annotations

import math

from trainledger.spec.recipe import Recipe


def learning_rate(recipe: Recipe, step: int) -> float:
    """The learning rate of the step with index ``step`` (the first is 0).

    Linear warm-up reaches the peak at index ``warmup_steps - 1``; from there the rate goes to
    ``final_lr_ratio`` of the peak at the last step: along a half cosine (Loshchilov and Hutter 2017, without
    restarts), a line, or (``wsd``, Hu et al. 2024, section 4) flat and then a line over the last ``decay_fraction``.

    >>> recipe = Recipe(seq_len=8, global_batch=1, steps=11, learning_rate=1.0, schedule="linear", final_lr_ratio=0.0)
    >>> [round(learning_rate(recipe, k), 3) for k in (0, 5, 10)]
    [1.0, 0.5, 0.0]
    """
    peak, last = recipe.learning_rate, recipe.total_steps - 1
    if step < recipe.warmup_steps:
        return peak * (step + 1) / recipe.warmup_steps
    if recipe.schedule == "constant":
        return peak
    top = max(recipe.warmup_steps - 1, 0)  # the last index at the peak
    if recipe.schedule == "wsd":
        top = max(top, last - round(recipe.decay_fraction * recipe.total_steps))
    progress = min(max(step - top, 0) / max(last - top, 1), 1.0)
    height = (1 + math.cos(math.pi * progress)) / 2 if recipe.schedule == "cosine" else 1 - progress
    return peak * (recipe.final_lr_ratio + (1 - recipe.final_lr_ratio) * height)
