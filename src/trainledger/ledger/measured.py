"""The measured figures of a run: the other half of a reconciliation, kept in the run's directory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import field
from itertools import chain
from typing import Any

from trainledger.ledger.ledger import Ledger, StepFigures, summary
from trainledger.spec.frozen import frozen


@frozen(kw_only=True)
class Spread:
    """The median of repeated samples and their spread (quartiles); ``discarded`` were disturbed."""

    median: float
    low: float
    high: float
    count: int
    discarded: int = 0


def spread(samples: Iterable[float], discarded: int = 0) -> Spread | None:
    """Median and quartiles (linear between neighbours); None without a sample.

    >>> spread([1.0, 2.0, 3.0, 4.0, 100.0])
    Spread(median=3.0, low=2.0, high=4.0, count=5, discarded=0)
    """
    ordered = sorted(samples)
    if not ordered:
        return None

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return Spread(median=at(0.5), low=at(0.25), high=at(0.75), count=len(ordered), discarded=discarded)


@frozen(kw_only=True)
class EagerBytes:
    """Bytes of a step without torch.compile: kept for one micro-batch's backward, by kind, and at the peak."""

    kept_nbytes: int
    kept_by_kind: dict[str, int]
    peak_nbytes: int
    peak_by_category: dict[str, int]


@frozen(kw_only=True)
class Measured(StepFigures):
    """A run as measured. Everything may be missing: a run may end before it was measured.

    Ledger amounts are those of one metered optimizer step: ``flops`` by kind, ``kept_nbytes`` of one
    micro-batch, the peak by category as dispatched operations showed it, and ``allocator_peak_nbytes`` as the
    allocator's own events did, of which ``matmul_sums_nbytes`` are known to be sums inside of bf16 matmuls.
    ``step_seconds_by_phase`` are means over the middle half of the steady steps, ``seconds_by_phase`` sums over the
    run; ``warm-up`` and ``metering`` in it are what the first steps and the metered ones took longer than steady ones,
    and a step that was not clocked phase by phase counts as split like steady ones. ``threads`` are those of a CPU that
    a rank had. ``eager``, of runs metered before 2026-12, is what the closed form says of the metered step, where that
    ran without the torch.compile of the run's other steps.
    """

    allocator_peak_nbytes: int | None = None
    matmul_sums_nbytes: int = 0
    step_seconds: Spread | None = None
    step_seconds_by_phase: dict[str, float] = field(default_factory=dict)
    tokens_per_second: float | None = None
    total_seconds: float | None = None
    seconds_by_phase: dict[str, float] = field(default_factory=dict)
    device: str = ""
    torch_version: str = ""
    date: str = ""
    threads: int | None = None
    eager: EagerBytes | None = None
    notes: tuple[str, ...] = ()


_Step = tuple[float, dict[str, float]]  # its seconds, and those of its phases where they were clocked
WARM_UP_STEPS = 2
BUSY = "other processes kept the machine busy"  # begins the note of what was disturbed
ENOUGH_STEPS = 5


def measured_run(
    lines: Iterable[Mapping[str, Any]],
    ledger: Ledger | None = None,
    *,
    metered: Collection[int] = (),
    disturbed: Collection[int] = (),
    allocator_peak_nbytes: int | None = None,
    matmul_sums_nbytes: int = 0,
    device: str = "",
    torch_version: str = "",
    date: str = "",
    notes: tuple[str, ...] = (),
) -> Measured:
    """A run's measurement from the lines of its metrics file and the ledger of its metered step.

    The first steps of each session are warm-up and not steady; nor are ``metered`` steps, and ``disturbed``
    ones unless hardly any other is left. Where most are disturbed, the notes say so. The step time is of the last
    session that has steady steps: earlier ones may have run on another machine, or beside others.
    """
    steps: dict[int, _Step] = {}
    latest = 0  # the step that the last session with steady steps goes on from
    slow: dict[str, list[_Step]] = {"warm-up": [], "metering": []}
    phases: dict[str, float] = {}
    total, warm, begun, tokens = None, 0, 0, None
    for line in lines:
        for name, seconds in (line.get("phase_seconds") or {}).items():
            phases[name] = phases.get(name, 0.0) + seconds
        if line.get("event") in ("start", "resume"):
            warm, begun = WARM_UP_STEPS, line.get("step", 0)
        elif line.get("event") == "finish":
            total = line.get("seconds")
        elif "loss" in line and line.get("seconds") is not None:
            total, tokens = line.get("time", total), line["tokens"] / line["step"]
            step = line["seconds"], line.get("phase_seconds") or {}
            if warm:
                warm -= 1
                slow["warm-up"].append(step)
            elif line["step"] in metered:
                slow["metering"].append(step)
            else:
                steps[line["step"]] = step
                latest = begun
    every, steps = steps, {step: each for step, each in steps.items() if step > latest}
    quiet = [each for step, each in steps.items() if step not in disturbed]
    why = f"{BUSY}, or it ran below its full speed: {len(steps) - len(quiet)} of {len(steps)} steps were disturbed"
    if len(quiet) < min(len(steps), ENOUGH_STEPS):
        notes = (*notes, f"{why}, and the step time is that of all steps")
        quiet = list(steps.values())
    elif 2 * len(quiet) < len(steps):
        notes = (*notes, f"{why}; the step time is that of the others, which may be slowed too")
    times = spread((seconds for seconds, _ in quiet), discarded=len(steps) - len(quiet))
    steady = _middle_half(quiet)
    if sum(steady.values()) > 0:
        for unclocked in (each for each in chain(every.values(), *slow.values()) if not each[1]):
            for name, seconds in _split(unclocked, steady).items():
                phases[name] += seconds
        for name, some in slow.items():
            _set_apart(phases, (_split(each, steady) for each in some), steady, name)
    facts = summary(ledger) if ledger is not None else {}
    if tokens is not None:
        facts.setdefault("tokens_per_step", round(tokens))
    return Measured(
        **{
            **facts,
            "allocator_peak_nbytes": allocator_peak_nbytes,
            "matmul_sums_nbytes": matmul_sums_nbytes,
            "step_seconds": times,
            "step_seconds_by_phase": steady,
            "tokens_per_second": tokens / times.median if times and tokens else None,
            "total_seconds": total,
            "seconds_by_phase": phases,
        },
        device=device,
        torch_version=torch_version,
        date=date,
        notes=notes,
    )


def _middle_half(steps: list[_Step]) -> dict[str, float]:
    """Mean seconds by phase over the half of the steps around the median, which sum to about the median step."""
    ordered = sorted((step for step in steps if step[1]), key=lambda each: each[0])
    quarter = len(ordered) // 4
    middle = [split for _, split in ordered[quarter : len(ordered) - quarter]]
    names = dict.fromkeys(name for split in middle for name in split)
    return {name: sum(split.get(name, 0.0) for split in middle) / len(middle) for name in names}


def _split(step: _Step, steady: Mapping[str, float]) -> Mapping[str, float]:
    """A step's seconds by phase; of one that was not clocked, in the shares of a steady step."""
    seconds, clocked = step
    whole = sum(steady.values())
    return clocked or {name: seconds * of_phase / whole for name, of_phase in steady.items()}


def _set_apart(
    phases: dict[str, float], splits: Iterable[Mapping[str, float]], steady: Mapping[str, float], part: str
) -> None:
    """Move what some steps took longer than steady ones into a part of that name; sums stay."""
    for split in splits:
        longer = {name: seconds - steady.get(name, 0.0) for name, seconds in split.items()}
        if sum(longer.values()) > 0:
            for name, seconds in longer.items():
                phases[name] -= seconds
            phases[part] = phases.get(part, 0.0) + sum(longer.values())
