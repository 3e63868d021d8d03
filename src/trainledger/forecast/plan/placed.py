"""A model of a family placed on so many devices: a layout, a micro-batch and a recomputation that fit and are quick."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import log2

from trainledger.forecast.plan.compute_budget import Budget
from trainledger.forecast.plan.family import Family
from trainledger.forecast.plan.layouts.grid import CHECKPOINTING
from trainledger.forecast.plan.memory_check import MemoryModel
from trainledger.forecast.predict.forecast import Forecast
from trainledger.ledger.model.parameters import parameters
from trainledger.spec.cluster import Cluster
from trainledger.spec.device import Device
from trainledger.spec.layers import checkpointed
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.precision import PRECISIONS
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.recipe import Recipe
from trainledger.spec.rules.run import memory_problems
from trainledger.spec.run import Run

Predict = Callable[[Run], Forecast]

_TENSOR_RANKS = (1, 2, 4, 8)  # within a node
_MOST_STAGES = 64
_FEW_DEVICES = 64  # up to so many the small search here is enough
_SEARCH_SECONDS = 3.0
_NEAR = 1.03  # of two sizes: what is between them is not tried


def fastest(
    family: Family,
    at: int,
    budget: Budget,
    scale: MemoryModel,
    predict: Predict,
    *,
    seq_len: int,
    tokens_per_step: int,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[int, Run, Forecast]:
    """The quickest way to train the member of a family at a place, or a smaller one where that fits in no way.

    The place that was taken, within 3 % of the largest that fits, the run, and what is predicted of it. On few devices
    the least tensor ranks and stages that fit are tried with each recomputation; on many, joined by a known network,
    `plan.layouts` searches, without context ranks and interleaved stages. ``say`` hears how far that is. Raises
    InvalidInput where no member fits.
    """
    device, count = budget.device, budget.count
    assert device is not None
    assert count is not None

    def run_at(place: int) -> Run:
        spec = replace(family[place], max_seq_len=max(family[place].max_seq_len, seq_len))
        return _run(spec, device, count, budget.dtype, seq_len, tokens_per_step)

    joined = device.fabric is None or device.fabric.network is not None or count <= device.fabric.devices_per_node
    searched = count > _FEW_DEVICES and scale.machine is device and joined

    def placed_at(place: int) -> tuple[Run, Forecast] | None:
        if searched:
            found = _searched(run_at(place), device, scale.backend, say)
            return None if found is None else (found, predict(found))
        timed = [(each, predict(each)) for each in _placed(run_at(place), tokens_per_step, scale)]
        return max(timed, key=lambda each: each[1].tokens_per_second or 0.0, default=None)

    too_large = at + 1
    for place in _downwards(at):
        found = placed_at(place)
        if found is not None:
            break
        too_large = place
    else:
        raise _none(run_at(0), device, count)
    while too_large - place > 1 and parameters(family[too_large]).total > _NEAR * parameters(family[place]).total:
        between = (place + too_large) // 2
        more = placed_at(between)
        if more is None:
            too_large = between
        else:
            place, found = between, more
    return place, *found


def _none(run: Run, device: Device, count: int) -> InvalidInput:
    rule = f"holds no model of the family, however it is spread, with sequences of {run.recipe.seq_len:,} tokens"
    if count > _FEW_DEVICES:
        rule += f", {run.recipe.global_batch:,} of them a step (tokens_per_step)"
    return InvalidInput([Problem("device", device.name, rule)])


def _searched(run: Run, device: Device, backend: str, say: Callable[[str], None]) -> Run | None:
    """The quickest layout of the search, None where none fits."""
    from trainledger.forecast.plan.layouts.search import search

    def progress(what: str, done: int, of: int) -> None:
        if done < of:
            say(f"{what}: {done:,} of {of:,}")

    fixed = {"context": 1, "virtual_stages": 1}
    found = search(
        run, device, backend=backend, fixed=fixed, keep=1, limit_seconds=_SEARCH_SECONDS, front=False, progress=progress
    )  # fmt: skip
    if found.interrupted:  # it ends the question, not only this search
        raise KeyboardInterrupt
    return None if found.best is None else found.best.run


def _placed(run: Run, tokens_per_step: int, scale: MemoryModel) -> list[Run]:
    """The run in the first layout that fits, with each recomputation that fits in it; empty where none does."""
    for layout in _layouts(run.cluster.count):
        found = []
        for saving in CHECKPOINTING:
            recipe = checkpointed(run.recipe, saving)
            largest = _largest_batch(replace(run, recipe=recipe, layout=layout), tokens_per_step, scale)
            if largest is not None:
                found.append(largest)
        if found:
            return found
    return []


def _downwards(at: int) -> Iterator[int]:
    """Places from one on downwards, in steps that grow."""
    step = 0
    while at - step > 0:
        yield at - step
        step = max(1, 2 * step)
    yield 0


def _layouts(count: int) -> Iterator[Layout]:
    """Ways to spread a model, those that cost least first: more tensor ranks within a node, then more stages."""
    stages = 1
    while stages <= min(count, _MOST_STAGES):
        for tensor in _TENSOR_RANKS:
            if count % (tensor * stages) == 0:
                shard = count // (tensor * stages)
                yield Layout(shard=shard, tensor=tensor, sequence_parallel=tensor > 1, pipeline=stages)
        stages *= 2


def _run(spec: ModelSpec, device: Device, count: int, dtype: str, seq_len: int, tokens_per_step: int) -> Run:
    """The model with a usual recipe: 16-bit matmuls, fp32 state, compiled blocks; not yet spread."""
    precision = dtype
    if dtype in ("bf16", "fp16"):
        precision = "bf16-sharded" if dtype == "bf16" and count > 1 else f"{dtype}-mixed"
    batch = _batch(tokens_per_step, seq_len, count)
    if _batch(tokens_per_step, seq_len, 1) < count:
        batch = _fewer_than_devices(max(1.0, tokens_per_step / seq_len), count)  # of one sequence, however long it is
    recipe = Recipe(
        seq_len=seq_len, global_batch=batch, micro_batch=1, steps=1, precision=PRECISIONS[precision](), compile=True
    )  # fmt: skip
    return Run(model=spec, recipe=recipe, cluster=Cluster(device=device.name, count=count))


def _batch(tokens_per_step: int, seq_len: int, per_round: int) -> int:
    """Sequences of a step: about so many tokens, in whole rounds of all ranks."""
    return max(1, round(tokens_per_step / seq_len / per_round)) * per_round


def _fewer_than_devices(sequences: float, count: int) -> int:
    """About so many sequences for more devices: tensor ranks and stages are powers of two, all else are data ranks."""
    odd = _odd(count)
    if odd > 2 * sequences:
        near = next(each for each in range(count, 0, -1) if _odd(each) <= sequences)
        step = f"a step of {sequences:,.0f} sequence{'' if sequences < 1.5 else 's'} (tokens_per_step)"
        rule = f"is {odd:,} times a power of two, too many for {step}"
        raise InvalidInput([Problem("count", count, rule, near)])
    return odd << max(0, round(log2(sequences / odd)))


def _odd(number: int) -> int:
    """What is left of a number without its factors of two."""
    return number // (number & -number)


def _largest_batch(run: Run, tokens_per_step: int, scale: MemoryModel) -> Run | None:
    """The run with the largest micro-batch of 1, 2, 4, 8 that fits; None where not even one does or rules forbid it."""
    found = None
    for size in (1, 2, 4, 8):
        ranks = run.layout.data_ranks
        batch = _batch(tokens_per_step, run.recipe.seq_len, size * ranks)
        tried = replace(run, recipe=replace(run.recipe, micro_batch=size, global_batch=batch))
        if next(memory_problems(tried), None) is not None or (
            found is not None and size * ranks * run.recipe.seq_len > 2 * tokens_per_step
        ):
            return found
        if not scale.fits(tried):
            return found
        found = tried
    return found
