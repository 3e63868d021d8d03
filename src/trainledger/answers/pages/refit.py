"""The document of a calibration fitted to past runs: errors on runs that were not fitted to, and the factors."""

from __future__ import annotations

from collections.abc import Iterator

from trainledger.answers.pages.plain_data import plain
from trainledger.forecast.predict.refit import Refit
from trainledger.report.document import Cell, Document, Table, section, sections
from trainledger.spec.units import counted, format_percent


def page(found: Refit) -> Document:
    """Step times of each run, predicted without a fit and by the fit to the others; the factor of each kind."""
    return Document(
        title=f"The calibration of {found.title}, fitted to past runs",
        sections=sections(
            _headline(found),
            section("Step time, predicted by the fit to the other runs", _runs(found)),
            section("Factors on predicted times", _factors(found)),
            section("Passed over", _passed_over(found)) if found.passed_over else None,
            _kept(found),
        ),
        data=lambda: plain(found),
    )


def _headline(found: Refit) -> str:
    fit = found.fit
    before, after = format_percent(fit.error_before), format_percent(fit.error_after)
    runs = counted(len(found.rows), "run")
    return f"Median error of the step time over {runs}, each left out of its fit: {before} before, {after} after."


def _runs(found: Refit) -> Table:
    rows = tuple(
        (each.name, each.measured, each.before, each.before / each.measured - 1, each.after,
         each.after / each.measured - 1)
        for each in found.rows
    )  # fmt: skip
    columns = ("run", "measured", "before", "error", "after", "error")
    return Table("runs", columns, rows, ("", "seconds", "seconds", "change", "seconds", "change"), align="lrrrrr")


def _factors(found: Refit) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            kind,
            f"{factor:.3f}",
            len(found.ratios[kind]),
            f"{found.ratios[kind][0]:.3f}",
            f"{found.ratios[kind][-1]:.3f}",
        )
        for kind, factor in found.fit.factors.items()
    ]
    return Table("factors", ("operations", "factor", "runs", "least", "most"), tuple(rows), align="lrrrr")


def _passed_over(found: Refit) -> Table:
    return Table("passed over", ("run", ""), found.passed_over, align="ll")


def _kept(found: Refit) -> Iterator[str]:
    if found.written:
        yield f"Kept in {found.written}; trainledger reconcile --undo removes it."
    else:
        yield "Not kept: runs that it was not fitted to would be predicted no better."
