"""The waterfall: from 6 N D at the whole peak to the time that a run will take, one bar for each cause.

Bars are whole nanoseconds, so that they sum to the total exactly, whatever the order in which they are added.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainledger.frozen import frozen

NAPKIN = "6 N D at the peak"
BEYOND = "attention, not in 6 N D"
UNEXPLAINED = "unexplained"
RUN_CAUSES = ("data", "evaluation", "checkpoints", "failures", "warm-up")

_NANO = 10**9
_ROUNDING = 1e-9  # of the total: what sums of floating-point seconds may differ by


@frozen
class Bar:
    """What one cause adds to the time of a run; it may take away."""

    cause: str
    nanoseconds: int

    @property
    def seconds(self) -> float:
        return self.nanoseconds / _NANO


def nanoseconds(seconds: float) -> int:
    """Seconds as whole nanoseconds, rounded once; the product of floats would round twice.

    >>> nanoseconds(0.1), nanoseconds(-3e-9), nanoseconds(1e9 + 0.1)
    (100000000, -3, 1000000000100000024)
    """
    above, below = seconds.as_integer_ratio()
    return (2 * above * _NANO + below) // (2 * below)


def waterfall(
    napkin_seconds: float,
    steps_seconds: float,
    step_causes: Mapping[str, float],
    run_parts: Mapping[str, float],
    total_seconds: float,
) -> tuple[Bar, ...]:
    """The bars of a run that takes ``total_seconds``; they sum to `nanoseconds` of it.

    ``napkin_seconds`` is 6 N D over the peak of all devices; ``step_causes`` split one step (``ideal`` is its model
    FLOPs at the peak) and are scaled to ``steps_seconds``, all steps of the run; ``run_parts`` are the seconds of
    RUN_CAUSES. What these leave of the total is a bar named ``unexplained``.
    """
    split = sum(step_causes.values())
    scale = steps_seconds / split if split else 0.0
    causes = {name: seconds * scale for name, seconds in step_causes.items()}
    bars = {NAPKIN: napkin_seconds, BEYOND: causes.pop("ideal", 0.0) - napkin_seconds, **causes}
    bars |= {name: run_parts.get(name, 0.0) for name in RUN_CAUSES}
    rest = total_seconds - sum(bars.values())
    if abs(rest) > _ROUNDING * total_seconds:
        bars[UNEXPLAINED] = rest
    found = {cause: nanoseconds(seconds) for cause, seconds in bars.items()}
    largest = max(found, key=lambda cause: abs(found[cause]))
    found[largest] += nanoseconds(total_seconds) - sum(found.values())  # what the rounding of each bar leaves
    return tuple(Bar(cause, each) for cause, each in found.items())
