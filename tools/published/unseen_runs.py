"""Published steps that nothing was fitted on, and never shall be: what a prediction is worth on the next run.

``unseen_bigscience.csv`` has the steps that the page of BigScience's trials prints and ``runs.csv`` has not, all of
them that have a layout and a time; ``unseen_vtrain.csv`` the rest of vTrain's table of many nodes and the first 120
lines of its table of single nodes, less what ``runs.csv`` has. They are modelled like the rows of their sources. Of
NVIDIA's figures (`throughput_nemo`) they are the containers of 2025 and later, and layouts on more devices.
``python tools/published/unseen_runs.py`` predicts them and writes ``unseen_predicted.csv``.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from published_case import Row, read_rows
from throughput_case import TimeCase
from throughput_megatron import megatron_time_case
from throughput_nemo import unseen_nemo
from throughput_times import predicted

HERE = Path(__file__).parent
PREDICTED = HERE / "unseen_predicted.csv"
BIGSCIENCE = "bigscience-workshop/bigscience:train/tr11-176B-ml/chronicles-prequel.md"
VTRAIN = "VIA-Research/vTrain:data (arXiv 2312.12391) gt_{}.csv"


@dataclass(frozen=True)
class Unseen:
    """A step that nothing was fitted on, with its stored prediction in seconds."""

    case: TimeCase
    seconds: float

    @property
    def measured(self) -> float:
        return self.case.seconds

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.seconds / self.measured - 1


def _read(name: str) -> list[Row]:
    with open(HERE / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def unseen_rows() -> Iterator[Row]:
    """The rows with the columns of ``runs.csv``."""
    blank = dict.fromkeys(read_rows()[0], "")
    for place, row in enumerate(_read("unseen_bigscience.csv"), 1):
        found = _megatron(row) | {"seq_len": "2048", "vocab": "250880", "notes": f"date {row['date']}"}
        label = f"{row['n_layers']} layers of {row['d_model']}, {row['n_heads']} heads, {row['date']}"
        yield blank | found | {"id": f"B{place:03}", "source": BIGSCIENCE, "model_family": label}
    for place, row in enumerate(_read("unseen_vtrain.csv"), 1):
        found = _megatron(row) | {"seq_len": row["seq_len"], "vocab": "51200"}
        label = f"{row['n_layers']} layers of {row['d_model']}"
        yield blank | found | {"id": f"V{place:03}", "source": VTRAIN.format(row["table"]), "model_family": label}


def _megatron(row: Row) -> Row:
    devices = int(row["data"]) * int(row["tensor"]) * int(row["stages"])
    return {
        "n_layers": row["n_layers"],
        "d_model": row["d_model"],
        "d_ff": str(4 * int(row["d_model"])),
        "n_heads": row["n_heads"],
        "hardware": "A100 SXM 80GB",
        "n_devices": str(devices),
        "tp": row["tensor"],
        "pp": row["stages"],
        "cp": "1",
        "micro_batch_per_device": row["micro_batch"],
        "global_batch_seqs": row["global_batch"],
        "precision": "fp16",
        "activation_ckpt": "full",
        "measured_step_time_s": row["seconds"],
    }


@cache
def unseen_cases() -> tuple[TimeCase, ...]:
    """Every one of them as a run."""
    found = tuple(megatron_time_case(row) for row in unseen_rows())
    return (*unseen_nemo(), *(each for each in found if isinstance(each, TimeCase)))


@cache
def unseen() -> tuple[Unseen, ...]:
    """Every one of them with its stored prediction."""
    with open(PREDICTED, newline="", encoding="utf-8") as file:
        stored = {row["id"]: float(row["predicted"]) for row in csv.DictReader(file)}
    return tuple(Unseen(each, stored[each.name]) for each in unseen_cases())


def write_predicted() -> None:
    with open(PREDICTED, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("id", "predicted"))
        table.writerows((each.name, f"{predicted(each).seconds:.6g}") for each in unseen_cases())


if __name__ == "__main__":
    write_predicted()
