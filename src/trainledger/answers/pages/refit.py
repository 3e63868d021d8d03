"""The document of a calibration fitted to past runs: errors on runs that were not fitted to, and the factors."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.answers.pages.plain_data import plain
from trainledger.forecast.predict.refit import Refit
from trainledger.report.document import Cell, Document, Table, section, sections
from trainledger.spec.units import counted, format_percent


def page(refit: Refit) -> Document:
    """Step times of each run, predicted without a fit and by the fit to the others; the factor of each kind."""
    return Document(
        title=f"The calibration of {refit.title}, fitted to past runs",
        sections=sections(
            _headline(refit),
            section("Step time, predicted by the fit to the other runs", _runs(refit)),
            section("Factors on predicted times", _factors(refit)),
            section("Passed over", _passed_over(refit)) if refit.passed_over else None,
            _kept(refit),
        ),
        data=lambda: plain(refit),
    )


def _headline(refit: Refit) -> str:
    fit = refit.fit
    before, after = format_percent(fit.error_before), format_percent(fit.error_after)
    runs = counted(len(refit.rows), "run")
    return f"Median error of the step time over {runs}, each left out of its fit: {before} before, {after} after."


def _runs(refit: Refit) -> Table:
    rows = tuple(
        (row.name, row.measured, row.before, row.before / row.measured - 1, row.after, row.after / row.measured - 1)
        for row in refit.rows
    )
    columns = ("run", "measured", "before", "error", "after", "error")
    return Table("runs", columns, rows, ("", "seconds", "seconds", "change", "seconds", "change"), align="lrrrrr")


def _factors(refit: Refit) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            kind,
            f"{factor:.3f}",
            len(refit.ratios[kind]),
            f"{refit.ratios[kind][0]:.3f}",
            f"{refit.ratios[kind][-1]:.3f}",
        )
        for kind, factor in refit.fit.factors.items()
    ]
    return Table("factors", ("operations", "factor", "runs", "least", "most"), tuple(rows), align="lrrrr")


def _passed_over(refit: Refit) -> Table:
    return Table("passed over", ("run", ""), refit.passed_over, align="ll")


def _kept(refit: Refit) -> Iterator[str]:
    if refit.written:
        yield f"Kept in {refit.written}; trainledger reconcile --undo removes it."
    else:
        yield "Not kept: runs that it was not fitted to would be predicted no better."
