"""Megatron-LM's functional tests: the peaks of memory and step times that they publish, beside what is predicted.

`megatron_cases.csv` has the arguments of each test and the figures of its golden-value files (README). The rank that
writes them is the last one. Nothing is fitted on them.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trainledger import catalog
from trainledger.answers.load import load
from trainledger.forecast.predict.device_memory import device_memory
from trainledger.ledger.memory.timeline import peak_nbytes
from trainledger.ledger.ranks import RankAccount, accounts
from trainledger.spec.convert.megatron import Arguments, from_arguments, from_values
from trainledger.spec.device import Device, kernels_of_capability
from trainledger.spec.problem import InvalidInput
from trainledger.spec.run import Run

Row = dict[str, str]
OVERHEADS = catalog.overheads()
DEVICES = {"a100": "a100-sxm-80gb", "h100": "h100-sxm", "gb200": "gb200"}
PROGRAMS = {"bert": "pretrain_bert.py", "t5": "pretrain_t5.py", "hybrid": "pretrain_hybrid.py", "mimo": "mimo/train.py"}
OF_EXPERTS = ("moe", "mixtral")
# Rows of a case on one type of device differ by less where the same program ran: golden files that were not written
# anew stay with the numbers of an earlier one.
APART = 0.05
MOST_DEVICES = 1024
MORE = 1.15  # times what a step leaves behind: what is not counted of it is less
LARGE = 8 * 10**9  # bytes from which on fixed buffers weigh little


@dataclass(frozen=True)
class Golden:
    """A measured peak, and the run that the arguments beside it describe."""

    row: Row
    run: Run
    account: RankAccount
    predicted: int

    @property
    def measured(self) -> int:
        return int(self.row["peak_allocated_bytes"])

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1

    @property
    def of_experts(self) -> bool:
        return self.row["case"].startswith(OF_EXPERTS)


def read_cases() -> list[Row]:
    with open(Path(__file__).parent / "megatron_cases.csv", newline="", encoding="utf-8") as file:
        return [each for each in csv.DictReader(file) if each["peak_allocated_bytes"]]


def arguments_of(row: Row) -> Arguments:
    """The arguments of a case, as its map of arguments has them."""
    program = PROGRAMS.get(row["case"].partition("/")[0], "pretrain_gpt.py")
    return from_values(json.loads(row["args"]), json.loads(row["env"] or "{}"), program=program)


def device_of(row: Row) -> Device:
    return catalog.device(DEVICES[row["device"].partition("_")[0]])


@cache
def _account_of(case: str, args: str, env: str, kernels: str, devices: int) -> tuple[Run, RankAccount, int]:
    run = load(from_arguments(arguments_of({"case": case, "args": args, "env": env}), devices=devices).table)
    last = [each for each in accounts(run, backend=kernels) if each.plan.last][-1]
    return run, last, int(peak_nbytes(last.ledger))


def golden_of(row: Row, devices: int) -> Golden:
    """A row on so many devices; raises `InvalidInput` where its arguments are not accounted for."""
    device = device_of(row)
    kernels = kernels_of_capability(device.compute_capability)
    run, last, peak = _account_of(row["case"], row["args"], row["env"], kernels, devices)
    return Golden(row, run, last, int(device_memory(peak, device, OVERHEADS, recipe=run.recipe).allocated_nbytes))


def with_devices(row: Row) -> Golden:
    """A row on as many devices as its recipe lists, or else one node of 8.

    Where a replica is larger than a node, or would hold more between steps (parameters, gradients, optimizer state)
    than the row says, `allocated_bytes`, there were more: as many as come nearest to that. The peak is no part of it.
    """
    if row["nodes"]:
        return golden_of(row, int(row["nodes"]) * int(row["gpus_per_node"]))
    found: list[Golden] = []
    problem: InvalidInput | None = None
    devices = 8
    while devices <= MOST_DEVICES:
        try:
            found.append(golden_of(row, devices))
        except InvalidInput as error:
            problem = problem or error
        if devices == 8 and found and _between_steps(found[0]) < MORE * int(row["allocated_bytes"]):
            return found[0]
        devices *= 2
    if not found:
        assert problem is not None
        raise problem
    between = int(row["allocated_bytes"])
    return min(found, key=lambda each: abs(_between_steps(each) - between))


def _between_steps(golden: Golden) -> int:
    memory = device_memory(0, device_of(golden.row), OVERHEADS, recipe=golden.run.recipe)
    return sum(int(nbytes) for _, nbytes in golden.account.ledger.resident) + int(memory.allocated_nbytes)


@cache
def golden_values() -> tuple[tuple[Golden, ...], tuple[tuple[Row, str], ...]]:
    """Every row that can be predicted, with its prediction, and the others with the reason."""
    rows = read_cases()
    unusable = dict(_unusable(rows))
    found: list[Golden] = []
    left_out: list[tuple[Row, str]] = []
    for place, row in enumerate(rows):
        if place in unusable:
            left_out.append((row, unusable[place]))
            continue
        try:
            found.append(with_devices(row))
        except InvalidInput as error:
            left_out.append((row, str(error.problems[0])))
    return tuple(found), tuple(left_out)


def _unusable(rows: list[Row]) -> Iterator[tuple[int, str]]:
    """Rows whose figures cannot be those of the arguments beside them, which is known of the figures alone."""
    figures = Counter((each["peak_allocated_bytes"], each["iteration_seconds"], each["device"]) for each in rows)
    first: dict[tuple[str, str, str], str] = {}
    current = _current(rows)
    for place, row in enumerate(rows):
        figure = row["peak_allocated_bytes"], row["iteration_seconds"], row["device"]
        before = first.setdefault(figure, row["case"])
        if figures[figure] > 1 and before != row["case"]:
            yield place, f"its golden file has the figures of {before}, bytes and seconds alike"
            continue
        if row["case"].endswith("_gb200") and not row["device"].startswith("gb200"):
            yield place, "a case of GB200 by its name; other devices have the files of another one"
            continue
        known = current.get((row["case"], row["device"].partition("_")[0]))
        if known is not None and abs(int(row["peak_allocated_bytes"]) / known - 1) > APART:
            yield place, f"its golden file is older: it differs by more than {APART:.0%} from the dev container's"


def _current(rows: list[Row]) -> Mapping[tuple[str, str], int]:
    """The peak of each case and type of device in the container that is tested every day."""
    return {
        (row["case"], row["device"]): int(row["peak_allocated_bytes"])
        for row in rows if row["container"] == "dev" and "_" not in row["device"]
    }  # fmt: skip
