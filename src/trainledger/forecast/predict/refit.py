"""A calibration fitted to past runs: by phase and kind of operation, how much longer it took than was predicted.

Each factor is the median of the runs' ratios, so that a run that went astray does not move it, within bounds. The
error that counts is on runs that a fit has not seen: each is predicted by the fit to all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from trainledger.report.document import Answer
from trainledger.spec.calibration import LEAST_FACTOR, MOST_FACTOR, Fit
from trainledger.spec.frozen import frozen

ENOUGH_RUNS = 3
ENOUGH_RATIOS = 2  # of a kind: what was seen once says nothing of the next run
SMALLEST_SHARE = 0.005  # of a step: the ratio of what hardly takes time is noise


@frozen(kw_only=True)
class RunSample:
    """One run's step by kind of operation, measured and as the calibration alone predicts it.

    ``seconds`` is the median step, which may hold more than the kinds do.
    """

    name: str
    seconds: float
    measured: dict[str, float]
    predicted: dict[str, float]

    def predicted_with(self, factors: Mapping[str, float]) -> float:
        """Seconds of the step with factors on its kinds."""
        return sum(seconds * factors.get(kind, 1.0) for kind, seconds in self.predicted.items())


@frozen(kw_only=True)
class RefitRow:
    """A run's step time: measured, predicted without a fit, and by the fit to the other runs."""

    name: str
    measured: float
    before: float
    after: float


@frozen(kw_only=True)
class Refit(Answer, report="pages.refit"):
    """A fit with its errors; ``written`` is where it was kept, empty where it would not make forecasts better.

    ``passed_over`` has the runs that were not used, each with the reason.
    """

    title: str
    fit: Fit
    ratios: dict[str, tuple[float, ...]]
    rows: tuple[RefitRow, ...]
    passed_over: tuple[tuple[str, str], ...]
    written: str = ""

    @property
    def better(self) -> bool:
        """Whether runs that it was not fitted to are predicted better with it."""
        return self.fit.error_after < self.fit.error_before


def ratios_of(samples: Sequence[RunSample]) -> dict[str, tuple[float, ...]]:
    """Measured over predicted by kind, of the runs in which the kind takes time on both sides."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        least = SMALLEST_SHARE * sample.seconds
        for kind, predicted in sample.predicted.items():
            measured = sample.measured.get(kind, 0.0)
            if predicted > 0 and measured > 0 and max(predicted, measured) >= least:
                found.setdefault(kind, []).append(measured / predicted)
    return {kind: tuple(sorted(ratios)) for kind, ratios in sorted(found.items())}


def factors_of(samples: Sequence[RunSample]) -> dict[str, float]:
    """The factor of each kind that enough runs have: the median ratio, within bounds.

    >>> runs = [RunSample(name=str(n), seconds=1.0, measured={"forward matmul": r}, predicted={"forward matmul": 1.0})
    ...         for n, r in enumerate((1.1, 1.2, 90.0))]
    >>> factors_of(runs)
    {'forward matmul': 1.2}
    """
    return {
        kind: min(MOST_FACTOR, max(LEAST_FACTOR, median(ratios)))
        for kind, ratios in ratios_of(samples).items()
        if len(ratios) >= ENOUGH_RATIOS
    }


def refit(samples: Sequence[RunSample], *, title: str, date: str, passed_over: Sequence[tuple[str, str]] = ()) -> Refit:
    """The fit to all samples, and the step time of each by the fit to the others."""
    rows = []
    for at, sample in enumerate(samples):
        others = factors_of([*samples[:at], *samples[at + 1 :]])
        rows.append(
            RefitRow(
                name=sample.name,
                measured=sample.seconds,
                before=sample.predicted_with({}),
                after=sample.predicted_with(others),
            )
        )
    fit = Fit(
        date=date,
        runs=tuple(sample.name for sample in samples),
        error_before=median(abs(row.before / row.measured - 1) for row in rows),
        error_after=median(abs(row.after / row.measured - 1) for row in rows),
        factors=factors_of(samples),
    )
    return Refit(title=title, fit=fit, ratios=ratios_of(samples), rows=tuple(rows), passed_over=tuple(passed_over))
