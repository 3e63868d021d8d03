"""Two runs: the fields that differ, as overrides too, and side by side what each costs, with the causes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from trainledger import catalog
from trainledger.forecast.predict.forecast import Forecast, nanoseconds
from trainledger.forecast.predict.interval import Interval, of_ratio, widening
from trainledger.ledger.model.parameters import parameters
from trainledger.report.document import Answer
from trainledger.spec.device import PairErrors
from trainledger.spec.frozen import frozen
from trainledger.spec.run import Run
from trainledger.spec.run_text import Difference, differences
from trainledger.spec.units import counted

OUTSIDE = "outside the tensors"
# Of the whole time: seconds that are summed in another order differ by some 1e-15 of it.
ROUNDING = 1e-12


@frozen
class Row:
    """One quantity of both plans; None where it is not known. ``unit`` is as in `answers.compare`."""

    name: str
    unit: str
    a: float | None
    b: float | None

    @property
    def difference(self) -> float | None:
        return None if self.a is None or self.b is None else self.b - self.a


@frozen
class Part:
    """What one cause, or one category of memory, has in both: whole nanoseconds or bytes."""

    name: str
    a: int
    b: int

    @property
    def difference(self) -> int:
        return self.b - self.a


@frozen
class Ratio:
    """The time of b over that of a as predicted, and between which two ratios `SHARE` of such pairs were measured.

    ``pairs`` are those of published runs, on one device where both runs have the same, else on two.
    """

    predicted: float
    interval: Interval
    pairs: PairErrors
    one_device: bool

    @property
    def decided(self) -> bool:
        """Whether one of the two is faster over the whole interval."""
        return not self.interval.low <= 1 <= self.interval.high


@frozen
class Comparison(Answer, report="compare"):
    """Two runs and their forecasts.

    ``times`` (nanoseconds) sum to the time of ``of`` in each, ``memory`` (bytes) to the memory of its peak rank, so
    that their differences sum to the difference exactly; empty where one of the two is not known. Parts of a time that
    differ only by the rounding of seconds are equal. ``ratio`` says how sure the difference of the times is; None where
    nothing published says it. ``names`` are what the runs are called.
    """

    a: Run
    b: Run
    forecast_a: Forecast
    forecast_b: Forecast
    fields: tuple[Difference, ...]
    rows: tuple[Row, ...]
    of: str
    times: tuple[Part, ...]
    memory: tuple[Part, ...]
    ratio: Ratio | None = None
    names: tuple[str, ...] = ("a", "b")

    def __repr__(self) -> str:
        return f"Comparison({counted(len(self.fields), 'field')} changed; {self.of}: {_total(self.times) / 1e9:+.6g} s)"


def compare(a: Run, forecast_a: Forecast, b: Run, forecast_b: Forecast) -> Comparison:
    """Both runs with their forecasts, side by side; differences are b less a."""
    of, times = _times(forecast_a, forecast_b)
    known = forecast_a.peak_nbytes is not None and forecast_b.peak_nbytes is not None
    return Comparison(
        a=a,
        b=b,
        forecast_a=forecast_a,
        forecast_b=forecast_b,
        fields=differences(a, b),
        rows=tuple(_rows(a, forecast_a, b, forecast_b)),
        of=of,
        times=times,
        memory=_parts(_memory_of(forecast_a), _memory_of(forecast_b)) if known else (),
        ratio=_ratio(a, forecast_a, b, forecast_b),
    )


def _ratio(a: Run, forecast_a: Forecast, b: Run, forecast_b: Forecast) -> Ratio | None:
    """What is known of two times together: where both are of published devices and neither is a bound."""
    field = "step_seconds" if None in (forecast_a.total_seconds, forecast_b.total_seconds) else "total_seconds"
    times, known = [getattr(forecast, field) for forecast in (forecast_a, forecast_b)], catalog.device_names()
    if not all(times) or any(run.cluster.device not in known for run in (a, b)):
        return None
    models = [catalog.errors(run.cluster.device) for run in (a, b)]
    if any(model.step.basis == "bound" for model in models):
        return None
    same = a.cluster.device == b.cluster.device
    pairs = models[0].one_device if same else models[0].two_devices
    wider = max(widening(run, model.steps_seen, model) for run, model in zip((a, b), models, strict=True))
    predicted = times[1] / times[0]
    return Ratio(predicted, of_ratio(pairs, predicted, wider), pairs, same)


def reasons(parts: tuple[Part, ...]) -> list[Part]:
    """The parts that differ, the largest difference first."""
    return sorted((part for part in parts if part.difference), key=lambda part: -abs(part.difference))


def _total(parts: tuple[Part, ...]) -> int:
    return sum(part.difference for part in parts)


def _rows(a: Run, forecast_a: Forecast, b: Run, forecast_b: Forecast) -> Iterator[Row]:
    counts = parameters(a.model), parameters(b.model)
    yield Row("parameters", "count", counts[0].total, counts[1].total)
    if any(count.active != count.total for count in counts):
        yield Row("active parameters", "count", counts[0].active, counts[1].active)
    yield Row("devices", "count", a.cluster.count, b.cluster.count)
    yield Row("tokens in a step", "count", a.recipe.tokens_per_step, b.recipe.tokens_per_step)
    yield Row("steps", "count", a.recipe.total_steps, b.recipe.total_steps)
    # Only of runs that wait for tokens: a step and its speed with the wait.
    waits = forecast_a.waits or forecast_b.waits
    with_wait = [
        ("step with the wait for tokens", "seconds", "run_step_seconds"),
        ("tokens/s with the wait", "rate", "run_tokens_per_second"),
        ("MFU with the wait", "share", "run_mfu"),
    ]
    for name, unit, field in (
        ("model FLOPs in a step", "flops", "model_flops"),
        ("memory of a device", "nbytes", "device_nbytes"),
        ("step", "seconds", "step_seconds"),
        ("tokens/s", "rate", "tokens_per_second"),
        ("MFU", "share", "mfu"),
        ("HFU", "share", "hfu"),
        *(with_wait if waits else ()),
        ("whole run", "seconds", "total_seconds"),
        ("goodput", "share", "goodput"),
        ("device-hours", "amount", "device_hours"),
        ("money", "amount", "money"),
        ("kWh", "amount", "kwh"),
        ("CO2 (kg)", "amount", "co2_kg"),
    ):
        row = Row(name, unit, getattr(forecast_a, field), getattr(forecast_b, field))
        if row.a is not None or row.b is not None:
            yield row


def _times(a: Forecast, b: Forecast) -> tuple[str, tuple[Part, ...]]:
    """The whole run by the bars of its waterfall; one step by its causes where one has no time of the whole run."""
    if a.waterfall and b.waterfall and a.total_seconds is not None and b.total_seconds is not None:
        bars = [{bar.cause: bar.nanoseconds for bar in forecast.waterfall} for forecast in (a, b)]
        return "the whole run", _settled(_parts(*bars))
    if a.step_seconds and b.step_seconds:
        return "one step", _settled(_parts(_whole_nanoseconds(a), _whole_nanoseconds(b)))
    return "", ()


def _settled(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Parts that differ by no more than rounding made equal; the part that differs most has what that leaves of b."""
    within = ROUNDING * max(sum(part.a for part in parts), sum(part.b for part in parts))
    most = max(parts, key=lambda part: abs(part.difference))
    settled = [replace(part, b=part.a) if abs(part.difference) <= within else part for part in parts if part != most]
    rest = _total(parts) - sum(part.difference for part in settled)
    found = {part.name: part for part in [*settled, replace(most, b=most.a + rest)]}
    return tuple(found[part.name] for part in parts)


def _whole_nanoseconds(forecast: Forecast) -> dict[str, int]:
    """The causes of a step in whole nanoseconds that sum to the step's."""
    found, until, before = {}, 0.0, 0
    causes = forecast.step_causes or {"step": forecast.step_seconds or 0.0}
    last = next(reversed(causes))
    for cause, seconds in causes.items():
        until += seconds
        at = nanoseconds(forecast.step_seconds or 0.0) if cause == last else nanoseconds(until)
        found[cause] = at - before
        before = at
    return found


def _memory_of(forecast: Forecast) -> dict[str, int]:
    nbytes = dict(forecast.peak_by_category)
    if forecast.device_nbytes is not None:
        nbytes[OUTSIDE] = forecast.device_nbytes - sum(nbytes.values())
    return nbytes


def _parts(a: Mapping[str, int], b: Mapping[str, int]) -> tuple[Part, ...]:
    return tuple(Part(name, a.get(name, 0), b.get(name, 0)) for name in dict.fromkeys([*a, *b]))
