"""Schedules of the learning rate, and the rate of a step."""

from __future__ import annotations

import math
from typing import ClassVar

from trainledger.spec.frozen import frozen
from trainledger.spec.setting import setting


@frozen(kw_only=True)
class Schedule:
    """Fields of every schedule of the learning rate."""

    kind: ClassVar[str]

    warmup_steps: int = setting("steps of linear warm-up", 0, at_least=0)


@frozen(kw_only=True)
class Linear(Schedule):
    """A line from the peak to the last learning rate."""

    kind = "linear"

    final_ratio: float = setting("last learning rate over the peak one", 0.1, at_least=0, at_most=1)


@frozen(kw_only=True)
class Cosine(Linear):
    """Half a cosine (Loshchilov and Hutter 2017, arXiv 1608.03983, without restarts)."""

    kind = "cosine"


@frozen(kw_only=True)
class WarmupStableDecay(Linear):
    """Flat, then a line (Hu et al. 2024, arXiv 2404.06395, section 4)."""

    kind = "wsd"

    decay_fraction: float = setting("last share of the steps in which the rate falls", 0.2, above=0, at_most=1)


@frozen(kw_only=True)
class Constant(Schedule):
    """The peak learning rate to the end."""

    kind = "constant"


SCHEDULES: dict[str, type[Schedule]] = {cls.kind: cls for cls in (Cosine, Linear, WarmupStableDecay, Constant)}


def rate(schedule: Schedule, peak: float, total_steps: int, step: int) -> float:
    """The learning rate of the step with index ``step`` of ``total_steps``; the first is 0.

    Linear warm-up reaches the peak at index ``warmup_steps - 1``; from there the rate goes to
    ``final_ratio`` of the peak at the last step: along a half cosine (Loshchilov and Hutter 2017, without
    restarts), a line, or (``wsd``, Hu et al. 2024, section 4) flat and then a line over the last ``decay_fraction``.

    >>> [round(rate(Linear(final_ratio=0.0), 1.0, 11, step), 3) for step in (0, 5, 10)]
    [1.0, 0.5, 0.0]
    """
    last = total_steps - 1
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if not isinstance(schedule, Linear):
        return peak
    top = max(schedule.warmup_steps - 1, 0)  # the last index at the peak
    if isinstance(schedule, WarmupStableDecay):
        top = max(top, last - round(schedule.decay_fraction * total_steps))
    progress = min(max(step - top, 0) / max(last - top, 1), 1.0)
    height = (1 + math.cos(math.pi * progress)) / 2 if isinstance(schedule, Cosine) else 1 - progress
    return peak * (schedule.final_ratio + (1 - schedule.final_ratio) * height)
