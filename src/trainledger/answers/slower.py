"""Why a measured step may be slower than its forecast: each hypothesis is a changed run, which is predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import log, sqrt

from trainledger.answers.machine import kernels_of, machine_of
from trainledger.forecast.plan.advise import Hypothesis
from trainledger.forecast.predict.predict import forecast
from trainledger.ledger.ranks import RunAccount, account_run
from trainledger.spec.cluster import LEAST_RATE
from trainledger.spec.device import Device
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run
from trainledger.spec.run_text import as_override, changed
from trainledger.spec.units import format_nbytes

_HALVINGS = 12  # of the logarithm of a rate
NETWORK, LOADER = "cluster.network_reached_bytes_per_second", "cluster.loader_tokens_per_second"


def hypotheses(run: Run, measured: float) -> tuple[Hypothesis, ...]:
    """What makes the step slower than planned, the nearest to ``measured`` seconds first, what was solved for last."""
    planned = _seconds(run)
    found = []
    for what, field, value in _causes(run):
        try:
            seconds = _seconds(changed(run, {field: value}))
        except InvalidInput:  # no run of this layout or device
            continue
        if planned is not None and seconds is not None and seconds > 1.005 * planned:
            found.append(Hypothesis(what, as_override(field, value), seconds))
    found.sort(key=lambda one: abs(log(one.seconds / measured)))
    return (*found, *_solved(run, measured))


def _causes(run: Run) -> Iterator[tuple[str, str, object]]:
    recipe, machine = run.recipe, machine_of(run)
    yield "kernels launched one after the other, nothing overlaps", "recipe.launch_blocking", True
    yield "every block recomputed", "recipe.activation_checkpointing", "full"
    yield "attention without a fused kernel", "recipe.attention", "math"
    yield "micro-batches of one sequence", "recipe.micro_batch", 1
    if recipe.precision.low:
        yield "matmuls in tf32: no autocast", "recipe.precision", "tf32"
        yield "matmuls in fp32: no autocast", "recipe.precision", "fp32"
    if recipe.compile:
        yield "blocks not compiled", "recipe.compile", False
    if isinstance(machine, Device) and machine.power_watts is not None:
        yield "half of the rated power", "cluster.power_limit_watts", round(machine.power_watts / 2)


def _solved(run: Run, measured: float) -> Iterator[Hypothesis]:
    machine = machine_of(run)
    if isinstance(machine, Device) and machine.fabric is not None and machine.fabric.network is not None:
        account, sheet = account_run(run, backend=kernels_of(run)), machine.fabric.network.bytes_per_second
        low, high = float(LEAST_RATE), sheet
        slowest, fastest = (_at_rate(account, rate) for rate in (low, high))
        if slowest is not None and fastest is not None and fastest < measured <= slowest:
            for _ in range(_HALVINGS):
                middle = sqrt(low * high)
                low, high = (middle, high) if (_at_rate(account, middle) or 0.0) > measured else (low, middle)
            rate = float(f"{high:.2g}")
            what = f"a network of {format_nbytes(rate)}/s a device (data sheet: {format_nbytes(sheet)}/s)"
            yield Hypothesis(what, as_override(NETWORK, round(rate)), _at_rate(account, rate) or measured, solved=True)
    rate = round(run.recipe.tokens_per_step / measured)
    what = f"loaders of {rate:,} tokens/s for all devices"
    yield Hypothesis(what, as_override(LOADER, rate), measured, solved=True)


def _at_rate(account: RunAccount, rate: float) -> float | None:
    run = replace(account.run, cluster=replace(account.run.cluster, network_reached_bytes_per_second=round(rate)))
    return forecast(replace(account, run=run), machine_of(run)).step_seconds


def _seconds(run: Run) -> float | None:
    return forecast(account_run(run, backend=kernels_of(run)), machine_of(run)).step_seconds
