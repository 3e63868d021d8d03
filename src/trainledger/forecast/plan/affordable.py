"""The model that a compute budget affords: of a given shape, in a layout that fits, at its predicted speed.

A scaling law says N and D for an assumed share of the peak. Here the N becomes a member of a family, a layout and a
micro-batch are found that fit, its step is predicted, and the tokens of that speed give the next N; until N stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import log2

from trainledger.forecast.plan.family import Family, family_of
from trainledger.forecast.plan.layouts.grid import CHECKPOINTING
from trainledger.forecast.plan.memory_model import MemoryModel, MemoryUse, memory_model
from trainledger.forecast.plan.quantity import Budget, at_mfu
from trainledger.forecast.plan.scaling_law import FixedSize, Law, default_tokens_per_step
from trainledger.forecast.predict.forecast import Forecast
from trainledger.forecast.predict.interval import LIKELY
from trainledger.ledger.model.parameters import parameters
from trainledger.spec.cluster import Cluster
from trainledger.spec.device import Device, kernels_of_capability
from trainledger.spec.frozen import frozen
from trainledger.spec.layers import checkpointed
from trainledger.spec.layout import Layout
from trainledger.spec.model import ModelSpec
from trainledger.spec.precision import PRECISIONS
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.recipe import Recipe
from trainledger.spec.rules.run import memory_problems
from trainledger.spec.run import Run
from trainledger.spec.units import format_count

SEQ_LEN = 4096
_MOST_ITERATIONS = 6
_NEAR = 0.03  # of N: two iterations so near each other are the last
_MUCH = 0.1  # of N: so much less than the rule asks for is worth a sentence
_IN_TIME = 0.002
_SAME_LOSS = 0.001  # nats: less than any law can distinguish


@frozen
class Iteration:
    """One iteration: the wanted N, the nearest model that fits, its layout, and its share of the peak.

    ``mfu`` is 6 N tokens/s over the peak of all devices, as the law counts it. None where no time is predicted.
    """

    wanted: float
    run: Run
    parameters: int
    mfu: float | None
    tokens: float | None


@frozen
class Affordable:
    """The best iteration: a run that fits, its forecast, and the tokens that the budget affords.

    It is the last one (``best``), unless N does not settle because neighbouring shapes suit layouts differently.
    ``tokens`` are those of the run with evaluation, checkpoints and failures; those of an iteration are of its steps
    alone. ``note`` says where memory or the family kept the model from the size that the law asks for.
    """

    run: Run
    memory: MemoryUse
    forecast: Forecast
    family: str
    iterations: tuple[Iteration, ...]
    tokens: float | None = None
    note: str = ""
    best: int = -1

    @property
    def parameters(self) -> int:
        return self.iterations[self.best].parameters

    @property
    def mfu(self) -> float | None:
        return self.iterations[self.best].mfu

    @property
    def ratio(self) -> float | None:
        return None if self.tokens is None else self.tokens / self.parameters

    def __repr__(self) -> str:
        return f"Affordable({self.parameters:.4g} parameters on {self.tokens or 0:.4g} tokens)"


def affordable(
    budget: Budget,
    law: Law,
    base: ModelSpec,
    machine: Device,
    predict: Predict,
    *,
    seq_len: int = SEQ_LEN,
    tokens_per_step: int | None = None,
    loss: Callable[[float, float], float] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Affordable:
    """The run that a budget of devices and days affords by a scaling law; ``predict`` gives the forecast of a run.

    ``tokens_per_step`` None is `default_tokens_per_step`. ``loss`` of N and D picks the best iteration (None: the
    last). ``say`` is called with what is being tried. Raises InvalidInput where the budget has no devices or no time,
    or where nothing fits on them.
    """
    if budget.device is None or budget.count is None or budget.seconds is None:
        rule = "needs a device, how many of them, and for how long"
        raise InvalidInput([Problem("budget", None, rule)])
    if tokens_per_step is None:
        tokens_per_step = default_tokens_per_step(budget.flops, budget.count * seq_len)
    if base.experts is not None:
        rule = "has experts, and these laws were fitted on dense models: 6 N D and N mean other things there"
        raise InvalidInput([Problem("family", base.name, rule, "llama-3-8b")])
    kernels = kernels_of_capability(machine.compute_capability)
    memory, family = memory_model(machine, backend=kernels, chance=LIKELY), family_of(base)
    share, iterations, found = budget.mfu, list[Iteration](), list[tuple[int, int, Forecast]]()
    while True:
        wanted = law.parameters(at_mfu(budget, share).flops).value
        at = family.nearest(wanted)
        iteration = f"iteration {len(iterations) + 1}, {format_count(wanted)} parameters"
        say(iteration)
        place, run, forecast = fastest(
            family,
            at,
            budget,
            memory,
            predict,
            seq_len=seq_len,
            tokens_per_step=tokens_per_step,
            say=lambda what: say(f"{iteration}: {what}"),  # noqa: B023
        )
        iterations.append(_iteration(wanted, run, forecast, budget))
        found.append((place, at, forecast))
        last, before = iterations[-1], [each.parameters for each in iterations[:-1]]
        if last.mfu is None:
            untimed = f"no time is predicted for it, so {100 * share:.3g} % of the peak stays assumed"
            other = _other_size(last, place < at, law, base)
            note = f"{untimed}; {other}" if other else untimed
            return Affordable(run, memory.use_of(run), forecast, family.rule, tuple(iterations), note=note)
        share = last.mfu
        if law.parameters(at_mfu(budget, share).flops).value == wanted:
            break
        settled = bool(before) and abs(last.parameters - before[-1]) <= _NEAR * last.parameters
        if settled or last.parameters in before or len(iterations) == _MOST_ITERATIONS:
            break
    best = _best(iterations, loss)
    (place, at, forecast), chosen = found[best], iterations[best]
    assert chosen.tokens is not None
    say("the run with evaluation, checkpoints and failures")
    run, forecast, tokens = _in_time(chosen.run, forecast, chosen.tokens, budget.seconds, predict)
    note = _other_size(chosen, place < at, law, base)
    return Affordable(run, memory.use_of(run), forecast, family.rule, tuple(iterations), tokens, note, best)


def _other_size(chosen: Iteration, too_large: bool, law: Law, base: ModelSpec) -> str:
    """Why an iteration has another size than is wanted; empty where it has that size."""
    wanted = f"{format_count(float(f'{chosen.wanted:.3g}'))} parameters"
    if too_large:
        asks = "you ask for" if isinstance(law, FixedSize) else "the rule asks for"
        return f"memory allows no more on these devices; {asks} {wanted}"
    if abs(chosen.parameters / chosen.wanted - 1) > _MUCH:
        return f"the family of {base.name} has no member nearer to {wanted}; another may (--family)"
    return ""


def _best(iterations: list[Iteration], loss: Callable[[float, float], float] | None) -> int:
    """The iteration of the lowest loss; the last where the losses hardly differ."""
    last = len(iterations) - 1
    if loss is None:
        return last
    losses = [loss(iteration.parameters, iteration.tokens) for iteration in iterations if iteration.tokens is not None]
    best = min(range(len(losses)), key=lambda index: losses[index])
    return best if losses[best] < losses[last] - _SAME_LOSS else last


def _in_time(
    run: Run, forecast: Forecast, tokens: float, seconds: float, predict: Predict
) -> tuple[Run, Forecast, float]:
    """The run with as many tokens as fit in a time together with evaluation, checkpoints and failures."""
    for _ in range(4):
        run = replace(run, recipe=replace(run.recipe, steps=None, tokens=max(1, round(tokens))))
        forecast = predict(run)
        if not forecast.total_seconds or 1 - _IN_TIME < forecast.total_seconds / seconds <= 1:
            break
        tokens *= seconds / forecast.total_seconds * (1 - _IN_TIME / 2)
    return run, forecast, tokens


def _iteration(wanted: float, run: Run, forecast: Forecast, budget: Budget) -> Iteration:
    active = parameters(run.model).active
    total = parameters(run.model).total
    if forecast.tokens_per_second is None or budget.peak_flops_per_second is None or not budget.seconds:
        return Iteration(wanted, run, total, None, None)
    peak = budget.peak_flops_per_second * run.cluster.count
    return Iteration(
        wanted, run, total, 6 * active * forecast.tokens_per_second / peak, forecast.tokens_per_second * budget.seconds
    )


Predict = Callable[[Run], Forecast]

_TENSOR_RANKS = (1, 2, 4, 8)  # within a node
_MOST_STAGES = 64
_FEW_DEVICES = 64  # up to so many the small search here is enough
_SEARCH_SECONDS = 3.0
_BETWEEN = 1.03  # of two sizes: what is between them is not tried


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
        timed = [(run, predict(run)) for run in _placed(run_at(place), tokens_per_step, scale)]
        return max(timed, key=lambda each: each[1].tokens_per_second or 0.0, default=None)

    too_large = at + 1
    for place in _downwards(at):
        found = placed_at(place)
        if found is not None:
            break
        too_large = place
    else:
        raise _none(run_at(0), device, count)
    while too_large - place > 1 and parameters(family[too_large]).total > _BETWEEN * parameters(family[place]).total:
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
    layouts = search(
        run, device, backend=backend, fixed=fixed, keep=1, limit_seconds=_SEARCH_SECONDS, front=False, progress=progress
    )
    if layouts.interrupted:  # it ends the question, not only this search
        raise KeyboardInterrupt
    return None if layouts.best is None else layouts.best.run


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
    )
    return Run(model=spec, recipe=recipe, cluster=Cluster(device=device.name, count=count))


def _batch(tokens_per_step: int, seq_len: int, per_round: int) -> int:
    """Sequences of a step: about so many tokens, in whole rounds of all ranks."""
    return max(1, round(tokens_per_step / seq_len / per_round)) * per_round


def _fewer_than_devices(sequences: float, count: int) -> int:
    """About so many sequences for more devices: tensor ranks and stages are powers of two, all else are data ranks."""
    odd = _odd(count)
    if odd > 2 * sequences:
        near = next(index for index in range(count, 0, -1) if _odd(index) <= sequences)
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
