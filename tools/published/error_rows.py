"""The errors of all published rows, each predicted without what its source has taught: what intervals rest on.

``python tools/published/error_rows.py`` (two minutes) predicts the memory of every row by the rules of the program
alone and writes ``memory_predicted.csv``; of steps it reads what `fit_devices.py` and `left_out.py` have stored.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import log
from pathlib import Path

from later_predictions import stored
from later_runs import STEP
from left_out import read_left_out
from megatron_cases import LARGE, OF_EXPERTS, device_of
from published_memory import predictions
from tables import DOCS
from throughput_case import TimeCase
from throughput_predictions import predicted_cases
from unseen_runs import unseen

from trainledger.forecast.predict.interval import kinds_of
from trainledger.spec.run import Run

MEMORY = Path(__file__).parent / "memory_predicted.csv"


@dataclass(frozen=True, kw_only=True)
class ErrorRow:
    """A row: ``error`` is the logarithm of measured over predicted; ``of_runs_csv`` whether it is of that table.

    ``device`` is the catalog's.
    """

    name: str
    source: str
    device: str
    calibration: str
    devices: int
    seq_len: int
    seconds: float
    kinds: tuple[str, ...]
    error: float

    @property
    def of_runs_csv(self) -> bool:
        return self.name.startswith("R")


@cache
def step_rows(basis: str = "own") -> tuple[ErrorRow, ...]:
    """The rows whose step is published, predicted by what ``basis`` says is known (`spec.device.StepErrors`)."""
    known = read_left_out()
    found = []
    for each in predicted_cases()[0]:
        other = known.get(each.case.name)
        if basis == "own":
            seconds = each.stored.left_out
        else:
            seconds = None if other is None else other.other if basis == "other" else other.bound
        if seconds is not None:
            found.append(_step_row(each.case, each.measured, seconds))
    if basis == "own":
        found += [_step_row(each.case, each.measured, known[each.case.name].left_out) for each in unseen()]
    return (*found, *later_steps(basis))


def _step_row(case: TimeCase, measured: float, seconds: float | None) -> ErrorRow:
    assert seconds is not None, case.name
    return _error_row(case.name, case.source.title, case.run, case.calibration, measured, seconds)


def _error_row(name: str, source: str, run: Run, calibration: str, measured: float, seconds: float) -> ErrorRow:
    return ErrorRow(
        name=name, source=source, device=run.cluster.device, calibration=calibration, devices=run.layout.devices,
        seq_len=run.recipe.seq_len, seconds=seconds, kinds=kinds_of(run), error=log(measured / seconds),
    )  # fmt: skip


def later_steps(basis: str) -> Iterator[ErrorRow]:
    """The steps among the facts of November 2026, on devices of which so much is known."""
    for row in stored():
        case = row.case
        if case.figure == STEP and row.basis == basis:
            of = row.calibration
            yield _error_row(case.name, case.source.title, case.run, of, case.measured, row.predicted)


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """A row of published memory: bytes of its figure, measured and predicted, and all that the heaviest rank holds.

    ``measured`` is None of a run that is known only to fit or, where it ``ran_out``, not to.
    """

    name: str
    source: str
    group: str
    kinds: tuple[str, ...]
    devices: int
    seq_len: int
    measured: int | None
    predicted: int
    device_nbytes: int
    usable_nbytes: int
    ran_out: bool
    figure: str

    @property
    def error(self) -> float:
        """The logarithm of measured over predicted."""
        assert self.measured is not None
        return log(self.measured / self.predicted)


def predicted_memory() -> list[MemoryRow]:
    """Every predicted row, predicted today."""
    return [
        MemoryRow(
            name=each.case.name, source=each.case.source.title, group=each.case.source.group,
            kinds=kinds_of(each.case.run), devices=each.case.run.layout.devices,
            seq_len=each.case.run.recipe.seq_len, measured=each.case.measured, predicted=each.nbytes,
            device_nbytes=each.device_nbytes, usable_nbytes=each.usable_nbytes, ran_out=each.case.too_large,
            figure=each.case.source.figure,
        )
        for each in predictions()[0]
    ]  # fmt: skip


_COLUMNS = ("id", "source", "group", "kinds", "devices", "seq_len", "measured", "predicted", "device", "usable",
            "ran_out", "figure")  # fmt: skip


def memory_text(rows: list[MemoryRow]) -> str:
    """The rows as the file has them."""
    file = io.StringIO()
    table = csv.writer(file, lineterminator="\n")
    table.writerow(_COLUMNS)
    for each in rows:
        measured = "" if each.measured is None else each.measured
        values = (
            each.name, each.source, each.group, "; ".join(each.kinds), each.devices, each.seq_len, measured,
            each.predicted, each.device_nbytes, each.usable_nbytes, "yes" if each.ran_out else "no",
            each.figure,
        )  # fmt: skip
        table.writerow(values)
    return file.getvalue()


@cache
def memory_rows() -> tuple[MemoryRow, ...]:
    """Every row as it is stored, the peaks among the facts of November 2026, and those of Megatron-LM's tests."""
    with open(MEMORY, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    stored_rows = (
        MemoryRow(
            name=row["id"], source=row["source"], group=row["group"],
            kinds=tuple(filter(None, row["kinds"].split("; "))), devices=int(row["devices"]),
            seq_len=int(row["seq_len"]), measured=int(row["measured"]) if row["measured"] else None,
            predicted=int(row["predicted"]), device_nbytes=int(row["device"]), usable_nbytes=int(row["usable"]),
            ran_out=row["ran_out"] == "yes", figure=row["figure"],
        )
        for row in rows
    )  # fmt: skip
    return (*stored_rows, *later_peaks(), *peaks_of_tests())


def later_peaks() -> Iterator[MemoryRow]:
    """The peaks among the facts of November 2026, and the runs that are known to fit: those with a step.

    A step says that its run fits only where its source says what is recomputed, and nothing of it waits on the host,
    which is modelled of JAX alone.
    """
    for row in stored():
        case, run = row.case, row.case.run
        step = case.figure == STEP
        again = case.row["recompute"]
        on_host = "offload" in again and not run.recipe.of_xla
        if step and (again in ("", "not stated", "none stated", "none") or on_host):
            continue
        yield MemoryRow(
            name=case.name, source=case.source.title, group="later", kinds=kinds_of(run), devices=run.layout.devices,
            seq_len=run.recipe.seq_len, measured=None if step else round(case.measured), predicted=round(row.predicted),
            device_nbytes=row.device_nbytes, usable_nbytes=row.usable_nbytes, ran_out=False, figure=case.figure,
        )  # fmt: skip


def peaks_of_tests() -> Iterator[MemoryRow]:
    """Megatron-LM's own tests whose peak is large enough that fixed buffers weigh little (`megatron_page`)."""
    with open(DOCS / "tables" / "megatron_cases.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            measured, predicted = (round(1e6 * float(row[name])) for name in ("measured MB", "predicted MB"))
            device = device_of(row)
            assert device.capacity_nbytes is not None
            if measured >= LARGE:
                kinds = ("experts",) if row["case"].startswith(OF_EXPERTS) else ()
                yield MemoryRow(
                    name=f"{row['case']}, {row['device']}, {row['container']}", source="Megatron-LM's tests",
                    group="later", kinds=kinds, devices=int(row["devices"].strip("()")), seq_len=0, measured=measured,
                    predicted=predicted, device_nbytes=predicted, usable_nbytes=device.capacity_nbytes, ran_out=False,
                    figure="allocated",
                )  # fmt: skip


if __name__ == "__main__":
    MEMORY.write_text(memory_text(predicted_memory()), encoding="utf-8")
