"""A published run: its source with what is assumed of it, and the run itself.

A row of ``runs.csv`` says sizes, parallelism and a figure, never everything that memory depends on. What is assumed is
said once for a source, in its `Source`; what its framework holds is the product's to know (``recipe.framework``).
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from published_sources import Source

from trainledger.spec.device import Device
from trainledger.spec.run import Run

Row = dict[str, str]


def read_rows() -> list[Row]:
    with open(Path(__file__).parent / "runs.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def ran_out(row: Row) -> bool:
    """Whether a row says that the run itself did not fit (others mention a larger one in their notes)."""
    return not row["measured_peak_mem_gib"] and "OOM" in row["notes"] and "= OOM" not in row["notes"]


@dataclass(frozen=True)
class Case:
    """A row as a run, and its device."""

    row: Row
    source: Source
    run: Run
    device: Device
    title: str = ""

    @property
    def name(self) -> str:
        return self.title or self.row["id"]

    @property
    def measured(self) -> int | None:
        """Bytes of the printed figure; None for a run that is known not to fit, or to fit in an unknown amount."""
        printed = self.row["measured_peak_mem_gib"]
        return round(float(printed) * self.source.unit) if printed else None

    @property
    def too_large(self) -> bool:
        """Whether the source says that it ran out of memory."""
        return ran_out(self.row)


@dataclass(frozen=True)
class Errors:
    """Errors of some rows: predicted over measured, less one."""

    errors: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(abs(each) for each in self.errors)

    @property
    def bias(self) -> float:
        return median(self.errors)

    @property
    def worst(self) -> float:
        return max(self.errors, key=abs)

    def within(self, share: float) -> float:
        """The share of rows whose absolute error is at most ``share``."""
        return sum(abs(each) <= share for each in self.errors) / len(self.errors)
