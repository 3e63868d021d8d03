"""What a run spends most of its time on, by name, and what stands in its way first where it cannot run."""

from __future__ import annotations

from collections.abc import Sequence

from trainledger.frozen import frozen
from trainledger.predict.waterfall import BEYOND, NAPKIN, Bar
from trainledger.units import format_nbytes, format_percent

COMPUTE = (NAPKIN, BEYOND, "kernel efficiency")
_SAYS = {
    "compute": "computes matrix products and attention",
    "recomputation": "runs parts of forward a second time",
    "memory-bound operations": "moves bytes between device memory and kernels that compute little",
    "launch overhead": "waits for the program to start the next operation",
    "exposed communication": "waits for other devices, with nothing to compute meanwhile",
    "pipeline bubble": "waits for other stages of the pipeline",
    "stragglers": "waits for the slowest device",
    "data": "waits for tokens",
    "evaluation": "evaluates",
    "checkpoints": "writes checkpoints",
    "failures": "is lost to interruptions: work done again, and restarts",
    "warm-up": "goes to the first steps, which are slower",
    "unexplained": "has no cause that is known",
}


@frozen
class Bottleneck:
    """The name of what limits a run, and a sentence with how much of its time that takes."""

    name: str
    sentence: str


def bottleneck(bars: Sequence[Bar], *, mfu: float | None = None) -> Bottleneck | None:
    """The cause that takes most of a run's time, products at their peak and below it taken as one; None of no bars."""
    taken: dict[str, int] = {}
    for each in bars:
        name = "compute" if each.cause in COMPUTE else each.cause
        taken[name] = taken.get(name, 0) + each.nanoseconds
    total = sum(taken.values())
    if total <= 0:
        return None
    first, *others = sorted(taken, key=lambda name: -taken[name])
    sentence = f"{format_percent(taken[first] / total)} of the time {_SAYS[first]}"
    lost = next((each.nanoseconds for each in bars if each.cause == "kernel efficiency"), 0)
    if first == "compute" and mfu is not None and lost > 0:
        reached = 1 - lost / taken["compute"]
        sentence += f", at {format_percent(reached)} of the peak"
    if others and taken[others[0]] > 0:
        sentence += f"; next: {format_percent(taken[others[0]] / total)} {_SAYS[others[0]]}"
    return Bottleneck(first, sentence)


def short_of_memory(
    needed_nbytes: int, usable_nbytes: int, by_category: dict[str, int], *, who: str = "a device"
) -> Bottleneck:
    """The bottleneck of a run that does not fit; ``who`` says which device is spoken of."""
    largest = max(by_category, key=lambda each: by_category[each])
    needs = f"{who} needs {format_nbytes(needed_nbytes)} and has {format_nbytes(usable_nbytes)}"
    return Bottleneck("device memory", f"{needs}; most of it is {largest}: {format_nbytes(by_category[largest])}")
