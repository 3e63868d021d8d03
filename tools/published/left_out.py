"""Predict published steps without what their source has taught, and without what rows of their device have.

``python tools/published/left_out.py [a100-sxm h100-sxm v100-sxm blackwell tpu]`` (half an hour for all) writes
``left_out_predicted.csv``, on which the error model rests (`error_model.py`). Of a row that constants are fitted on,
`fit_devices.py` has the prediction by the constants of all other sources; here are

- ``left_out``: an unseen row (`unseen_runs.py`) by constants fitted without the rows of its source;
- ``other``: a row by the constants of another device of its maker (`OTHER`), as if nothing were known of its own;
- ``bound``: a row by the data sheet alone, as for a device without a calibration.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from fit_devices import PRIORS, refitted
from throughput_case import CALIBRATED, TimeCase
from throughput_columns import Columns, around
from throughput_fit import Fitted, prior_of
from throughput_times import cases, predicted
from unseen_runs import unseen_cases

from trainledger import catalog
from trainledger.forecast.predict.parallel_step import layout_time
from trainledger.spec.device import Efficiency

STORED = Path(__file__).parent / "left_out_predicted.csv"
# The device of the same maker whose constants stand in: the generation after, of the newest the one before.
OTHER = {"v100-sxm": "a100-sxm-80gb", "a100-sxm": "h100-sxm", "h100-sxm": "a100-sxm-80gb", "blackwell": "h100-sxm"}


@dataclass(frozen=True)
class LeftOut:
    """Seconds of a row by what is left when something is not known; None where the row does not ask for it."""

    name: str
    left_out: float | None
    other: float | None
    bound: float | None


def read_left_out() -> dict[str, LeftOut]:
    """What is stored, by row."""
    if not STORED.exists():
        return {}
    with open(STORED, newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    return {row[0]: LeftOut(row[0], *(float(each) if each else None for each in row[1:])) for row in rows}


def found_for(name: str) -> Iterator[LeftOut]:
    """The rows of one device type."""
    some = tuple(each for each in cases() if each.calibration == name)
    other = catalog.efficiency(OTHER[name]) if name in OTHER else None
    for each in some:
        seconds = None if other is None else predicted(each, other).seconds
        yield LeftOut(each.name, None, seconds, bound_of(each))
    unseen = [each for each in unseen_cases() if each.calibration == name]
    without = dict(constants(name, some, {each.source.name for each in unseen})) if unseen else {}
    for each in unseen:
        seconds = predicted(each, without.get(each.source.name)).seconds
        yield LeftOut(each.name, seconds, None, None)


def bound_of(case: TimeCase) -> float | None:
    """The seconds of a step by the data sheet alone."""
    from throughput_times import ranks_of

    device = replace(catalog.placed(case.device, case.run.cluster), efficiency=None)
    return layout_time(ranks_of(case), device).seconds


def constants(name: str, some: tuple[TimeCase, ...], sources: set[str]) -> Iterator[tuple[str, Efficiency]]:
    """The constants of a type fitted without the rows of each source that has rows among ``some``."""
    known = catalog.efficiency(CALIBRATED[name][0])
    assert known is not None
    at = Fitted(known, around(Columns(some), known))
    for source in sorted(sources & {each.source.name for each in some}):
        rows = np.array([float(each.fitted and each.source.name != source) for each in some])
        yield source, refitted(at, prior_of(PRIORS[name]), rows)


def write(found: dict[str, LeftOut]) -> None:
    with open(STORED, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("id", "left_out", "other", "bound"))
        for name in sorted(found):
            each = found[name]
            values = (each.left_out, each.other, each.bound)
            table.writerow((name, *("" if value is None else f"{value:.6g}" for value in values)))


def main(names: list[str]) -> None:
    for name in names or CALIBRATED:
        made = {each.name: each for each in found_for(name)}
        write(read_left_out() | made)  # read again: types may be worked on side by side
        print(name, len(made), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
