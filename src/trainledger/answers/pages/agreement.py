"""The document of a closed form and a trace of the same step, which must agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from trainledger.answers.pages.peak import peak_data, peak_sections
from trainledger.answers.pages.plain_data import plain, run_data
from trainledger.answers.pages.traced import figures, uncounted
from trainledger.ledger.entry import CATEGORIES
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import highest_by_category
from trainledger.report.document import Amount, Document, Table, sections, signed
from trainledger.spec.run import Run

_WRONG = "The two differ where they must not: one of them is wrong about this model."
_NO_MODULE = "outside the model"  # clipping and the optimizer
SPLITS = ("phase", "kind", "path", "category")


@dataclass(frozen=True)
class Row:
    """One quantity as both ledgers have it. Where ``exact``, a difference means that one of them is wrong."""

    name: str
    unit: str
    predicted: int
    traced: int
    exact: bool = False
    part_of: str = ""

    @property
    def difference(self) -> int:
        return self.traced - self.predicted


def compare(predicted: Ledger, traced: Ledger) -> list[Row]:
    """The totals of a step: parameters, FLOPs by kind, kept bytes, and peak bytes with its parts."""
    flops, traced_flops = predicted.by("kind"), traced.by("kind")
    mine, theirs = predicted.peak(), traced.peak()
    rows = [Row("parameters", "count", predicted.parameters, traced.parameters, exact=True)]
    for kind in dict.fromkeys([*flops, *traced_flops]):
        if flops.get(kind) or traced_flops.get(kind):
            exact = kind in ("matmul", "attention")
            rows.append(Row(f"FLOPs, {kind}", "flops", flops.get(kind, 0), traced_flops.get(kind, 0), exact))
    return [
        *rows,
        Row("model FLOPs", "flops", predicted.model_flops, traced.model_flops, exact=True),
        Row("kept for backward", "nbytes", predicted.kept_nbytes, traced.kept_nbytes, exact=True),
        Row("peak memory", "nbytes", mine.nbytes, theirs.nbytes),
        *_by_category(mine.by_category, theirs.by_category, "peak memory"),
    ]


def split(predicted: Ledger, traced: Ledger, key: str) -> list[Row]:
    """FLOPs by ``phase``, ``kind`` or ``path``, or the most bytes that each ``category`` has at any time."""
    if key == "category":
        return _by_category(highest_by_category(predicted), highest_by_category(traced))
    mine, theirs = predicted.by(key), traced.by(key)
    rows = [
        Row(fromkey or _NO_MODULE, "flops", mine.get(fromkey, 0), theirs.get(fromkey, 0))
        for fromkey in dict.fromkeys([*mine, *theirs])
    ]
    return [row for row in rows if row.predicted or row.traced]


def _by_category(mine: dict[str, int], theirs: dict[str, int], whole: str = "") -> list[Row]:
    names = [category for category in CATEGORIES if mine.get(category) or theirs.get(category)]
    return [Row(name, "nbytes", mine.get(name, 0), theirs.get(name, 0), part_of=whole) for name in names]


def agree(rows: list[Row]) -> bool:
    """Whether all is equal that must be."""
    return not any(row.exact and row.difference for row in rows)


def page(
    run: Run, predicted: Ledger, traced: Ledger, *, by: str = "", top: int = 15, tensors: bool = False
) -> Document:
    """The totals of both side by side, one split, and with ``tensors`` what is live at the trace's peak."""
    rows = compare(predicted, traced)
    parts = split(predicted, traced, by) if by else []
    operations = sum(entry.times for entry in traced)
    return Document(
        title=run.model.name,
        sections=sections(
            f"One optimizer step of {run.model.name}: {operations:,} operations traced",
            table_of(rows),
            table_of(parts, by) if parts else None,
            *traced.notes,
            *uncounted(traced),
            *(peak_sections(traced, top) if tensors else ()),
            "" if agree(rows) else _WRONG,
        ),
        data=lambda: {
            "run": run_data(run),
            "equal": agree(rows),
            "rows": _data(rows),
            "operations": operations,
            "uncounted": dict(traced.uncounted),
            "by": _data(parts),
            **({"tensors": peak_data(traced)} if tensors else {}),
        },
        figures=lambda: figures(traced),
    )


def table_of(rows: Sequence[Row], heading: str = "") -> Table:
    """The rows as a table."""
    cells = tuple(
        (
            f"- {row.name}" if row.part_of else row.name,
            Amount(row.predicted, row.unit),
            Amount(row.traced, row.unit),
            difference(row),
        )
        for row in rows
    )
    first = "category at its most" if heading == "category" else heading
    return Table(heading or "totals", (first, "closed form", "trace", "difference"), cells, align="lrrr")


def difference(row: Row) -> str:
    """``equal`` where both are the same integer, else what the trace has more, and its share."""
    if not row.difference:
        return "equal"
    share = f" ({100 * row.difference / row.predicted:+.2g} %)" if row.predicted else ""
    return signed(Fraction(row.difference), row.unit) + share


def _data(rows: Sequence[Row]) -> Any:
    return plain(rows, more={Row: ("difference",)})
