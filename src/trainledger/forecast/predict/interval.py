"""Intervals of predictions, from the errors of published runs whose source was left out (`spec.device`)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import atan, cos, exp, log, pi, sin, sqrt
from typing import Any

from trainledger.forecast.predict.device_memory import DeviceMemory
from trainledger.spec.device import SHARE, Device, ErrorModel, MemoryErrors, PairErrors, Seen, StepClass
from trainledger.spec.frozen import frozen
from trainledger.spec.run import Run

SURE = 0.95  # the chance of fitting that a margin is given for
LIKELY = 0.8  # the least chance of fitting of what is recommended
EVEN = 0.5  # from here on a run fits rather than not
# Of the memory of a device of which nothing is known but its tensors; as much as context, NCCL's buffers and
# fragmentation take of an H100 that is filled (`device_memory`: 3.7 of 80.6 GB).
_NOT_TENSORS = 0.05


@frozen
class Interval:
    """Between which two values `SHARE` of such predictions find the truth."""

    low: float
    high: float


def kinds_of(run: Run) -> tuple[str, ...]:
    """What a run has that its errors may depend on, in words."""
    layout, recipe = run.layout, run.recipe
    found = {
        "experts": run.model.experts is not None,
        "adapters": recipe.lora is not None,
        "tensor ranks": layout.tensor > 1,
        "pipeline stages": layout.pipeline > 1,
        "context ranks": layout.context > 1,
        "sharded parameters": layout.shard > 1 and layout.zero == 3,
        "fp8 matmuls": recipe.precision.float8 is not None,
        "fp32 matmuls": recipe.precision.compute == "fp32",
    }
    return tuple(name for name, has in found.items() if has)


def unlike(run: Run, seen: Seen) -> tuple[str, ...]:
    """What a run has that no published run has, in words; empty where there are runs like it.

    >>> from trainledger.answers.load import load
    >>> recipe = {"seq_len": 1024, "global_batch": 1, "steps": 1}
    >>> run = load({"model": {"preset": "gpt2"}, "recipe": recipe})
    >>> unlike(run, Seen(kinds=("fp32 matmuls",), most_devices=8, longest=512))
    ('sequences of 1,024 tokens',)
    """
    found = [kind for kind in kinds_of(run) if kind not in seen.kinds]
    if run.layout.devices > seen.most_devices:
        found.append(f"{run.layout.devices:,} devices")
    if run.recipe.seq_len > seen.longest:
        found.append(f"sequences of {run.recipe.seq_len:,} tokens")
    return tuple(found)


def widening(run: Run, seen: Seen, errors: ErrorModel) -> float:
    """How much wider intervals are on the logarithm where a run is unlike all published ones; else 1."""
    return errors.widening if unlike(run, seen) else 1.0


# Steps below a second wait for what longer ones hide: launches, the program between steps, latencies of collectives.
SHORT = 1.0  # seconds below which a step counts as short
DEVICES = (1, 8, 64, 512, 10**9)  # the most of each class of runs


def steps_like(run: Run, errors: ErrorModel, seconds: float) -> StepClass:
    """The class of published steps that a run's step of so many predicted seconds belongs to."""
    of = seconds < SHORT, run.model.experts is not None
    alike = (steps for steps in errors.step.classes if (steps.short, steps.experts) == of)
    return next(steps for steps in alike if run.layout.devices <= steps.devices)


def of_step(run: Run, errors: ErrorModel, seconds: float) -> Interval:
    """What the measured seconds of a step may be, in units of the ``seconds`` predicted."""
    wider = widening(run, errors.steps_seen, errors)
    steps = steps_like(run, errors, seconds)
    low, high = log(steps.low), log(steps.high)
    middle = (low + high) / 2
    return Interval(exp(middle + (low - middle) * wider), exp(middle + (high - middle) * wider))


def of_memory(run: Run, errors: ErrorModel) -> Interval:
    """What the measured bytes of a device may be, in units of those predicted."""
    return Interval(*(exp(_memory_quantile(run, errors, share)) for share in ((1 - SHARE) / 2, (1 + SHARE) / 2)))


def middle_of_memory(run: Run, errors: ErrorModel) -> float:
    """What half of the measured bytes of a device are above, in units of those predicted."""
    return exp(peaks_like(run, errors).shift)


def peaks_like(run: Run, errors: ErrorModel) -> MemoryErrors:
    """The errors of the published peaks that are of a run's kind."""
    adapters = run.recipe.lora is not None
    alike = (peaks for peaks in errors.memory if peaks.adapters == adapters)
    return next(peaks for peaks in alike if run.layout.devices <= peaks.devices)


def chance_of_fitting(run: Run, errors: ErrorModel, needed: float, usable: float) -> float:
    """The chance that a run fits whose memory is predicted as ``needed`` bytes, where ``usable`` ones are."""
    peaks = peaks_like(run, errors)
    spread = peaks.spread * widening(run, errors.memory_seen, errors)
    return max(0.0, student_share((log(usable / needed) - peaks.shift) / spread, peaks.degrees))


def chance_on(run: Run, device: Device | None, needed: float, usable: int | None) -> float | None:
    """As `chance_of_fitting`, on a device beside the run's own margin; None where one of the two is not known."""
    if device is None or device.errors is None or usable is None:
        return None
    return chance_of_fitting(run, device.errors, needed, usable + (run.cluster.memory_margin_nbytes or 0))


def margin(run: Run, errors: ErrorModel, needed: float) -> int:
    """The bytes to keep free of a device beyond those predicted, for a chance of `SURE` that they are enough."""
    return max(0, round(needed * (exp(_memory_quantile(run, errors, SURE)) - 1)))


def kept_free(run: Run, device: Device, chance: float = 0.5) -> int:
    """The bytes of a device to keep free, so that a run that fits in the others really does with this chance.

    0 where its memory, or how far off predictions of it are, is not known, and beside a margin of the run's own.
    """
    if device.capacity_nbytes is None or device.errors is None or run.cluster.memory_margin_nbytes is not None:
        return 0
    tensors = 1.0 if device.compute_capability is not None else 1 - _NOT_TENSORS
    return round(device.capacity_nbytes * (1 - tensors / max(1.0, exp(_memory_quantile(run, device.errors, chance)))))


def _memory_quantile(run: Run, errors: ErrorModel, share: float) -> float:
    peaks = peaks_like(run, errors)
    spread = peaks.spread * widening(run, errors.memory_seen, errors)
    return peaks.shift + spread * student_quantile(share, peaks.degrees)


def of_ratio(pairs: PairErrors, ratio: float, wider: float = 1.0) -> Interval:
    """What the measured ratio of two runs' steps may be, where ``ratio`` is predicted; ``wider`` as of `widening`.

    >>> of_ratio(PairErrors(ratio=1.25, rows=1, sources=1), 2.0)
    Interval(low=1.6, high=2.5)
    """
    off = pairs.ratio**wider
    return Interval(ratio / off, ratio * off)


OF_STEPS = ("step_seconds", "total_seconds", "days", "device_hours", "money")  # as far off as steps are
AT_THE_PEAK = "intervals of times begin where matmuls reach the peak and other kernels the bandwidth of the data sheet"


def of_forecast(
    run: Run, facts: Mapping[str, Any], memory: DeviceMemory, errors: ErrorModel, fastest: float
) -> dict[str, Any]:
    """The fields of a forecast that say how sure others are; ``facts`` are those others.

    ``fastest`` is the share of a step's seconds below which no device takes it (its data sheet).
    """
    intervals = {}
    if facts.get("step_seconds"):
        step = of_step(run, errors, facts["step_seconds"])
        step = Interval(max(step.low, fastest), max(step.high, fastest))
        intervals = {name: scaled(step, facts[name]) for name in OF_STEPS if facts.get(name)}
    if memory.tensors_alone:
        return {"intervals": intervals}
    needed = float(memory.nbytes)
    chance = None
    if memory.usable_nbytes is not None:
        chance = chance_of_fitting(run, errors, needed, memory.usable_nbytes + (run.cluster.memory_margin_nbytes or 0))
    return {
        "intervals": intervals | {"device_nbytes": scaled(of_memory(run, errors), needed)},
        "chance_of_fitting": chance,
        "margin_nbytes": margin(run, errors, needed),
    }


def scaled(interval: Interval, value: float) -> Interval:
    """An interval in units of a prediction as one of the quantity itself."""
    return Interval(interval.low * value, interval.high * value)


def student_share(t: float, degrees: int) -> float:
    """The share of Student's t distribution below ``t`` (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4).

    >>> [round(student_share(each, 5), 4) for each in (-1.4759, 0.0, 1.4759, 2.0150)]
    [0.1, 0.5, 0.9, 0.95]
    """
    angle = atan(t / sqrt(degrees))
    odd = degrees % 2
    term = total = cos(angle) if odd else 1.0
    for k in range(3 if odd else 2, degrees - 1, 2):
        term *= cos(angle) ** 2 * (k - 1) / k
        total += term
    if not odd:
        return 0.5 + sin(angle) * total / 2
    return 0.5 + (angle + (sin(angle) * total if degrees > 1 else 0.0)) / pi


@cache
def student_quantile(share: float, degrees: int) -> float:
    """The value below which a share of Student's t distribution lies.

    >>> round(student_quantile(0.9, 1), 4), round(student_quantile(0.1, 4), 4)
    (3.0777, -1.5332)
    """
    low, high = -1e3, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_share(middle, degrees) < share else (low, middle)
    return low
