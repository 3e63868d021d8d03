"""What a run was measured to do: the other half of a reconciliation, kept in the run's directory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainledger.ledger.entry import Ledger


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The middle of repeated samples and how far they lie apart (quartiles); ``discarded`` were disturbed."""

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


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A run as it was. Everything may be missing: a run may end before it was measured.

    Ledger amounts are those of one metered optimizer step: ``flops`` by kind, ``kept_nbytes`` of one
    micro-batch, the peak by category as dispatched operations showed it, and ``allocator_peak_nbytes`` as the
    allocator's own events did. ``step_seconds_by_phase`` are means over the middle half of the steady steps,
    ``seconds_by_phase`` sums over the run.
    """

    parameters: int | None = None
    tokens_per_step: int | None = None
    flops: dict[str, int] = field(default_factory=dict)
    model_flops: int | None = None
    kept_nbytes: int | None = None
    kept_by_kind: dict[str, int] = field(default_factory=dict)
    peak_nbytes: int | None = None
    peak_by_category: dict[str, int] = field(default_factory=dict)
    allocator_peak_nbytes: int | None = None
    step_seconds: Spread | None = None
    step_seconds_by_phase: dict[str, float] = field(default_factory=dict)
    tokens_per_second: float | None = None
    total_seconds: float | None = None
    seconds_by_phase: dict[str, float] = field(default_factory=dict)
    device: str = ""
    torch_version: str = ""
    date: str = ""
    notes: tuple[str, ...] = ()


WARM_UP_STEPS = 2


def measured_run(
    lines: Iterable[Mapping[str, Any]],
    ledger: Ledger | None = None,
    *,
    leave_out: Collection[int] = (),
    allocator_peak_nbytes: int | None = None,
    device: str = "",
    torch_version: str = "",
    date: str = "",
    notes: tuple[str, ...] = (),
) -> Measured:
    """A run's measurement from the lines of its metrics file and the ledger of its metered step.

    The first steps of each sitting are warm-up and not steady; nor are those in ``leave_out`` (metered ones,
    disturbed ones).
    """
    steps, phases, total, warm, tokens = [], dict[str, float](), None, 0, None
    for line in lines:
        for name, seconds in (line.get("phase_seconds") or {}).items():
            phases[name] = phases.get(name, 0.0) + seconds
        if line.get("event") in ("start", "resume"):
            warm = WARM_UP_STEPS
        elif line.get("event") == "finish":
            total = line.get("seconds")
        elif isinstance(line.get("seconds"), int | float) and "loss" in line:
            total, tokens = line.get("time", total), line["tokens"] / line["step"]
            if warm:
                warm -= 1
            elif line["step"] not in leave_out:
                steps.append((line["seconds"], line.get("phase_seconds") or {}))
    times = spread((seconds for seconds, _ in steps), discarded=len(leave_out))
    facts = ledger_facts(ledger) if ledger is not None else {}
    if tokens is not None:
        facts.setdefault("tokens_per_step", round(tokens))
    return Measured(
        **{
            **facts,
            "allocator_peak_nbytes": allocator_peak_nbytes,
            "step_seconds": times,
            "step_seconds_by_phase": _middle_half(steps, times),
            "tokens_per_second": tokens / times.median if times and tokens else None,
            "total_seconds": total,
            "seconds_by_phase": phases,
        },
        device=device,
        torch_version=torch_version,
        date=date,
        notes=notes,
    )


def _middle_half(steps: list[tuple[float, dict[str, float]]], times: Spread | None) -> dict[str, float]:
    """Mean seconds by phase over the steps between the quartiles, which sum to about the median step."""
    if times is None:
        return {}
    middle = [split for seconds, split in steps if times.low <= seconds <= times.high and split]
    names = dict.fromkeys(name for split in middle for name in split)
    return {name: sum(split.get(name, 0.0) for split in middle) / len(middle) for name in names}


def ledger_facts(ledger: Ledger) -> dict[str, Any]:
    """The fields of `Measured` (and of a forecast) that a step's ledger holds."""
    peak = ledger.peak()
    kept = ledger.filter(lambda each: bool(each.kept)).by("kind", "kept")
    return {
        "parameters": ledger.parameters,
        "tokens_per_step": ledger.tokens,
        "flops": {kind: flops for kind, flops in ledger.by("kind").items() if flops},
        "model_flops": ledger.model_flops,
        "kept_nbytes": ledger.kept_nbytes,
        "kept_by_kind": {kind: nbytes // ledger.micro_batches for kind, nbytes in kept.items()},
        "peak_nbytes": peak.nbytes,
        "peak_by_category": dict(peak.by_category),
    }
