"""Two ledgers of one step side by side: the closed form and the trace, which must tell the same."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from trainledger.document import shown, signed
from trainledger.ledger.entry import CATEGORIES
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.memory.timeline import highest_by_category
from trainledger.report.table import table

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
        Row(each or _NO_MODULE, "flops", mine.get(each, 0), theirs.get(each, 0))
        for each in dict.fromkeys([*mine, *theirs])
    ]
    return [each for each in rows if each.predicted or each.traced]


def _by_category(mine: dict[str, int], theirs: dict[str, int], whole: str = "") -> list[Row]:
    names = [each for each in CATEGORIES if mine.get(each) or theirs.get(each)]
    return [Row(each, "nbytes", mine.get(each, 0), theirs.get(each, 0), part_of=whole) for each in names]


def agree(rows: list[Row]) -> bool:
    """Whether all is equal that must be."""
    return not any(each.exact and each.difference for each in rows)


def text(rows: list[Row], heading: str = "") -> str:
    """The rows as a table of at most 80 columns."""
    cells = []
    for each in rows:
        name = f"- {each.name}" if each.part_of else each.name
        cells.append([name, shown(each.predicted, each.unit), shown(each.traced, each.unit), difference(each)])
    if heading == "category":
        heading = "category at its most"
    return table([heading, "closed form", "trace", "difference"], cells, align="lrrr")


def difference(row: Row) -> str:
    """``equal`` where both are the same integer, else what the trace has more, and its share."""
    if not row.difference:
        return "equal"
    share = f" ({100 * row.difference / row.predicted:+.2g} %)" if row.predicted else ""
    return signed(Fraction(row.difference), row.unit) + share


def to_json(rows: list[Row]) -> list[dict[str, Any]]:
    """The rows for programs."""
    return [{**vars(each), "difference": each.difference} for each in rows]
