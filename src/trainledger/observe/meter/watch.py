"""What leaves the usual in a run, said at once and with its likely cause: a finding is a sentence about some steps.

Values are compared by medians of a window of steps: with the forecast, with the first whole window of the run, with
other ranks. A finding is said when it begins, and again only after it was over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import torch.distributed as dist

from trainledger.observe.meter.phases import GRADIENT_WAIT
from trainledger.spec.units import format_nbytes, format_percent, format_seconds

WINDOW = 20  # steps
EVERY = 5  # steps between two looks: medians take longer than everything else
WARM_UP = 3  # first steps that are slower for their own reasons
DATA_SHARE = 0.10  # of a step that waits for data
CHECKPOINT_SHARE = 0.05  # of the time since the checkpoint before
SLOWER = 1.15  # than at first, in three of four steps of two windows, and beyond nine of ten of the first window
BAND = 1.25  # times the forecast: step times of unseen sources are within it in four of five cases
OTHERS = 0.25  # of a core that other processes take
GROWTH = 0.01  # of the memory, from window to window: less is noise of allocators
LEAST_GROWTH_NBYTES = 4 << 20
SLOW_RANK = 1.10  # times the median of the ranks
MEMORY_GROWS = "memory grows"  # asked once in a window


_KEY = "trainledger"  # of what ranks write to their store


@dataclass(frozen=True)
class Seen:
    """A step as the watch sees it; what is unknown is None. ``outside`` are seconds of evaluation and checkpoints."""

    step: int
    seconds: float
    phases: Mapping[str, float]
    memory_nbytes: int | None = None
    others: float | None = None  # cores that other processes took
    outside: Mapping[str, float] = field(default_factory=dict)
    saved_nbytes: int | None = None
    slowdown: float | None = None  # how many times as long the processor takes as at its full speed


@dataclass(frozen=True)
class Finding:
    """Something out of the ordinary: its name, the step at which it was seen, and a sentence."""

    name: str
    step: int
    sentence: str


class Watch:
    """Sees each step of a run. ``expected_seconds`` are those of the forecast's step, None where there is none."""

    def __init__(self, expected_seconds: float | None = None, expected_phases: Mapping[str, float] | None = None):
        self._expected, self._expected_phases = expected_seconds, dict(expected_phases or {})
        self._recent: deque[Seen] = deque(maxlen=WINDOW)
        self._before: deque[Seen] = deque(maxlen=WINDOW)  # the window before that one
        self._first: list[Seen] = []
        self._memory: deque[float] = deque(maxlen=4)  # medians of windows that follow each other
        self._steps = 0
        self._since_checkpoint, self._slow_checkpoint = 0.0, False
        self._on: set[str] = set()

    def see(self, step: Seen) -> list[Finding]:
        """What begins with this step."""
        self._steps += 1
        findings = list(self._of_checkpoint(step))
        if self._steps <= WARM_UP:
            return findings
        if len(self._recent) == WINDOW:
            self._before.append(self._recent[0])
        self._recent.append(step)
        whole = len(self._recent) == WINDOW
        if whole and not self._first:
            self._first = list(self._recent)
        if self._steps % EVERY:
            return findings
        now = dict(self._findings()) if whole else {}
        findings += [Finding(name, step.step, sentence) for name, sentence in now.items() if name not in self._on]
        not_asked = {MEMORY_GROWS} if self._steps % WINDOW else set()
        self._on = {*now} | self._on & not_asked
        return findings

    def _of_checkpoint(self, step: Seen) -> Iterator[Finding]:
        self._since_checkpoint += step.seconds + sum(step.outside.values())
        took = step.outside.get("checkpoint", 0.0)
        if not took:
            return
        share, self._since_checkpoint = took / self._since_checkpoint, 0.0
        slow_before, self._slow_checkpoint = self._slow_checkpoint, share > CHECKPOINT_SHARE
        if slow_before or not self._slow_checkpoint:
            return
        saved = step.saved_nbytes
        speed = f", {format_nbytes(saved)} at {format_nbytes(saved / took)}/s" if saved else ""
        sentence = (
            f"The checkpoint before step {step.step} took {format_seconds(took)}{speed}, {format_percent(share)} of "
            "the time since the one before: write it to a faster disk, asynchronously, or less often."
        )
        yield Finding("slow checkpoint", step.step, sentence)

    def _findings(self) -> Iterator[tuple[str, str]]:
        """Names and sentences of what is out of the ordinary in the last window; memory is asked once in a window."""
        seconds, waits = self._seconds(self._recent), self._median("data")
        if seconds and waits / seconds > DATA_SHARE:
            yield (
                "slow data",
                f"Steps wait for their data: {format_seconds(waits)} of {format_seconds(seconds)} "
                f"({format_percent(waits / seconds)}): more workers of the loader, or tokens made before the run.",
            )
        others, since = self._known("others", 0.0), self._recent[0].step
        if self._expected and seconds > BAND * self._expected:
            where = ""
            if self._expected_phases:
                expected = dict.fromkeys(self._recent[-1].phases, 0.0) | self._expected_phases
                where = f"; {self._most(expected)[1]} of the difference lie in {self._most(expected)[0]}"
            crowded = f"; other processes take {others:.1f} cores from this one"
            cause = crowded if others > OTHERS else self._slow_processor()
            times = f"{seconds / self._expected:.2f} times the forecast"
            yield "slower than forecast", f"Steps take {format_seconds(seconds)}, {times}{where}{cause}."
        usual = self._seconds(self._first)
        # Where other processes take the processor, that is the finding, and not that steps are slower than at first.
        if others > OTHERS:
            longer = (
                f", and steps take {seconds / usual:.2f} times as long as at first" if seconds > SLOWER * usual else ""
            )
            who = f"other processes take {others:.1f} cores from this one"
            yield "others on the processor", f"Since about step {since} {who}{longer}."
        elif len(self._before) == WINDOW:
            first = sorted(step.seconds for step in self._first)
            if min(self._low(self._before), self._low(self._recent)) > max(SLOWER * usual, first[-1 - WINDOW // 10]):
                before = {
                    name: median(step.phases.get(name, 0.0) for step in self._first) for name in self._recent[-1].phases
                }
                phase, more = self._most(before)
                yield (
                    "slower than before",
                    f"Since about step {self._before[0].step} steps take {format_seconds(seconds)}, "
                    f"{seconds / usual:.2f} times as long as at first, most of it in {phase} ({more} more)"
                    f"{self._slow_processor()}.",
                )
        if self._steps % WINDOW == 0:
            yield from self._of_memory()

    def _of_memory(self) -> Iterator[tuple[str, str]]:
        known = [step.memory_nbytes for step in self._recent if step.memory_nbytes is not None]
        if not known:
            return
        self._memory.append(median(known))
        grown = [after - before for before, after in pairwise(self._memory)]
        if len(grown) == 3 and min(grown) >= max(GROWTH * self._memory[-1], LEAST_GROWTH_NBYTES):
            more = format_nbytes(round(sum(grown) / len(grown) / WINDOW))
            yield MEMORY_GROWS, f"Memory grows by {more} with each step, and is {format_nbytes(known[-1])} now."

    def _most(self, before: Mapping[str, float]) -> tuple[str, str]:
        """The phase that takes longer than before by most, and by how much."""
        more = {name: self._median(name) - seconds for name, seconds in before.items()}
        most = max(more, key=lambda name: more[name])
        return most, format_seconds(more[most])

    def _known(self, name: str, otherwise: float) -> float:
        """The median of a fact over the last window, of the steps where it is known."""
        known = [value for step in self._recent if (value := getattr(step, name)) is not None]
        return median(known) if known else otherwise

    def _slow_processor(self) -> str:
        """A cause of slow steps, where half of the last window was computed by a processor below its full speed."""
        slowdown = self._known("slowdown", 1.0)
        if slowdown <= SLOWER:
            return ""
        return (
            f"; the processor takes {slowdown:.2f} times as long as at its full speed for a small matmul "
            "(a core shared with another virtual machine, heat, a power limit)"
        )

    def _median(self, phase: str) -> float:
        return median(step.phases.get(phase, 0.0) for step in self._recent)

    @staticmethod
    def _low(steps: Sequence[Seen]) -> float:
        """What three of four of them exceed."""
        return sorted(step.seconds for step in steps)[len(steps) // 4]

    @staticmethod
    def _seconds(steps: Sequence[Seen]) -> float:
        return median(step.seconds for step in steps)


def slow_rank(seconds: Mapping[int, float], step: int) -> Finding | None:
    """A rank that computes longer than the others, from what each needs for a step without its waits for others."""
    if len(seconds) < 2:
        return None
    slowest = max(seconds, key=lambda rank: seconds[rank])
    others = median(each for rank, each in seconds.items() if rank != slowest)
    if others <= 0 or seconds[slowest] <= SLOW_RANK * others:
        return None
    sentence = (
        f"Rank {slowest} computes {format_seconds(seconds[slowest])} in a step, {seconds[slowest] / others:.2f} times "
        f"as long as the others ({format_seconds(others)}), which wait for it: look at its machine (clocks, heat, "
        "other programs) and at its share of the work."
    )
    return Finding("slow rank", step, sentence)


# Ranks tell the first what they compute through the store that they began with. No collective is called, so nothing can
# wait: what has not come yet is looked for again at the next step.
class RankTimes:
    """The seconds that a rank computes, without waits for others, as a median over a window of steps."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        # The store of the default group; None where this torch keeps it elsewhere.
        stored = getattr(getattr(dist, "distributed_c10d", None), "_get_default_store", None)
        self._store: Any = stored() if ranks > 1 and stored is not None else None
        self._own: deque[float] = deque(maxlen=WINDOW)
        self._asked: list[tuple[int, list[str]]] = []
        self._steps = 0
        self._slow = ""

    def exchange(self, step: int, phases: Mapping[str, float]) -> list[Finding]:
        """Take this rank's step; on the first rank, what is now known of all."""
        self._own.append(sum(phase for name, phase in phases.items() if name != GRADIENT_WAIT))
        self._steps += 1
        if self._store is None:
            return []
        if self._steps % WINDOW == 0:
            self._store.set(f"{_KEY}/{step}/{self._rank}", repr(median(self._own)))
            if self._rank == 0:
                self._asked.append((step, [f"{_KEY}/{step}/{rank}" for rank in range(self._ranks)]))
        return self._answered() if self._rank == 0 else []

    def _answered(self) -> list[Finding]:
        if not self._asked or self._store is None or not self._store.check(self._asked[0][1]):
            return []
        step, keys = self._asked.pop(0)
        finding = slow_rank({rank: float(self._store.get(key)) for rank, key in enumerate(keys)}, step)
        for key in keys:
            self._store.delete_key(key)
        before, self._slow = self._slow, "" if finding is None else finding.sentence.split(" computes")[0]
        return [] if finding is None or before == self._slow else [finding]
