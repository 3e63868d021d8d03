"""The errors of all published rows, each predicted without what its source has taught: what intervals rest on.

``python tools/published/error_rows.py`` (two minutes) predicts the memory of every row by the rules of the program
alone and writes ``memory_predicted.csv``; of steps it reads what `fit_devices.py` and `left_out.py` have stored.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from functools import cache
from math import log
from pathlib import Path

from left_out import read_left_out
from published_memory import predictions
from throughput_case import TimeCase
from throughput_predictions import predicted_cases
from unseen_runs import unseen

from trainledger.forecast.predict.interval import kinds_of

MEMORY = Path(__file__).parent / "memory_predicted.csv"


@dataclass(frozen=True, kw_only=True)
class ErrorRow:
    """A row: ``error`` is the logarithm of measured over predicted; ``of_runs_csv`` whether it is of that table.

    ``device`` is the catalog's, ``recipe`` whether it is modelled as eager and how much of its row is blank.
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
    eager: bool = False
    blanks: int = 0

    @property
    def of_runs_csv(self) -> bool:
        return self.name.startswith("R")


@cache
def step_rows(basis: str = "own") -> tuple[ErrorRow, ...]:
    """The rows whose step is published, predicted by what ``basis`` says is known (`spec.device.StepErrors`)."""
    stored = read_left_out()
    found = []
    for each in predicted_cases()[0]:
        other = stored.get(each.case.name)
        if basis == "own":
            seconds = each.stored.left_out
        else:
            seconds = None if other is None else other.other if basis == "other" else other.bound
        if seconds is not None:
            found.append(_step_row(each.case, each.measured, seconds))
    if basis == "own":
        found += [_step_row(each.case, each.measured, stored[each.case.name].left_out) for each in unseen()]
    return tuple(found)


_STATED = ("seq_len", "micro_batch_per_device", "global_batch_seqs", "precision", "activation_ckpt", "vocab",
           "sharding", "d_ff", "n_heads")  # fmt: skip


def _step_row(case: TimeCase, measured: float, seconds: float | None) -> ErrorRow:
    assert seconds is not None, case.name
    run = case.run
    return ErrorRow(
        name=case.name, source=case.source.title, device=run.cluster.device, calibration=case.calibration,
        devices=run.layout.devices, seq_len=run.recipe.seq_len, seconds=seconds, kinds=kinds_of(run),
        error=log(measured / seconds), eager=not run.recipe.compile,
        blanks=sum(not case.row[name] for name in _STATED if name in case.row),
    )  # fmt: skip


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
        )
        for each in predictions()[0]
    ]  # fmt: skip


_COLUMNS = ("id", "source", "group", "kinds", "devices", "seq_len", "measured", "predicted", "device", "usable",
            "ran_out")  # fmt: skip


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
        )  # fmt: skip
        table.writerow(values)
    return file.getvalue()


@cache
def memory_rows() -> tuple[MemoryRow, ...]:
    """Every row as it is stored."""
    with open(MEMORY, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return tuple(
        MemoryRow(
            name=row["id"], source=row["source"], group=row["group"],
            kinds=tuple(filter(None, row["kinds"].split("; "))), devices=int(row["devices"]),
            seq_len=int(row["seq_len"]), measured=int(row["measured"]) if row["measured"] else None,
            predicted=int(row["predicted"]), device_nbytes=int(row["device"]), usable_nbytes=int(row["usable"]),
            ran_out=row["ran_out"] == "yes",
        )
        for row in rows
    )  # fmt: skip


if __name__ == "__main__":
    MEMORY.write_text(memory_text(predicted_memory()), encoding="utf-8")
