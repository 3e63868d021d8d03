"""Forecast and measurement: how far apart, which part differs, and the rest that nothing explains.

For every quantity the differences of its parts and the unexplained rest sum to measured - predicted, exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import inf
from typing import Any

from trainledger.forecast.predict.forecast import Forecast
from trainledger.forecast.predict.roofline import mfu
from trainledger.ledger.ledger import Ledger, summary
from trainledger.ledger.measured import EagerBytes, Measured, Spread
from trainledger.report.document import Answer

Number = int | float


@dataclass(frozen=True)
class Part:
    """One part of a quantity on both sides; what one side does not have counts as 0 there."""

    name: str
    predicted: Number
    measured: Number

    @property
    def difference(self) -> Fraction:
        return Fraction(self.measured) - Fraction(self.predicted)

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return _ratio(self.measured, self.predicted)


@dataclass(frozen=True)
class Row:
    """One quantity, predicted and measured; either is None where it is not known.

    ``unit`` is count, flops, nbytes, seconds, tokens_per_second or share.
    """

    quantity: str
    title: str
    unit: str
    predicted: Number | None
    measured: Number | None
    basis: str = ""
    parts: tuple[Part, ...] = ()
    spread: Spread | None = None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return None if self.measured is None else _ratio(self.measured, self.predicted)

    @property
    def difference(self) -> Fraction | None:
        """Measured minus predicted, without rounding."""
        if self.measured is None or self.predicted is None:
            return None
        return Fraction(self.measured) - Fraction(self.predicted)

    @property
    def unexplained(self) -> Fraction | None:
        """What is left of the difference when the parts' differences are taken off."""
        if self.difference is None:
            return None
        return self.difference - sum((part.difference for part in self.parts), Fraction())

    @property
    def where(self) -> tuple[str, Fraction] | None:
        """The part that holds most of the difference, and how much; ``unexplained`` is a part as well."""
        if self.unexplained is None:
            return None
        shares = [(part.name, part.difference) for part in self.parts] + [("unexplained", self.unexplained)]
        largest = max(shares, key=lambda share: abs(share[1]))
        return largest if largest[1] else None


def _ratio(measured: Number, predicted: Number | None) -> float | None:
    """None where nothing was predicted; infinite where a float cannot hold it."""
    if not predicted:
        return None
    try:
        return float(Fraction(measured) / Fraction(predicted))
    except OverflowError:
        return inf


@dataclass(frozen=True)
class Reconciliation(Answer, report="pages.reconciliation"):
    """All quantities of a run, forecast and measurement."""

    rows: tuple[Row, ...]
    device: str = ""
    notes: tuple[str, ...] = ()

    def __getitem__(self, quantity: str) -> Row:
        return next(row for row in self.rows if row.quantity == quantity)

    @property
    def unexplained(self) -> dict[str, float]:
        """The unexplained rest of each quantity that both sides have."""
        return {row.quantity: float(row.unexplained) for row in self.rows if row.unexplained is not None}


def reconcile(predicted: Forecast | Ledger, measured: Measured | Ledger) -> Reconciliation:
    """Each predicted quantity of a run against its measurement; a ledger stands for the quantities it holds."""
    before = predicted if isinstance(predicted, Forecast) else Forecast(**summary(predicted))
    after = measured if isinstance(measured, Measured) else Measured(**summary(measured))
    notes = *(note.replace("no step time", "no predicted step time") for note in before.notes), *after.notes
    return Reconciliation(tuple(_rows(before, after)), after.device or before.device, notes)


def _rows(before: Forecast, after: Measured) -> Iterator[Row]:
    def row(quantity: str, title: str, unit: str, parts: tuple[Part, ...] = (), **options: Any) -> Row:
        values = {
            "predicted": getattr(before, quantity, None),
            "measured": getattr(after, quantity, None),
            "basis": before.basis.get(quantity, ""),
        }
        return Row(quantity, title, unit, parts=parts, **{**values, **options})

    yield row("parameters", "parameters", "count")
    mine, theirs = _matmuls(before.flops), _matmuls(after.flops)
    totals = {
        "predicted": sum(mine.values()) if before.flops else None,
        "measured": sum(theirs.values()) if after.flops else None,
    }
    yield row("flops", "hardware FLOPs", "flops", _parts(mine, theirs), **totals)
    metered = after.eager or before  # the closed form of what was metered
    kept, peak = metered.kept_nbytes, metered.peak_nbytes
    by_kind, by_category = metered.kept_by_kind, metered.peak_by_category
    yield row("kept_nbytes", "kept for backward", "nbytes", _parts(by_kind, after.kept_by_kind), predicted=kept)
    yield row("peak_nbytes", "peak memory", "nbytes", _parts(by_category, after.peak_by_category), predicted=peak)
    if after.allocator_peak_nbytes is not None:
        of_peak = {"predicted": before.peak_nbytes, "basis": before.basis.get("peak_nbytes", "")}
        yield row("allocator_peak_nbytes", "allocator's peak", "nbytes", _dispatched(metered, after), **of_peak)
    step = after.step_seconds.median if after.step_seconds else None
    phases = _phases(before.step_seconds_by_phase, after.step_seconds_by_phase)
    yield row("step_seconds", "step time", "seconds", phases, measured=step, spread=after.step_seconds)
    yield _tokens_per_second(before, after, step)
    yield _mfu(before, after, step)
    yield row("total_seconds", "total time", "seconds", _phases(before.seconds_by_phase, after.seconds_by_phase))


def _matmuls(flops: Mapping[str, int]) -> dict[str, int]:
    return {kind: count for kind, count in flops.items() if kind in ("matmul", "attention")}


def _parts(before: Mapping[str, Number], after: Mapping[str, Number]) -> tuple[Part, ...]:
    """Both sides by name; none where one side is not split, as nothing could be said about where it sits."""
    if not before or not after:
        return ()
    return tuple(Part(name, before.get(name, 0), after.get(name, 0)) for name in dict.fromkeys((*before, *after)))


def _phases(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[Part, ...]:
    """By phase, recomputation counted with the backward it happens in, as clocks around phases do, and a loss that
    was timed by itself with the forward."""
    return _parts(_folded(before, "recompute", "backward"), _folded(after, "loss", "forward"))


def _folded(seconds: Mapping[str, float], phase: str, into: str) -> dict[str, float]:
    folded = {name: each for name, each in seconds.items() if name != phase}
    if phase in seconds:
        folded[into] = folded.get(into, 0.0) + seconds[phase]
    return folded


def _dispatched(before: Forecast | EagerBytes, after: Measured) -> tuple[Part, ...]:
    if before.peak_nbytes is None or after.peak_nbytes is None:
        return ()
    inside = (Part("sums inside of bf16 matmuls", 0, after.matmul_sums_nbytes),) if after.matmul_sums_nbytes else ()
    return (Part("dispatched", before.peak_nbytes, after.peak_nbytes), *inside)


def _tokens_per_second(before: Forecast, after: Measured, step: float | None) -> Row:
    tokens = after.tokens_per_step or before.tokens_per_step
    measured = after.tokens_per_second
    if measured is None and step and tokens:
        measured = tokens / step
    parts: tuple[Part, ...] = ()
    if step and tokens and before.step_seconds:
        parts = (Part("step time", tokens / before.step_seconds, tokens / step),)
    basis = before.basis.get("tokens_per_second", "")
    title = "tokens per second"
    return Row("tokens_per_second", title, "tokens_per_second", before.tokens_per_second, measured, basis, parts)


def _mfu(before: Forecast, after: Measured, step: float | None) -> Row:
    """Both against the forecast's peak; parts: the step time with the FLOPs as predicted, then the FLOPs."""
    one, flops = before.peak_flops_per_second, after.model_flops or before.model_flops
    peak = one and one * before.devices
    measured = mfu(flops, step, peak) if peak and flops and step else None
    parts: tuple[Part, ...] = ()
    if measured is not None and before.mfu is not None and before.model_flops and peak and step:
        between = mfu(before.model_flops, step, peak)
        parts = (Part("step time", before.mfu, between), Part("model FLOPs", between, measured))
    return Row("mfu", "MFU", "share", before.mfu, measured, before.basis.get("mfu", ""), parts)
