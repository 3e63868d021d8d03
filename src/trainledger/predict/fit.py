"""Whether a run fits in a memory, and the nearest change of its recipe that makes it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Run
from trainledger.units import format_nbytes


def refuse_beyond(run: Run, memory_nbytes: int, peak_nbytes: Callable[[Run], int], where: str) -> None:
    """Raise `InvalidInput` where a run's peak is more than the memory of ``where``, with what would fit.

    ``peak_nbytes`` is asked for the run and then for runs that need less: smaller micro-batches, then every block run
    again in backward, then both.
    """
    needed = peak_nbytes(run)
    if needed <= memory_nbytes:
        return
    smaller = next((change for change, other in _smaller(run) if peak_nbytes(other) <= memory_nbytes), None)
    rule = f"needs {format_nbytes(needed)} at the peak of a step, and {where} has {format_nbytes(memory_nbytes)}"
    if smaller is None:
        raise InvalidInput([Problem("model", run.model.name, f"{rule}; no micro-batch is small enough")])
    raise InvalidInput([Problem("recipe.micro_batch", run.device_batch, rule, smaller)])


def _smaller(run: Run) -> Iterator[tuple[str, Run]]:
    """Runs with the same result that need less memory, the least changed first, each with its change in words."""
    batch = run.device_batch
    sizes = [size for size in range(batch, 0, -1) if not run.recipe.global_batch % size] if batch <= 2**16 else [1]
    for checkpointing in dict.fromkeys((run.recipe.activation_checkpointing, "full")):
        for size in _few(sizes):
            changes = []
            if size != batch:
                changes.append(f"recipe.micro_batch={size}")
            if checkpointing != run.recipe.activation_checkpointing:
                changes.append(f"recipe.activation_checkpointing={checkpointing}")
            if changes:
                recipe = replace(run.recipe, micro_batch=size, activation_checkpointing=checkpointing)
                yield " ".join(changes), replace(run, recipe=recipe)


def _few(sizes: list[int]) -> list[int]:
    """About halves of each other, the smallest always."""
    kept = [sizes[0]]
    for size in sizes[1:]:
        if size == sizes[-1] or 2 * size <= kept[-1]:
            kept.append(size)
    return kept
