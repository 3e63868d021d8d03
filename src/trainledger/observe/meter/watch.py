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
        found = list(self._of_checkpoint(step))
        if self._steps <= WARM_UP:
            return found
        if len(self._recent) == WINDOW:
            self._before.append(self._recent[0])
        self._recent.append(step)
        whole = len(self._recent) == WINDOW
        if whole and not self._first:
            self._first = list(self._recent)
        if self._steps % EVERY:
            return found
        now: list[Finding] = []
        if whole:
            now += [*self._of_data(), *self._of_forecast(), *self._of_speed()]
            if self._steps % WINDOW == 0:
                now += self._of_memory()
        found += [each for each in now if each.name not in self._on]
        not_asked = {MEMORY_GROWS} if self._steps % WINDOW else set()
        self._on = {each.name for each in now} | self._on & not_asked
        return found

    def _of_checkpoint(self, step: Seen) -> Iterator[Finding]:
        self._since_checkpoint += step.seconds + sum(step.outside.values())
        took = step.outside.get("checkpoint", 0.0)
        if not took:
            return
        share, self._since_checkpoint = took / self._since_checkpoint, 0.0
        slow_before, self._slow_checkpoint = self._slow_checkpoint, share > CHECKPOINT_SHARE
        if slow_before or not self._slow_checkpoint:
            return
        speed = ""
        if step.saved_nbytes:
            speed = f", {format_nbytes(step.saved_nbytes)} at {format_nbytes(step.saved_nbytes / took)}/s"
        yield Finding(
            "slow checkpoint", step.step,
            f"The checkpoint before step {step.step} took {format_seconds(took)}{speed}, {format_percent(share)} of "
            "the time since the one before: write it to a faster disk, asynchronously, or less often.",
        )  # fmt: skip

    def _of_data(self) -> Iterator[Finding]:
        waits, seconds = self._median("data"), self._seconds(self._recent)
        if seconds and waits / seconds > DATA_SHARE:
            yield Finding(
                "slow data", self._recent[-1].step,
                f"Steps wait for their data: {format_seconds(waits)} of {format_seconds(seconds)} "
                f"({format_percent(waits / seconds)}): more workers of the loader, or tokens made before the run.",
            )  # fmt: skip

    def _of_forecast(self) -> Iterator[Finding]:
        if not self._expected:
            return
        seconds = self._seconds(self._recent)
        if seconds <= BAND * self._expected:
            return
        where = ""
        if self._expected_phases:
            more = {name: self._median(name) - each for name, each in self._expected_phases.items()}
            more |= {each: self._median(each) for each in self._recent[-1].phases if each not in more}
            most = max(more, key=lambda name: more[name])
            where = f"; {format_seconds(more[most])} of the difference lie in {most}"
        others = self._others()
        cause = (
            f"; other processes take {others:.1f} cores from this one" if others > OTHERS else self._slow_processor()
        )
        yield Finding(
            "slower than forecast", self._recent[-1].step,
            f"Steps take {format_seconds(seconds)}, {seconds / self._expected:.2f} times the "
            f"forecast{where}{cause}.",
        )  # fmt: skip

    def _of_speed(self) -> Iterator[Finding]:
        """Steps that are slower than at first; where other processes take the processor, that is the finding."""
        usual, now = self._seconds(self._first), self._seconds(self._recent)
        others = self._others()
        if others > OTHERS:
            longer = f", and steps take {now / usual:.2f} times as long as at first" if now > SLOWER * usual else ""
            yield Finding(
                "others on the processor", self._recent[-1].step,
                f"Since about step {self._recent[0].step} other processes take {others:.1f} cores from this "
                f"one{longer}.",
            )  # fmt: skip
        elif len(self._before) == WINDOW:
            first = sorted(each.seconds for each in self._first)
            least = max(SLOWER * usual, first[-1 - WINDOW // 10])
            if min(self._low(self._before), self._low(self._recent)) > least:
                yield self._slower(usual, now)

    def _slower(self, usual: float, now: float) -> Finding:
        more = {
            name: self._median(name) - median(each.phases.get(name, 0.0) for each in self._first)
            for name in self._recent[-1].phases
        }
        most = max(more, key=lambda name: more[name])
        return Finding(
            "slower than before", self._recent[-1].step,
            f"Since about step {self._before[0].step} steps take {format_seconds(now)}, {now / usual:.2f} times as "
            f"long as at first, most of it in {most} ({format_seconds(more[most])} more){self._slow_processor()}.",
        )  # fmt: skip

    def _others(self) -> float:
        """Cores that other processes take, as a median of the last window."""
        known = [each.others for each in self._recent if each.others is not None]
        return median(known) if known else 0.0

    def _slow_processor(self) -> str:
        """A cause of slow steps, where half of the last window was computed by a processor below its full speed."""
        known = [each.slowdown for each in self._recent if each.slowdown is not None]
        slowdown = median(known) if known else 1.0
        if slowdown <= SLOWER:
            return ""
        return (
            f"; the processor takes {slowdown:.2f} times as long as at its full speed for a small matmul "
            "(a core shared with another virtual machine, heat, a power limit)"
        )

    def _of_memory(self) -> Iterator[Finding]:
        known = [each.memory_nbytes for each in self._recent if each.memory_nbytes is not None]
        if not known:
            return
        self._memory.append(median(known))
        windows = list(self._memory)
        grown = [after - before for before, after in pairwise(windows)]
        if len(windows) < 4 or min(grown) < max(GROWTH * windows[-1], LEAST_GROWTH_NBYTES):
            return
        each = sum(grown) / len(grown) / WINDOW
        yield Finding(
            MEMORY_GROWS, self._recent[-1].step,
            f"Memory grows by {format_nbytes(round(each))} with each step, and is {format_nbytes(known[-1])} now.",
        )  # fmt: skip

    def _median(self, phase: str) -> float:
        return median(each.phases.get(phase, 0.0) for each in self._recent)

    @staticmethod
    def _low(steps: Sequence[Seen]) -> float:
        """What three of four of them exceed."""
        return sorted(each.seconds for each in steps)[len(steps) // 4]

    @staticmethod
    def _seconds(steps: Sequence[Seen]) -> float:
        return median(each.seconds for each in steps)


def slow_rank(seconds: Mapping[int, float], step: int) -> Finding | None:
    """A rank that computes longer than the others, from what each needs for a step without its waits for others."""
    if len(seconds) < 2:
        return None
    slowest = max(seconds, key=lambda rank: seconds[rank])
    others = median(each for rank, each in seconds.items() if rank != slowest)
    if others <= 0 or seconds[slowest] <= SLOW_RANK * others:
        return None
    return Finding(
        "slow rank", step,
        f"Rank {slowest} computes {format_seconds(seconds[slowest])} in a step, {seconds[slowest] / others:.2f} times "
        f"as long as the others ({format_seconds(others)}), which wait for it: look at its machine (clocks, heat, "
        "other programs) and at its share of the work.",
    )  # fmt: skip


class RankTimes:
    """The seconds that a rank computes, without waits for others, as a median over a window of steps."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._store = _store() if ranks > 1 else None
        self._own: deque[float] = deque(maxlen=WINDOW)
        self._asked: list[tuple[int, list[str]]] = []
        self._steps = 0
        self._slow = ""

    def exchange(self, step: int, phases: Mapping[str, float]) -> list[Finding]:
        """Take this rank's step; on the first rank, what is now known of all."""
        self._own.append(sum(each for name, each in phases.items() if name != GRADIENT_WAIT))
        self._steps += 1
        if self._store is None:
            return []
        if self._steps % WINDOW == 0:
            self._store.set(_key(step, self._rank), repr(median(self._own)))
            if self._rank == 0:
                self._asked.append((step, [_key(step, each) for each in range(self._ranks)]))
        return self._answered() if self._rank == 0 else []

    def _answered(self) -> list[Finding]:
        if not self._asked or self._store is None or not self._store.check(self._asked[0][1]):
            return []
        step, keys = self._asked.pop(0)
        found = slow_rank({rank: float(self._store.get(key)) for rank, key in enumerate(keys)}, step)
        for key in keys:
            self._store.delete_key(key)
        before, self._slow = self._slow, "" if found is None else found.sentence.split(" computes")[0]
        return [] if found is None or before == self._slow else [found]


def _key(step: int, rank: int) -> str:
    return f"trainledger/{step}/{rank}"


def _store() -> Any:
    """The store of the default group; None where this torch keeps it elsewhere."""
    from torch.distributed import distributed_c10d

    found = getattr(distributed_c10d, "_get_default_store", None)
    return None if found is None else found()
