"""A measured step of a run beside the predicted one: what the causes of the prediction explain of it, and the rest.

What may have made it slower are hypotheses, each a changed run that is predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import log, sqrt
from typing import Any

from trainledger.answers.machine import kernels_of, machine_of
from trainledger.answers.pages.interval import between
from trainledger.answers.pages.log import Row, against
from trainledger.forecast.plan.advise import Hypothesis
from trainledger.forecast.predict.forecast import Forecast
from trainledger.forecast.predict.predict import forecast as forecast_of
from trainledger.forecast.predict.roofline import mfu as mfu_of
from trainledger.ledger.ranks import RunAccount, account_run
from trainledger.observe.logs import TABLE
from trainledger.report.document import Bars, Section, section
from trainledger.spec.cluster import LEAST_RATE
from trainledger.spec.device import Device
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Run
from trainledger.spec.run_text import as_override, changed
from trainledger.spec.units import format_nbytes, format_percent, format_seconds

_HALVINGS = 12  # of the logarithm of a rate
NETWORK, LOADER = "cluster.network_reached_bytes_per_second", "cluster.loader_tokens_per_second"


@frozen
class MeasuredStep:
    """Seconds of a step as somebody measured them, and the MFU that they are (None: the peak is not known)."""

    seconds: float
    mfu: float | None
    forecast: Forecast

    @property
    def row(self) -> Row:
        """The step beside its prediction."""
        return Row(
            "step_seconds", self.seconds, self.forecast.step_seconds, self.forecast.intervals.get("step_seconds")
        )

    @property
    def unexplained_seconds(self) -> float:
        """What is left when the causes of the predicted step are taken off; below zero where it is faster."""
        return self.seconds - (self.forecast.step_seconds or 0.0)


def measured_step(forecast: Forecast, seconds: float) -> MeasuredStep:
    """A step of so many seconds beside its forecast."""
    flops, peak = forecast.model_flops, (forecast.peak_flops_per_second or 0) * forecast.devices
    return MeasuredStep(seconds, mfu_of(flops, seconds, peak) if flops and peak else None, forecast)


def seconds_of(forecast: Forecast, mfu: float | None, seconds: float | None) -> float | None:
    """The seconds of a step by its ``mfu`` or its ``seconds``, None without either; raises `InvalidInput`."""
    if mfu is None and seconds is None:
        return None
    name, value = ("mfu", mfu or 0.0) if seconds is None else ("step_seconds", seconds)
    flops, peak = forecast.model_flops, (forecast.peak_flops_per_second or 0) * forecast.devices
    rule = ""
    if mfu is not None and seconds is not None:
        rule = f"is given beside mfu = {mfu:g}; give one of them"
    elif value <= 0:
        rule = "must be larger than 0"
    elif forecast.step_seconds is None or forecast.impossible:
        rule = "has no predicted step to stand beside; `trainledger plan` says why"
    elif seconds is None and not (flops and peak):
        rule = "is of a peak that is not known here; give the time of a step (--step-seconds)"
    else:
        value = value if seconds is not None else (flops or 0) / (value * peak)
        share = measured_step(forecast, value).mfu
        if share is None or share <= 1 + 1e-9:
            return value
        rule = f"would be an MFU of {format_percent(share)}: it is of another model, batch or number of devices"
    raise InvalidInput([Problem(name, value, rule)])


def verdict(step: MeasuredStep) -> str:
    """The step beside the forecast and its interval, with its MFU."""
    mfu = f" (MFU {format_percent(step.mfu)}, attention counted dense)" if step.mfu is not None else ""
    predicted = f"{format_seconds(step.row.predicted or 0)}{between(step.forecast, 'step_seconds', format_seconds)}"
    return f"{against(step.row)}{mfu}; the forecast is {predicted}."


def explained(step: MeasuredStep, run: str) -> Section:
    """The causes of the predicted step and the rest of the measured one, and what finds that."""
    return section("What a measured step goes to", Bars(tuple(_bars(step))), tuple(_remarks(step, run)))


def _bars(step: MeasuredStep) -> Iterator[tuple[str, int]]:
    causes = {**step.forecast.step_causes, "unexplained": step.unexplained_seconds}
    return ((cause, round(seconds * 1e9)) for cause, seconds in causes.items() if seconds)


def _remarks(step: MeasuredStep, run: str) -> Iterator[str]:
    explained, rest = (step.forecast.step_seconds or 0) / step.seconds, step.unexplained_seconds / step.seconds
    if rest > 0:
        yield f"Explained: {format_percent(explained)} of the step; unexplained: {format_percent(rest)}."
    if (place := step.row.place) in ("above", "below"):
        yield str(TABLE["next"][place]).format(run=run)


def data(step: MeasuredStep) -> dict[str, Any]:
    """The same for JSON; causes and the rest sum to the seconds."""
    return {
        "step_seconds": step.seconds,
        "mfu": step.mfu,
        "predicted_seconds": step.forecast.step_seconds,
        "ratio": step.seconds / (step.forecast.step_seconds or step.seconds),
        "place": step.row.place,
        "causes": dict(step.forecast.step_causes),
        "unexplained_seconds": step.unexplained_seconds,
    }


def hypotheses(run: Run, measured: float) -> tuple[Hypothesis, ...]:
    """What makes the step slower than planned, the nearest to ``measured`` seconds first, what was solved for last."""
    account = _account(run)
    planned, found = forecast_of(account, machine_of(run)).step_seconds, []
    for what, field, value in _causes(run):
        try:
            changed_run = changed(run, {field: value})
            seconds = forecast_of(_account(changed_run), machine_of(changed_run)).step_seconds
        except InvalidInput:  # no run of this layout or device
            continue
        if planned is not None and seconds is not None and seconds > 1.005 * planned:
            found.append(Hypothesis(what, as_override(field, value), seconds))
    found.sort(key=lambda one: abs(log(one.seconds / measured)))
    return (*found, *_solved(account, measured))


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


def _solved(account: RunAccount, measured: float) -> Iterator[Hypothesis]:
    machine = machine_of(account.run)
    if isinstance(machine, Device) and machine.fabric is not None and machine.fabric.network is not None:
        sheet = machine.fabric.network.bytes_per_second
        low, high = float(LEAST_RATE), sheet
        slowest, fastest = (_at_rate(account, rate) for rate in (low, high))
        if slowest is not None and fastest is not None and fastest < measured <= slowest:
            for _ in range(_HALVINGS):
                middle = sqrt(low * high)
                low, high = (middle, high) if (_at_rate(account, middle) or 0.0) > measured else (low, middle)
            rate = float(f"{high:.2g}")
            what = f"a network of {format_nbytes(rate)}/s a device (data sheet: {format_nbytes(sheet)}/s)"
            yield Hypothesis(what, as_override(NETWORK, round(rate)), _at_rate(account, rate) or measured, solved=True)
    rate = round(account.run.recipe.tokens_per_step / measured)
    what = f"loaders of {rate:,} tokens/s for all devices"
    yield Hypothesis(what, as_override(LOADER, rate), measured, solved=True)


def _at_rate(account: RunAccount, rate: float) -> float | None:
    run = replace(account.run, cluster=replace(account.run.cluster, network_reached_bytes_per_second=round(rate)))
    return forecast_of(replace(account, run=run), machine_of(run)).step_seconds


def _account(run: Run) -> RunAccount:
    return account_run(run, backend=kernels_of(run))
