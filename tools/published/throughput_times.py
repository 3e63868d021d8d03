"""Predicted seconds of every published run's step, with the catalog's calibrations or with other constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from published_sources import TimeSource
from throughput_case import CALIBRATED, TimeCase
from throughput_runs import time_cases

from trainledger import catalog
from trainledger.forecast.predict.parallel_step import layout_time
from trainledger.forecast.predict.step import StepTime
from trainledger.ledger.ledger import Ledger
from trainledger.ledger.parallel.rank_plan import rank_plan
from trainledger.ledger.ranks import RankAccount
from trainledger.ledger.step import follow
from trainledger.spec.device import Efficiency


@cache
def cases() -> tuple[TimeCase, ...]:
    """The modelled rows, of devices that have a calibration or are about to get one."""
    devices = {device for some in CALIBRATED.values() for device in some}
    return tuple(each for each in time_cases()[0] if each.run.cluster.device in devices)


_RANKS: dict[str, tuple[RankAccount, ...]] = {}


def ranks_of(case: TimeCase) -> tuple[RankAccount, ...]:
    """The account of the first rank of each stage, made once; stages with equal layers share theirs.

    What lies in flight differs between them, and takes no time.
    """
    if case.name not in _RANKS:
        run = case.run
        alike: dict[Any, Ledger] = {}
        found = []
        for stage in range(run.layout.pipeline):
            rank = rank_plan(run, stage)
            chunks = [each.chunk for each in rank.chunks]
            key = tuple((each.count, each.begins, each.ends) for each in chunks)
            if key not in alike:
                alike[key] = follow(rank, backend="cuda")
            found.append(RankAccount(rank, run.layout.devices // run.layout.pipeline, alike[key]))
        _RANKS[case.name] = tuple(found)
    return _RANKS[case.name]


def predicted(case: TimeCase, efficiency: Efficiency | None = None) -> StepTime:
    """The step of a case; ``efficiency`` stands in for that of its device's calibration."""
    device = catalog.placed(case.device, case.run.cluster)
    if efficiency is not None:
        device = replace(device, efficiency=efficiency)
    found = layout_time(ranks_of(case), device)
    assert found.seconds is not None, f"{case.name}: {found.notes}"
    return found


@dataclass(frozen=True)
class TimePrediction:
    """A case with its predicted step."""

    case: TimeCase
    step: StepTime

    @property
    def seconds(self) -> float:
        assert self.step.seconds is not None
        return float(self.step.seconds)

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.seconds / self.case.seconds - 1


@cache
def predictions() -> tuple[TimePrediction, ...]:
    """Every case with the catalog's calibrations."""
    return tuple(TimePrediction(each, predicted(each)) for each in cases())


def ranks_agree(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Spearman's rank correlation, ties at their mean rank.

    >>> ranks_agree([1, 2, 3], [10, 20, 30]), ranks_agree([1, 2, 3], [3, 2, 1])
    (1.0, -1.0)
    """
    a, b = _mean_ranks(predicted), _mean_ranks(measured)
    mean = (len(a) + 1) / 2
    top = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    return float(top / (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5)


def _mean_ranks(values: Sequence[float]) -> list[float]:
    return [
        (sum(other < each for other in values) + sum(other <= each for other in values) + 1) / 2 for each in values
    ]  # fmt: skip


def by_source(found: Sequence[TimePrediction]) -> dict[TimeSource, list[TimePrediction]]:
    split: dict[TimeSource, list[TimePrediction]] = {}
    for each in found:
        split.setdefault(each.case.source, []).append(each)
    return split
