"""The model that a compute budget affords: of a given shape, in a layout that fits, at its predicted speed.

A scaling law says N and D for an assumed share of the peak. Here the N becomes a member of a family, a layout and a
micro-batch are found that fit, its step is predicted, and the tokens of that speed give the next N; until N stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trainledger.forecast.plan.compute_budget import Budget, at_mfu
from trainledger.forecast.plan.family import family_of
from trainledger.forecast.plan.memory_check import MemoryUse, memory_model
from trainledger.forecast.plan.placed import Predict, fastest
from trainledger.forecast.plan.scaling_law import FixedSize, Law
from trainledger.forecast.predict.forecast import Forecast
from trainledger.ledger.model.parameters import parameters
from trainledger.spec.device import Device, kernels_of_capability
from trainledger.spec.frozen import frozen
from trainledger.spec.model import ModelSpec
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Run
from trainledger.spec.units import format_count

SEQ_LEN = 4096
_MOST_ITERATIONS = 6
_NEAR = 0.03  # of N: two iterations so near each other are the last
_MUCH = 0.1  # of N: so much less than the rule asks for is worth a sentence
_IN_TIME = 0.002
_SAME_LOSS = 0.001  # nats: less than any law can distinguish
_LARGE_BUDGET = 1e24  # FLOP
_USUAL_TOKENS, _MANY_TOKENS = 4 * 10**6, 16 * 10**6  # of a step


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
    memory, family = memory_model(machine, backend=kernels), family_of(base)
    share, iterations, found = budget.mfu, list[Iteration](), list[tuple[int, int, Forecast]]()
    while True:
        wanted = law.parameters(at_mfu(budget, share).flops).value
        at = family.nearest(wanted)
        iteration = f"iteration {len(iterations) + 1}, {format_count(wanted)} parameters"
        say(iteration)
        place, run, forecast = fastest(
            family, at, budget, memory, predict, seq_len=seq_len, tokens_per_step=tokens_per_step,
            say=lambda what: say(f"{iteration}: {what}"),  # noqa: B023
        )  # fmt: skip
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
    losses = [loss(each.parameters, each.tokens) for each in iterations if each.tokens is not None]
    best = min(range(len(losses)), key=lambda each: losses[each])
    return best if losses[best] < losses[last] - _SAME_LOSS else last


def default_tokens_per_step(flops: float, at_least: int = 0) -> int:
    """4M tokens, as LLaMA from 7B to 65B (arXiv 2302.13971, table 2); 16M from 1e24 FLOP on, as Llama 3 405B.

    (Llama 3, arXiv 2407.21783, section 3.4.1, comes to 16M in two steps.) Smaller budgets take fewer, 0.2920 C^0.3271
    (DeepSeek LLM, arXiv 2401.02954, section 3.1), which is 4M at 7e21 FLOP: with 4M a model of a day on one device
    would be trained beyond its critical batch, in a few hundred steps. But not fewer than ``at_least``, a sequence for
    each device, up to 4M.
    """
    if flops >= _LARGE_BUDGET:
        return _MANY_TOKENS
    return min(_USUAL_TOKENS, max(int(0.2920 * flops**0.3271), at_least))


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
    )  # fmt: skip
