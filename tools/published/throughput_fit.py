"""Fit a device's constants to published seconds: robust least squares on the logarithm of predicted over measured.

Gauss and Newton's steps with Levenberg's damping; each row weighs as one in the middle and less where it is far off
(the pseudo-Huber loss). Every constant keeps near what was known of it before (`PRIORS`), in units of how well that was
known, and within physical bounds; rows alone could not tell all of them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from throughput_columns import Around, Columns, around

from trainledger.spec.device import Efficiency

ROBUST = 0.15  # the logarithmic error from which on a row weighs less
ERROR = 0.12  # what is taken for the error of one row, against which the priors weigh
# Constants of one name move together: both passes of attention keep their ratio (Dao 2023, figures 4 to 6).
TOGETHER = {"attention_share": ("attention_share", "attention_backward_share")}
# NCCL's kernels take up to 32 multiprocessors of 80 to 132, which bounds what compute beside them can lose.
BOUNDS = {
    "matmul_share": (0.3, 0.95), "float8_share": (0.3, 0.95), "depth": (1.0, 2000.0), "attention_share": (0.1, 0.9),
    "attention_length": (1.0, 4000.0), "bandwidth_share": (0.3, 0.95), "kernel_seconds": (5e-7, 5e-6),
    "launch_seconds": (1e-6, 1e-4), "contention_share": (1e-4, 0.3), "straggler_share": (1e-5, 0.1),
    "network_share": (0.1, 1.0),
}  # fmt: skip
# How well a constant was known before: the standard deviation of its logarithm.
PRIORS = {
    "matmul_share": 0.15, "float8_share": 0.2, "depth": 1.0, "attention_share": 0.3, "attention_length": 0.7,
    "bandwidth_share": 0.15, "kernel_seconds": 0.5, "launch_seconds": 0.5, "contention_share": 0.7,
    "straggler_share": 0.7, "network_share": 0.5,
}  # fmt: skip
# Where a device's file says nothing yet.
UNKNOWN = {"contention_share": 0.15, "straggler_share": 0.005}
# An operation of eager PyTorch costs 10 to 50 microseconds of its program, modules, hooks and autograd included: fits
# begin where that shows, unless more is known.
LAUNCH_SECONDS = 2.5e-5
NAMES = tuple(BOUNDS)
Array = Any  # of numpy


@dataclass(frozen=True)
class Fitted:
    """The constants, and all rows timed exactly with them."""

    efficiency: Efficiency
    around: Around

    @property
    def residuals(self) -> Array:
        """The logarithm of predicted over measured, row by row."""
        return np.log(self.around.exact) - _measured(self.around.columns)


def prior_of(efficiency: Efficiency) -> Efficiency:
    """What was known of a device before any fit, with something where nothing was."""
    changes: dict[str, Any] = {name: value for name, value in UNKNOWN.items() if not getattr(efficiency, name)}
    if efficiency.launch_seconds:
        changes["launch_seconds"] = max(LAUNCH_SECONDS, efficiency.launch_seconds)
    return replace(efficiency, **changes)


def fit(columns: Columns, prior: Efficiency, *, start: Efficiency | None = None, most: int = 5) -> Fitted:
    """The constants under which steps take what was measured, as nearly as the prior lets them.

    ``start`` is where to begin, such as the constants of a fit before.
    """
    found = around(columns, start or prior)
    rows = np.array([float(each.fitted) for each in columns.cases])
    for _ in range(most):
        before = found
        found = around(columns, move(found, prior, rows), found.contended)
        if np.max(np.abs(np.log(found.exact / before.exact))) < 5e-3:
            break
    return Fitted(found.efficiency, found)


def move(at: Around, prior: Efficiency, rows: Array, *, rounds: int = 40) -> Efficiency:
    """The best constants around those that were timed exactly; ``rows`` are the weights of rows, 0 for one left out."""
    names = [name for name in NAMES if getattr(prior, name) and (name != "float8_share" or _in_8_bits(at.columns))]
    low, high = np.log([BOUNDS[name][0] for name in names]), np.log([BOUNDS[name][1] for name in names])
    widths = np.array([PRIORS[name] for name in names])
    center = np.log([getattr(prior, name) for name in names])
    measured = _measured(at.columns)

    def residuals(x: Array) -> Array:
        return np.log(at.seconds(changed(prior, names, np.exp(x)))) - measured

    def cost(x: Array, found: Array) -> float:
        each = 2 * ROBUST**2 * (np.sqrt(1 + (found / ROBUST) ** 2) - 1) / ERROR**2
        return float(np.sum(rows * each) + np.sum(((x - center) / widths) ** 2))

    x = np.clip(center, low, high)
    found = residuals(x)
    damping = 1e-3
    for _ in range(rounds):
        slope = np.stack([(residuals(_moved(x, place)) - found) / STEP for place in range(len(x))], axis=1)
        weights = rows / np.sqrt(1 + (found / ROBUST) ** 2) / ERROR**2
        gradient = slope.T @ (weights * found) + (x - center) / widths**2
        curvature = slope.T @ (weights[:, None] * slope) + np.diag(1 / widths**2)
        before = cost(x, found)
        for _ in range(8):
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient)
            tried = np.clip(x + np.clip(step, -0.5, 0.5), low, high)
            other = residuals(tried)
            if cost(tried, other) < before:
                damping = max(damping / 5, 1e-7)
                break
            damping *= 5
        else:
            break
        x, found = tried, other
        if before - cost(x, found) < 1e-4:
            break
    return changed(prior, names, np.exp(x))


STEP = 0.01


def _measured(columns: Columns) -> Array:
    return np.log([each.seconds for each in columns.cases])


def _moved(x: Array, place: int) -> Array:
    moved = x.copy()
    moved[place] += STEP
    return moved


def changed(prior: Efficiency, names: Sequence[str], values: Sequence[float]) -> Efficiency:
    """The constants with others of these names; those that move together keep their ratio."""
    changes: dict[str, Any] = {}
    for name, value in zip(names, values, strict=True):
        ratio = float(value) / getattr(prior, name)
        for each in TOGETHER.get(name, (name,)):
            changes[each] = getattr(prior, each) * ratio
    return replace(prior, **changes)


def _in_8_bits(columns: Columns) -> bool:
    return any(each.entry.dtype in ("e4m3", "e5m2") for each in columns.kernels)
