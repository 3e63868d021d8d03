"""The forecast of a run, kept with it to be compared with the measurement, and its waterfall.

The waterfall leads from 6 N D at the whole peak to the time that a run will take, one bar for each cause. Bars are
whole nanoseconds, so that they sum to the total exactly, added in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, fields
from importlib import import_module
from typing import Any

from trainledger.forecast.predict.interval import EVEN, Interval
from trainledger.ledger.core.sizes import added
from trainledger.ledger.entry import BASES
from trainledger.ledger.ledger import StepFigures
from trainledger.spec.frozen import frozen
from trainledger.spec.plain import table_beside
from trainledger.spec.problem import Problem
from trainledger.spec.units import format_nbytes, format_percent

NAPKIN = "6 N D at the peak"
BEYOND = "attention, not in 6 N D"
WITH_REFERENCE = "attention and reference, not in 6 N D"  # of preferences
IDEAL = "model FLOPs at the peak"
UNEXPLAINED = "unexplained"
RUN_CAUSES = ("data", "evaluation", "checkpoints", "failures", "warm-up")

_NANO = 10**9
_ROUNDING = 1e-9  # of the total: what sums of floating-point seconds may differ by


@frozen
class Bar:
    """What one cause adds to the time of a run; it may take away."""

    cause: str
    nanoseconds: int

    @property
    def seconds(self) -> float:
        return self.nanoseconds / _NANO


@frozen
class Bottleneck:
    """The name of what limits a run, and a sentence with how much of its time that takes."""

    name: str
    sentence: str


@frozen(kw_only=True)
class Forecast(StepFigures):
    """A run as predicted: one step's ledger in figures, its time, and the time of the whole.

    Names are those of `ledger.measured.Measured`. What could not be predicted is None, and ``notes`` says why.
    ``basis`` names that of each quantity: exact, bound, assumed or measured. ``peak_flops_per_second`` is that of one
    of the ``devices`` that share a step; MFU is of the peak of all of these. ``peak_nbytes`` is of the tensors of the
    peak rank, ``device_nbytes`` all that it holds, of ``usable_nbytes`` that it has. ``waterfall`` leads from
    6 N D at the peak to ``total_seconds``; ``step_causes`` split a step (`predict.step.CAUSES`). ``goodput`` is
    the share of the time that goes to steps that are kept. ``kwh`` is at the devices' rated power times
    ``cluster.power_share`` and the power usage effectiveness. ``impossible`` says why several devices without a layout
    cannot share the run: then there is no forecast of the whole run, and the step and its tokens per second are
    those of one device alone. ``run_step_seconds`` and ``run_tokens_per_second`` are those of all devices
    together with what a step waits for its tokens; the others are of steps that do not wait.
    ``intervals`` has by name of a quantity between what published runs find it (`forecast.predict.interval`), and
    ``chance_of_fitting`` is that of ``fits``: with ``margin_nbytes`` left free of ``usable_nbytes`` it is 95 %.
    """

    step_seconds: float | None = None
    step_seconds_by_phase: dict[str, float] = field(default_factory=dict)
    step_seconds_by_kind: dict[str, float] = field(default_factory=dict)
    step_seconds_by_bound: dict[str, float] = field(default_factory=dict)
    tokens_per_second: float | None = None
    run_step_seconds: float | None = None
    run_tokens_per_second: float | None = None
    total_seconds: float | None = None
    seconds_by_phase: dict[str, float] = field(default_factory=dict)
    mfu: float | None = None
    hfu: float | None = None
    matmul_dtype: str = ""
    peak_flops_per_second: float | None = None
    devices: int = 1
    days: float | None = None
    device_hours: float | None = None
    money: float | None = None
    kwh: float | None = None
    co2_kg: float | None = None
    goodput: float | None = None
    interruptions: float | None = None
    checkpoint_every: int | None = None
    step_causes: dict[str, float] = field(default_factory=dict)
    waterfall: tuple[Bar, ...] = ()
    bottleneck: Bottleneck | None = None
    device_nbytes: int | None = None
    usable_nbytes: int | None = None
    fits: bool | None = None
    chance_of_fitting: float | None = None
    margin_nbytes: int | None = None
    intervals: dict[str, Interval] = field(default_factory=dict)
    device: str = ""
    basis: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    impossible: tuple[str, ...] = ()

    def records(self) -> list[dict[str, Any]]:
        """The numbers that are known, a row each with its basis: for pandas or polars."""
        values = ((each.name, getattr(self, each.name)) for each in fields(self))
        known = {name: value for name, value in values if isinstance(value, int | float)}
        return [{"quantity": name, "value": value, "basis": self.basis.get(name, "")} for name, value in known.items()]

    def _repr_html_(self) -> str:
        rows = [(record["quantity"], f"{record['value']:,.6g}", record["basis"]) for record in self.records()]
        table = import_module("trainledger.report.document").Table(
            "forecast", ("quantity", "value", "basis"), tuple(rows), align="lr"
        )
        return str(import_module("trainledger.report.html").table_html(table))

    def __repr__(self) -> str:
        names = ("step_seconds", "tokens_per_second", "mfu", "days", "device_hours", "money", "device_nbytes", "fits")
        shown = [
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
            for name in names
            if (value := getattr(self, name)) is not None
        ]
        limit = [] if self.bottleneck is None else [f"bottleneck={self.bottleneck.name!r}"]
        cannot = [f"impossible={'; '.join(self.impossible)!r}"] if self.impossible else []
        if self.step_seconds is None:  # then the notes say why, and memory is all there is
            shown = [*shown, *([] if self.peak_nbytes is None else [f"peak_nbytes={self.peak_nbytes}"])]
            cannot += [f"notes={'; '.join(self.notes)!r}"] if self.notes else []
        return f"Forecast({', '.join([*shown, *limit, *cannot])})"

    @property
    def headroom_nbytes(self) -> int | None:
        """Usable memory that the peak rank leaves."""
        if self.usable_nbytes is None or self.device_nbytes is None:
            return None
        return self.usable_nbytes - self.device_nbytes

    def as_likely_as(self, chance: float) -> bool:
        """Whether the chance to fit is at least so much, or not known."""
        return self.chance_of_fitting is None or self.chance_of_fitting >= chance

    @property
    def likely_fits(self) -> bool | None:
        """Whether the run fits rather than not: by its bytes, and by the chance where that is known."""
        return self.fits and self.as_likely_as(EVEN)

    @property
    def waits(self) -> bool:
        """Whether steps of the run wait for their tokens."""
        if self.run_tokens_per_second is None or self.tokens_per_second is None:
            return False
        return self.run_tokens_per_second < self.tokens_per_second

    @property
    def run_mfu(self) -> float | None:
        """MFU with what a step waits for its tokens."""
        if self.mfu is None or not self.tokens_per_second or self.run_tokens_per_second is None:
            return None
        return self.mfu * self.run_tokens_per_second / self.tokens_per_second

    def problems(self) -> Iterator[Problem]:
        if self.devices < 1:
            yield Problem("devices", self.devices, "must be at least 1", 1)
        for quantity, basis in self.basis.items():
            if basis not in BASES:
                yield Problem(f"basis.{quantity}", basis, f"must be one of {', '.join(BASES)}")


def nanoseconds(seconds: float) -> int:
    """Seconds as whole nanoseconds, rounded once; the product of floats would round twice.

    >>> nanoseconds(0.1), nanoseconds(-3e-9), nanoseconds(1e9 + 0.1)
    (100000000, -3, 1000000000100000024)
    """
    above, below = seconds.as_integer_ratio()
    return (2 * above * _NANO + below) // (2 * below)


def waterfall(
    napkin_seconds: float,
    steps_seconds: float,
    step_causes: Mapping[str, float],
    run_parts: Mapping[str, float],
    total_seconds: float,
    beyond: str = BEYOND,
) -> tuple[Bar, ...]:
    """The bars of a run that takes ``total_seconds``; they sum to `nanoseconds` of it.

    ``napkin_seconds`` is 6 N D over the peak of all devices; ``step_causes`` split one step (``ideal`` is its model
    FLOPs at the peak) and are scaled to ``steps_seconds``, all steps of the run; ``run_parts`` are the seconds of
    RUN_CAUSES. What these leave of the total is a bar named ``unexplained``. Where 6 N D counts more than the model
    FLOPs (frozen weights have no gradients, a looked-up embedding no matmul), one bar of these stands for both; else
    ``beyond`` is the name of the rest.
    """
    split = sum(step_causes.values())
    scale = steps_seconds / split if split else 0.0
    causes = {name: seconds * scale for name, seconds in step_causes.items()}
    ideal = causes.pop("ideal", 0.0)
    begin = {NAPKIN: napkin_seconds, beyond: ideal - napkin_seconds} if napkin_seconds <= ideal else {IDEAL: ideal}
    bars = begin | causes
    bars |= {name: run_parts.get(name, 0.0) for name in RUN_CAUSES}
    rest = total_seconds - sum(bars.values())
    if abs(rest) > _ROUNDING * total_seconds:
        bars[UNEXPLAINED] = rest
    found = {cause: nanoseconds(seconds) for cause, seconds in bars.items()}
    largest = max(found, key=lambda cause: abs(found[cause]))
    found[largest] += nanoseconds(total_seconds) - sum(found.values())  # what the rounding of each bar leaves
    return tuple(Bar(cause, each) for cause, each in found.items())


COMPUTE = (NAPKIN, BEYOND, WITH_REFERENCE, IDEAL, "kernel efficiency")
# What a run's time goes to by cause, and what a cause of a step's seconds means (`forecast.predict.step.CAUSES`).
OF_CAUSES: dict[str, dict[str, str]] = table_beside(__file__, "causes.toml")


def bottleneck(bars: Sequence[Bar], *, mfu: float | None = None) -> Bottleneck | None:
    """The cause that takes most of a run's time, matmuls at the peak and below it together; None of no bars."""
    by_name = added(("compute" if bar.cause in COMPUTE else bar.cause, bar.nanoseconds) for bar in bars)
    total = sum(by_name.values())
    if total <= 0:
        return None
    first, *others = sorted(by_name, key=lambda name: -by_name[name])
    sentence = f"{format_percent(by_name[first] / total)} of the time {OF_CAUSES[first]['goes']}"
    lost = next((bar.nanoseconds for bar in bars if bar.cause == "kernel efficiency"), 0)
    if first == "compute" and mfu is not None and lost > 0:
        reached = 1 - lost / by_name["compute"]
        sentence += f", at {format_percent(reached)} of the peak"
    if others and by_name[others[0]] > 0:
        sentence += f"; next: {format_percent(by_name[others[0]] / total)} {OF_CAUSES[others[0]]['goes']}"
    return Bottleneck(first, sentence)


def short_of_memory(
    needed_nbytes: int, usable_nbytes: int, by_category: dict[str, int], *, who: str = "a device"
) -> Bottleneck:
    """The bottleneck of a run that does not fit; ``who`` says which device is spoken of."""
    largest = max(by_category, key=lambda each: by_category[each])
    needs = f"{who} needs {format_nbytes(needed_nbytes)} and has {format_nbytes(usable_nbytes)}"
    return Bottleneck("device memory", f"{needs}; most of it is {largest}: {format_nbytes(by_category[largest])}")
