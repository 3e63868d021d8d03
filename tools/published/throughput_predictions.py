"""Every published step that is predicted, with its stored prediction; what the pages and the tests of them rest on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from fit_devices import Predicted, read_predicted
from published_case import Errors, Row
from throughput_case import TimeCase, TimeSource
from throughput_runs import time_cases

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
