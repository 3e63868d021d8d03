"""Predict the facts of November 2026 without what their sources have taught; write ``later_predicted.csv``.

``python tools/published/later_predictions.py`` takes two minutes. No constant was fitted on these rows. Of Megatron
Bridge's pages others were, and SimuMax timed matmuls that Blackwell's constants begin from: on B200 and GB200 rows of
both are predicted by constants without those, which ``... refit`` (ten minutes) writes into ``without_*.toml``.
"""

from __future__ import annotations

import csv
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from statistics import geometric_mean

import numpy as np
from later_runs import ALLOCATED, STEP, LaterRun, later_runs
from throughput_case import CALIBRATED

from trainledger import catalog
from trainledger.answers.machine import kernels_of
from trainledger.forecast.predict.device_memory import device_memory
from trainledger.forecast.predict.parallel_step import layout_time
from trainledger.ledger.memory.timeline import peak_nbytes
from trainledger.ledger.ranks import RankAccount, accounts
from trainledger.spec.device import Efficiency

PREDICTED = Path(__file__).parent / "later_predicted.csv"
# By the beginning of a row's name: Megatron Bridge's, of whose pages rows are fitted on, and SimuMax's.
WITHOUT = {"MB": Path(__file__).parent / "without_bridge.toml", "SX": Path(__file__).parent / "without_simumax.toml"}
OVERHEADS = catalog.overheads()
_BLACKWELL = CALIBRATED["blackwell"]
_COLUMNS = ("id", "figure", "measured", "predicted", "device", "usable")


@dataclass(frozen=True)
class LaterPrediction:
    """A row's figure, measured and predicted, with the bytes that its heaviest rank needs and those it can use."""

    case: LaterRun
    predicted: float
    device_nbytes: int
    usable_nbytes: int

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.case.measured - 1

    @property
    def calibration(self) -> str:
        """The type of its device; itself where no constants were fitted on it."""
        device = self.case.device.name
        return next((name for name, devices in CALIBRATED.items() if device in devices), device)

    @property
    def basis(self) -> str:
        """How the device is known (`spec.device.StepErrors`)."""
        known = self.case.device.efficiency is not None
        return "own" if self.calibration in CALIBRATED else "other" if known else "bound"


def predictions(chosen: Callable[[LaterRun], bool] = lambda case: True) -> Iterator[LaterPrediction]:
    """Every row that is chosen, predicted today; rows of one run share its account."""
    known: dict[object, tuple[RankAccount, ...]] = {}
    for case in filter(chosen, later_runs()[0]):
        if case.run not in known:
            known[case.run] = tuple(accounts(case.run, backend=kernels_of(case.run)))
        ranks = known[case.run]
        memories = [
            device_memory(
                int(peak_nbytes(rank.ledger)), case.device, OVERHEADS, groups=case.run.layout.communicators,
                recipe=case.run.recipe, reserved=rank.ledger.reserved,
            )
            for rank in ranks
        ]  # fmt: skip
        if case.figure == STEP:
            device = replace(case.device, efficiency=efficiency_of(case))
            seconds = layout_time(ranks, catalog.placed(device, case.run.cluster)).seconds
            assert seconds is not None, case.name
            figure = float(seconds)
        else:
            allocated = case.figure == ALLOCATED
            figure = max(float(each.allocated_nbytes if allocated else each.reserved_nbytes) for each in memories)
        usable = memories[0].usable_nbytes
        assert usable is not None, case.name
        yield LaterPrediction(case, figure, max(int(each.nbytes) for each in memories), usable)


def efficiency_of(case: LaterRun) -> Efficiency | None:
    """The constants of a row's device, on which nothing of its source was fitted."""
    source = case.name[:2]
    return without(source) if source in WITHOUT and case.device.name in _BLACKWELL else case.device.efficiency


@cache
def without(source: str) -> Efficiency:
    """Blackwell's constants without what a source has taught."""
    return Efficiency(**tomllib.loads(WITHOUT[source].read_text(encoding="utf-8")))


def refit() -> None:
    """Fit Blackwell's constants again, without Megatron Bridge's pages and without SimuMax's matmuls."""
    from fit_devices import B200_MATMULS, PRIORS, refitted, rounded
    from throughput_columns import Columns, around
    from throughput_fit import Fitted, prior_of
    from throughput_times import cases

    some = tuple(case for case in cases() if case.calibration == "blackwell")
    known = catalog.efficiency(_BLACKWELL[0])
    assert known is not None
    at = Fitted(known, around(Columns(some), known))
    for source, path in WITHOUT.items():
        others = [share for name, share in B200_MATMULS.items() if source != "SX" or name != "SimuMax"]
        prior = prior_of(replace(PRIORS["blackwell"], matmul_share=geometric_mean(others), source="as Blackwell's"))
        rows = [float(case.fitted and (source != "MB" or "Bridge" not in case.source.title)) for case in some]
        found = rounded(refitted(at, prior, np.array(rows)))
        lines = [f"{field.name} = {getattr(found, field.name)!r}\n".replace("'", '"') for field in fields(found)]
        head = "# Written by python tools/published/later_predictions.py refit.\n"
        path.write_text("".join([head, *lines]), encoding="utf-8")


@cache
def stored() -> tuple[LaterPrediction, ...]:
    """Every row with its stored prediction."""
    with open(PREDICTED, newline="", encoding="utf-8") as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    return tuple(
        LaterPrediction(
            case, float(rows[case.name]["predicted"]), int(rows[case.name]["device"]), int(rows[case.name]["usable"])
        )
        for case in later_runs()[0]
    )


def write() -> None:
    with open(PREDICTED, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(_COLUMNS)
        for each in predictions():
            measured, predicted = f"{each.case.measured:.7g}", f"{each.predicted:.7g}"
            table.writerow(
                (each.case.name, each.case.figure, measured, predicted, each.device_nbytes, each.usable_nbytes)
            )


if __name__ == "__main__":
    refit() if sys.argv[1:] == ["refit"] else write()
