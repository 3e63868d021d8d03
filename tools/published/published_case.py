"""A published run: its source with what is assumed of it, the run itself, and what its framework holds besides.

A row of ``runs.csv`` says sizes, parallelism and a figure, never everything that memory depends on. What is assumed is
said once for a source, in its `Source`; what a framework holds beside the tensors of the ledger is said as `Extra`
lines of their own, each with the code that makes it.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from trainledger.ledger.ranks import RankAccount
from trainledger.spec.cluster import Device
from trainledger.spec.run import Run

Row = dict[str, str]


def read_rows() -> list[Row]:
    with open(Path(__file__).parent / "runs.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def ran_out(row: Row) -> bool:
    """Whether a row says that the run itself did not fit (others mention a larger one in their notes)."""
    return not row["measured_peak_mem_gib"] and "OOM" in row["notes"] and "= OOM" not in row["notes"]


@dataclass(frozen=True)
class Extra:
    """Bytes that a framework holds beside what the ledger accounts for, and the code that says so."""

    name: str
    nbytes: int
    why: str


@dataclass(frozen=True)
class Source:
    """Where rows come from, what they measured, and everything that is assumed of them.

    ``figure``: driver = all that the driver counts for the process, reserved = what PyTorch's allocator has taken from
    the driver, allocated = what it has given out at most. ``unit`` is what one of the printed units is in bytes.
    ``stages`` are those whose figure was read: all, ends = the larger of the first and the last, first. ``context`` is
    the CUDA context where the source measured it. ``reason`` says why the median error is above 20 %, where it is.
    """

    name: str
    title: str
    group: str
    figure: str
    unit: int
    unit_why: str
    assumed: tuple[str, ...]
    stages: str = "all"
    reason: str = ""
    context: int | None = None


@dataclass(frozen=True)
class Case:
    """A row as a run, its device, and what the framework holds besides on a rank."""

    row: Row
    source: Source
    run: Run
    device: Device
    extras: Callable[[RankAccount, int], tuple[Extra, ...]] = lambda rank, peak_nbytes: ()
    title: str = ""

    @property
    def name(self) -> str:
        return self.title or self.row["id"]

    @property
    def measured(self) -> int | None:
        """Bytes of the printed figure; None for a run that is known not to fit, or to fit in an amount not told."""
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
