"""From a step to the whole run: tokens per second, hours, device-hours and the bill."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.frozen import frozen
from trainledger.spec.run import Run
from trainledger.units import SECONDS_PER_HOUR


@frozen
class RunTime:
    """Predicted time of a whole run; ``by_phase`` sums to ``total_seconds``.

    ``step_seconds`` is one device's for the whole batch, ``tokens_per_second`` that of all devices together.
    ``money`` is None where the run file names no price.
    """

    steps: int
    step_seconds: float
    tokens_per_second: float
    total_seconds: float
    by_phase: dict[str, float]
    device_hours: float
    money: float | None
    notes: tuple[str, ...] = ()


def evaluations(run: Run) -> int:
    """How often the run evaluates: at every ``eval_every`` steps, and at its end."""
    return _occasions(run.recipe.total_steps, run.recipe.eval_every)


def checkpoints(run: Run) -> int:
    """How often the run saves: at every ``checkpoint_every`` steps, and at its end."""
    return _occasions(run.recipe.total_steps, run.recipe.checkpoint_every)


def _occasions(steps: int, every: int | None) -> int:
    return 1 if every is None else steps // every + bool(steps % every)


def _assumed(run: Run) -> Iterator[str]:
    recipe, count = run.recipe, run.cluster.count
    if count > 1:
        yield f"{count:,} devices are taken to share the work without loss: the run file has no [layout]"
        if recipe.micro_batch is None and recipe.global_batch > 1:
            yield (
                f"micro_batch is not given, so each device is taken to hold all {recipe.global_batch:,} sequences at "
                "once; --set recipe.micro_batch=1 splits them"
            )
        if recipe.global_batch < count:
            yield f"{recipe.global_batch:,} sequences a step are too few to give each of {count:,} devices one"
    if recipe.tokens is not None and recipe.tokens < recipe.tokens_per_step:
        whole = f"the {recipe.tokens_per_step:,} tokens of one step, which is the least that is trained"
        yield f"recipe.tokens = {recipe.tokens:,} is less than {whole}"


def run_time(
    run: Run,
    step_seconds: float,
    *,
    by_phase: dict[str, float] | None = None,
    checkpoint_nbytes: int | None = None,
    storage_bytes_per_second: float | None = None,
) -> RunTime:
    """The whole run from one step's seconds.

    ``by_phase`` splits the step (it must sum to ``step_seconds``); its forward part is what an evaluation
    costs per sequence. A checkpoint costs its bytes over the storage's rate, where both are given. Several
    devices share steps and evaluations without loss, and no checkpoint. What is left out is named in ``notes``.
    """
    recipe, steps, count = run.recipe, run.recipe.total_steps, run.cluster.count
    phases = {name: seconds * steps / count for name, seconds in (by_phase or {"steps": step_seconds}).items()}
    notes = list(_assumed(run))
    if by_phase and "forward" in by_phase:
        sequences = evaluations(run) * recipe.eval_sequences
        phases["evaluation"] = by_phase["forward"] / recipe.global_batch * sequences / count
    else:
        notes.append("evaluation is not in it: the step is not split by phase")
    if checkpoint_nbytes is not None and storage_bytes_per_second:
        phases["checkpoint"] = checkpoints(run) * checkpoint_nbytes / storage_bytes_per_second
    else:
        notes.append("checkpoints are not in it: the storage was not measured")
    total = sum(phases.values())
    device_hours = total * count / SECONDS_PER_HOUR
    price = run.cluster.price_per_device_hour
    return RunTime(
        steps=steps,
        step_seconds=step_seconds,
        tokens_per_second=recipe.tokens_per_step * count / step_seconds,
        total_seconds=total,
        by_phase=phases,
        device_hours=device_hours,
        money=None if price is None else price * device_hours,
        notes=tuple(notes),
    )
