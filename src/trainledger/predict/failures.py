"""Failures: how often a run should save, and what interruptions cost it.

Interruptions come at random and as often at any time (a Poisson process); each costs a restart and what was done since
the last checkpoint. Seconds throughout: ``write`` is what saving holds the run up, ``mtbf`` the mean time between
interruptions of the whole run, ``restart`` from an interruption until steps run again.
"""

from __future__ import annotations

from math import exp, expm1, sqrt

LONGEST = 2.0**100  # seconds; what takes longer is told as never ending


def run_mtbf(mtbf_device_seconds: float, devices: int) -> float:
    """Mean time between interruptions of a run that any one of its devices stops.

    >>> round(run_mtbf(50677 * 3600, 16384) / 3600, 2)
    3.09
    """
    return mtbf_device_seconds / devices


def young(write: float, mtbf: float) -> float:
    """The interval between checkpoints that loses least, to first order: sqrt(2 write mtbf) (Young 1974).

    >>> young(50.0, 10_000.0)
    1000.0
    """
    return sqrt(2 * write * mtbf)


def daly(write: float, mtbf: float) -> float:
    """The same to higher order (Daly 2006, equation 37): the time of work between two checkpoints.

    >>> round(daly(50.0, 10_000.0), 1)
    966.9
    """
    if write >= 2 * mtbf:
        return mtbf
    ratio = write / (2 * mtbf)
    return young(write, mtbf) * (1 + sqrt(ratio) / 3 + ratio / 9) - write


def expected_seconds(work: float, interval: float, *, write: float, restart: float, mtbf: float) -> float:
    """The mean time of a run of ``work`` seconds that saves after every ``interval`` of them, and at its end.

    mtbf e^(restart / mtbf) (e^((interval + write) / mtbf) - 1) for each interval (Daly 2006, equation 20): a failure
    may also come while it saves or restarts. Infinite where hardly an interval would ever end.

    >>> round(expected_seconds(10_000.0, 1000.0, write=50.0, restart=100.0, mtbf=10_000.0))
    11182
    """
    whole, rest = divmod(work, interval)
    try:
        parts = whole * expm1((interval + write) / mtbf)
        if rest > 1e-9 * interval:  # what is less is the rounding of an interval that divides the work
            parts += expm1((rest + write) / mtbf)
        seconds = mtbf * exp(restart / mtbf) * parts
    except OverflowError:
        return float("inf")
    return seconds if seconds < LONGEST else float("inf")
