"""The reconciliation in words and figures: for a terminal of 80 columns, and as the same cells for HTML."""

from __future__ import annotations

from fractions import Fraction
from textwrap import fill

from trainledger.ledger.measured import Spread
from trainledger.reconcile import Number, Part, Reconciliation, Row
from trainledger.report.table import WIDTH, sentence, table
from trainledger.units import format_count, format_flops, format_nbytes, format_percent, format_seconds

COLUMNS = ("", "predicted", "measured", "ratio", "basis", "difference sits in")
# These are always split; the others only where there is a difference to place.
_ALWAYS_SPLIT = ("peak_nbytes", "step_seconds", "total_seconds")
_UNKNOWN = "unknown"


def text(reconciliation: Reconciliation) -> str:
    """The table with its notes; ratio is measured / predicted."""
    rows = [["- " + name if is_part else name, *cells] for is_part, (name, *cells) in cells_of(reconciliation)]
    lines = [table(COLUMNS, rows, align="lrrrll")]
    spread = reconciliation["step_seconds"].spread
    if spread is not None:
        lines.append(spread_sentence(spread))
    lines += [sentence(each) for each in reconciliation.notes]
    return "\n".join([lines[0], "", *(fill(each, WIDTH) for each in lines[1:])])


def cells_of(reconciliation: Reconciliation) -> list[tuple[bool, list[str]]]:
    """The rows as cells under `COLUMNS`, each with whether it is a part of the row before."""
    cells: list[tuple[bool, list[str]]] = []
    for row in reconciliation.rows:
        cells.append((False, _row_cells(row)))
        if row.unexplained or (row.parts and (row.quantity in _ALWAYS_SPLIT or row.difference)):
            cells.extend((True, _part_cells(each, row.unit)) for each in row.parts if each.predicted or each.measured)
            if row.unexplained is not None:
                cells.append((True, ["unexplained", "", "", "", "", signed(row.unexplained, row.unit)]))
    return cells


def _row_cells(row: Row) -> list[str]:
    where = ""
    if row.where is not None:
        where = f"{row.where[0]} {signed(row.where[1], row.unit)}"
    return [row.title, shown(row.predicted, row.unit), shown(row.measured, row.unit), ratio(row), row.basis, where]


def _part_cells(part: Part, unit: str) -> list[str]:
    share = f"{float(Fraction(part.measured) / Fraction(part.predicted)):.3f}" if part.predicted else ""
    if part.predicted == part.measured:
        share = "equal"
    difference = signed(part.difference, unit) if part.difference else ""
    return [part.name, shown(part.predicted, unit), shown(part.measured, unit), share, "", difference]


def ratio(row: Row) -> str:
    """Measured over predicted; ``equal`` where they are the same number, not merely close."""
    if row.difference == 0:
        return "equal"
    return "" if row.ratio is None else f"{row.ratio:.3f}"


def shown(value: Number | None, unit: str) -> str:
    """An amount in its unit."""
    if value is None:
        return _UNKNOWN
    if not value:
        return "0"
    if unit == "nbytes":
        return format_nbytes(value)
    if unit == "flops":
        return format_flops(value)
    if unit == "seconds":
        return format_seconds(value)
    if unit == "share":
        return format_percent(value)
    return format_count(value)


def signed(value: Fraction, unit: str) -> str:
    """A difference with its sign."""
    if not value:
        return "0"
    number = int(value) if value.denominator == 1 else float(value)
    return ("+" if value > 0 else "-") + shown(abs(number), unit)


def spread_sentence(spread: Spread) -> str:
    """How the steps were spread."""
    discarded = f"; {spread.discarded} disturbed ones left out" if spread.discarded else ""
    low, high = format_seconds(spread.low), format_seconds(spread.high)
    return f"Step time is the median of {spread.count} steps, the middle half from {low} to {high}{discarded}."
