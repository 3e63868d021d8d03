"""Changes of a recipe that need less memory for the same result, one on top of the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trainledger.frozen import frozen
from trainledger.plan.fit_axis import broken
from trainledger.spec.rules.recipe import recipe_problems
from trainledger.spec.run import Run

LOSS_CHUNKS = 8


@frozen
class Recipe:
    """A run with some of its settings changed, each as a line for ``--set``; ``name`` says what the last one does."""

    name: str
    settings: tuple[str, ...]
    run: Run


def recipes(run: Run) -> tuple[Recipe, ...]:
    """The run as it is, and then with each further change that it does not have yet and that rules allow.

    States sharded in full (ZeRO-3), parameters let go after forward, one sequence at a time, every block run again in
    backward, and the loss taken of a part of the tokens at a time: none of them changes what is learned, all but the
    first cost time.
    """
    found = [Recipe("as it is", (), run)]
    for name, change in _changes(run):
        before = found[-1]
        change = {section: _new(getattr(before.run, section), fields) for section, fields in change.items()}
        sections = {section: replace(getattr(before.run, section), **fields) for section, fields in change.items()}
        changed = replace(before.run, **sections)
        if not broken(changed) and not any(True for _ in recipe_problems(changed.recipe)):
            lines = tuple(f"{section}.{key}={value}" for section, each in change.items() for key, value in each.items())
            found.append(Recipe(f"+ {name}", (*before.settings, *lines), changed))
    return tuple(found)


def _new(section: object, fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if getattr(section, name) != value}


def _changes(run: Run) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    layout, recipe = run.layout, run.recipe
    if layout.replicate > 1 or (layout.shard_ranks > 1 and layout.zero < 3):
        shard = layout.replicate * layout.shard
        yield "states sharded in full", {"layout": {"replicate": 1, "shard": shard, "zero": 3}}
    if layout.shard_ranks > 1 and not layout.reshards:
        yield "parameters gathered again in backward", {"layout": {"reshard_after_forward": True}}
    if run.device_batch > 1:
        yield "micro-batch 1", {"recipe": {"micro_batch": 1}}
    if recipe.activation_checkpointing not in ("full", "from-start", "segments") or recipe.recompute_every > 1:
        yield "full recomputation", {"recipe": {"activation_checkpointing": "full", "recompute_every": 1}}
    if not recipe.loss_in_chunks and layout.tensor == 1:
        yield "loss in chunks", {"recipe": {"loss": "chunked", "loss_chunks": LOSS_CHUNKS}}
