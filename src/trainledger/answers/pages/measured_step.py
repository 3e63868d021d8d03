"""A measured step of a run beside the predicted one: what the causes of the prediction explain of it, and the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainledger.answers.pages.interval import between
from trainledger.answers.pages.log import Row, against
from trainledger.forecast.predict.forecast import Forecast
from trainledger.forecast.predict.roofline import mfu as mfu_of
from trainledger.observe.logs import TABLE
from trainledger.report.document import Bars, Section, section
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import format_percent, format_seconds


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
