"""Every published step that is predicted, with its stored prediction; what the pages and the tests of them rest on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from fit_devices import Predicted, read_predicted
from published_case import Errors, Row
from published_sources import TimeSource
from throughput_case import CALIBRATED, TimeCase
from throughput_runs import time_cases
from throughput_times import ranks_agree
from unseen_runs import Unseen, unseen

from trainledger.spec.layout import Layout

COUNTS = ("a100-sxm", "h100-sxm", "tpu")  # the device types that the goals are about
NAMES = {
    "a100-sxm": "A100 SXM", "h100-sxm": "H100 SXM", "v100-sxm": "V100 SXM", "blackwell": "B200, GB200",
    "tpu": "TPU v4, v5e, v5p",
}  # fmt: skip
MEDIAN, SHARE, WITHIN, RANKS, HOURS = 0.15, 0.8, 0.25, 0.9, 0.25


@dataclass(frozen=True)
class PredictedCase:
    """A case with its stored prediction."""

    case: TimeCase
    stored: Predicted

    @property
    def seconds(self) -> float:
        return self.stored.seconds

    @property
    def measured(self) -> float:
        return self.stored.measured

    @property
    def error(self) -> float:
        return self.seconds / self.measured - 1

    @property
    def error_left_out(self) -> float:
        return self.stored.left_out / self.measured - 1


@cache
def predicted_cases() -> tuple[tuple[PredictedCase, ...], tuple[tuple[Row, str], ...]]:
    """Every row that is predicted, with its stored prediction, and the others with their reason."""
    found, left_out = time_cases()
    stored = read_predicted()
    return tuple(PredictedCase(each, stored[each.name]) for each in found), left_out


def errors(some: Sequence[PredictedCase], *, left_out: bool = False) -> Errors:
    return Errors(tuple(each.error_left_out if left_out else each.error for each in some))


def counting() -> list[PredictedCase]:
    """The rows that the goals are about."""
    return [each for each in predicted_cases()[0] if each.case.calibration in COUNTS]


def sources() -> dict[TimeSource, list[PredictedCase]]:
    split: dict[TimeSource, list[PredictedCase]] = {}
    for each in predicted_cases()[0]:
        split.setdefault(each.case.source, []).append(each)
    return split


def percent(share: float, *, sign: bool = False) -> str:
    return f"{100 * share:+.1f} %" if sign else f"{100 * share:.1f} %"


def ways(layout: Layout) -> str:
    """The ranks of each kind, for a table."""
    names = ("replicate", "shard", "context", "expert", "tensor", "pipeline")
    return ", ".join(f"{name} {getattr(layout, name)}" for name in names if getattr(layout, name) > 1) or "-"


ENOUGH = 10  # rows, from which on a correlation says something


def ranked() -> list[tuple[TimeSource, list[PredictedCase]]]:
    """The sources with `ENOUGH` rows or more on one type of device."""
    split = [
        (source, [each for each in some if each.case.calibration == name])
        for source, some in sources().items()
        for name in CALIBRATED
    ]
    return [(source, some) for source, some in split if len(some) >= ENOUGH]


def layouts_of_one_model() -> Iterator[tuple[TimeSource, str, list[PredictedCase]]]:
    """The rows of a source that have one model in common and different layouts, ten or more."""
    for source, some in ranked():
        split: dict[str, list[PredictedCase]] = {}
        for each in some:
            spec = each.case.run.model
            model = f"{spec.n_layers} layers, width {spec.d_model}, {spec.attention.n_heads} heads"
            split.setdefault(model, []).append(each)
        for model, rows in split.items():
            ways = {(each.case.run.layout, each.case.run.device_batch) for each in rows}
            if len(rows) >= ENOUGH and len(ways) >= ENOUGH:
                yield source, model, rows


def agreement(some: Sequence[PredictedCase | Unseen]) -> float:
    """Spearman's correlation of predicted and measured seconds of a step."""
    return ranks_agree([each.seconds for each in some], [each.measured for each in some])


def unseen_of(source: TimeSource) -> list[Unseen]:
    """The rows of a source that nothing was fitted on."""
    return [each for each in unseen() if each.case.source == source]


def ceiling(some: Sequence[PredictedCase], rows: Sequence[str]) -> float:
    """The correlation if all but the named rows were predicted as they were measured."""
    exact = [each.seconds if each.case.name in rows else each.measured for each in some]
    return ranks_agree(exact, [each.measured for each in some])
