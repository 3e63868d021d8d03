"""The traces of several ranks of one program: who waits for whom in their collectives.

A collective's kernel runs from when its rank is there until all are done. So of one collective the rank whose kernel is
shortest came last, and what the others' kernels run longer they waited for it. Nothing is compared across ranks but
lengths, as their clocks differ.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np

from trainledger.observe.profiler.causes import MeasuredBar, measured_waterfall
from trainledger.observe.profiler.kinds import OTHERS, SENDS, payload_nbytes
from trainledger.observe.profiler.profile import Profile, profile_and_timeline
from trainledger.observe.profiler.read import Advance, read_profile
from trainledger.observe.profiler.recording import Intervals, common, length, merged
from trainledger.observe.profiler.step_time import EXPOSED, Timeline, moments_of, pieces_of
from trainledger.observe.profiler.step_work import exposed_by_kind
from trainledger.observe.profiler.steps import Step
from trainledger.report.document import Answer
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import format_count, format_percent, format_seconds

Ends = Mapping[object, int]  # when each collective ended, by what tells that it is the same one on several ranks
WAITS = "waiting for other ranks"  # of exposed communication, what waits for the rank that comes last


@dataclass(frozen=True)
class RankRow:
    """A rank's step: when it began after the first rank's, and how long each part has of each equal piece of it.

    The parts are those of a step (`step_time.ORDER`), but that `WAITS` stands apart from exposed communication.
    """

    rank: int
    begin_ns: int
    nanoseconds: int
    pieces_ns: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class RankTimeline:
    """One step of several ranks; ``is_aligned`` says whether their clocks are set by collectives that they share.

    Else all rows begin at 0.
    """

    step: str
    rows: tuple[RankRow, ...]
    is_aligned: bool


# Each rank's clock is its own. As a collective ends on all ranks at once, the ends of those that two ranks have in
# common say how far their clocks are apart.
def clocks_ahead_ns(ends: Sequence[Ends]) -> list[int | None]:
    """How far the clock of each rank is ahead of the first one's; None where no collective leads from one to the other.

    >>> clocks_ahead_ns([{"sum": 10, "gather": 20}, {"sum": 110, "gather": 120, "tensor": 7}, {"tensor": 5}, {}])
    [0, 100, 98, None]
    """
    ahead: dict[int, int] = {0: 0}
    reached = [0] if ends else []
    while reached:
        known = reached.pop()
        for at, own in enumerate(ends):
            apart = [own[each] - ends[known][each] for each in own if each in ends[known]] if at not in ahead else []
            if apart:
                ahead[at] = ahead[known] + median_low(apart)
                reached.append(at)
    return [ahead.get(at) for at in range(len(ends))]


def rank_timeline(
    step: str, ranks: Sequence[tuple[int, tuple[int, int], Mapping[str, tuple[int, ...]]]], ahead: Sequence[int | None]
) -> RankTimeline:
    """The rows of ranks: of each its number, the beginning and the end of its step, and its pieces."""
    is_aligned = len(ranks) > 1 and all(each is not None for each in ahead)
    begins = [begin - (clock or 0) if is_aligned else 0 for (_, (begin, _), _), clock in zip(ranks, ahead, strict=True)]
    first = min(begins, default=0)
    rows = tuple(
        RankRow(rank, at - first, end - begin, pieces)
        for (rank, (begin, end), pieces), at in zip(ranks, begins, strict=True)
    )
    return RankTimeline(step, rows, is_aligned)


_ONE_FOR_ALL = ("broadcast", SENDS, OTHERS)  # kinds in which the shortest kernel is not that of the last rank
_WORTH_A_NAME = 0.02  # of a step, that the others wait for one rank
_NANO = 1e9
_DRAWN, _PIECES = 16, 240  # the last steps of a rank, one of which is drawn, and in how many pieces

Waits = list[dict[str, list[tuple[int, int]]]]  # of each rank, by step: from when until when
Key = tuple[Any, ...]  # what a collective is, its group, and which one of its kind in the step


@dataclass(frozen=True)
class RankProfile:
    """The profile of one rank, and what it waited for others in the steps that all ranks have (nanoseconds).

    ``waited_ns`` is by step and by kind of collective, and lies in exposed communication; ``caused_ns`` is what all
    others waited in collectives to which this rank came last, in all such steps; ``last`` is how many of the
    ``compared`` those were. ``waiting_ns`` is all that it waited itself in those steps, beside computation too.
    """

    rank: int
    profile: Profile
    waited_ns: Mapping[str, Mapping[str, int]]
    caused_ns: int
    last: int
    compared: int
    waiting_ns: int = 0

    @property
    def step_ns(self) -> int:
        """Its median step."""
        return self.profile.step.nanoseconds

    @property
    def waited_in_median_ns(self) -> Mapping[str, int]:
        """What it waited in its median step, by kind of collective; nothing where other ranks do not have that."""
        return self.waited_ns.get(self.profile.step.step.name, {})

    @property
    def waits_ns(self) -> int:
        """The same of all kinds."""
        return sum(self.waited_in_median_ns.values())

    @property
    def own_ns(self) -> int:
        """Its median step without what it waits in it for other ranks: its own work, and its own gaps."""
        return self.step_ns - self.waits_ns

    @property
    def waterfall(self) -> tuple[MeasuredBar, ...]:
        """The bars of its median step, with what it waits for the slowest rank as one of them."""
        profile, waited = self.profile, self.waited_in_median_ns
        return measured_waterfall(
            profile.step, profile.split, profile.matmuls, profile.peaks, waiting_for_others_ns=waited
        )


@dataclass(frozen=True)
class Ranks(Answer, report="pages.profile_ranks"):
    """The traces of several ranks; ``steps`` are the names of those that all of them have.

    ``timeline`` is of the median of these steps (of the last `_DRAWN` ones), by its longest rank.
    """

    path: str
    ranks: tuple[RankProfile, ...]
    steps: tuple[str, ...]
    doubts: tuple[str, ...] = ()
    timeline: RankTimeline | None = None

    @property
    def step_ns(self) -> int:
        """The median step of the rank in the middle."""
        return median_low(rank.step_ns for rank in self.ranks)

    @property
    def own_ns(self) -> int:
        """The median over ranks of their steps without what they wait for each other."""
        return median_low(rank.own_ns for rank in self.ranks)

    @property
    def slowest(self) -> RankProfile | None:
        """The rank with the longest step without its waits; None where that is within a fiftieth of the median."""
        longest = max(self.ranks, key=lambda rank: rank.own_ns)
        return longest if longest.own_ns - self.own_ns > _WORTH_A_NAME * self.step_ns else None

    @property
    def stragglers(self) -> tuple[RankProfile, ...]:
        """Ranks that each of the others waits for, by a fiftieth of a step longer than they wait themselves."""
        least, steps = _WORTH_A_NAME * self.step_ns, max(len(self.steps), 1)
        late = (rank for rank in self.ranks if self.costs_of_a_step_ns(rank) - rank.waiting_ns / steps > least)
        return tuple(sorted(late, key=lambda rank: -rank.caused_ns))

    @property
    def by_turns(self) -> str:
        """A sentence where ranks wait for each other and none of them is the slow one; else empty."""
        waits = sum(rank.waiting_ns for rank in self.ranks) / max(len(self.ranks), 1) / max(len(self.steps), 1)
        if self.stragglers or waits <= _WORTH_A_NAME * self.step_ns:
            return ""
        share = format_percent(waits / max(self.step_ns, 1))
        return (
            f"Ranks wait {format_seconds(waits / _NANO)} of a step for each other, {share}, and by turns: none of "
            "them is slower than the others on the average. Their work differs from step to step, or other programs "
            "take turns on their hosts."
        )

    def costs_of_a_step_ns(self, rank: RankProfile) -> float:
        """What each of the others waits for a rank in a step, on the average."""
        return rank.caused_ns / max(len(self.ranks) - 1, 1) / max(len(self.steps), 1)

    def said_of(self, straggler: RankProfile) -> str:
        """A sentence on a rank that the others wait for."""
        each_ns = self.costs_of_a_step_ns(straggler)
        return (
            f"Rank {straggler.rank} came last to {format_count(straggler.last)} of {format_count(straggler.compared)} "
            f"collectives: each of the others waited {format_seconds(each_ns / _NANO)} of a step for it, "
            f"{format_percent(each_ns / max(self.step_ns, 1))}. Look at what this rank does in that time (its host, "
            "its data, the work it has, its device's clock)."
        )


@dataclass(frozen=True)
class _SeenStep:
    """A step of a rank: the beginning and the end of each collective, and exposed communication by kind.

    ``pieces_ns`` are how long each part has of each of `_PIECES` equal pieces; empty where the step is not drawn.
    """

    step: Step
    collectives: Mapping[Key, tuple[int, int]]
    exposed: Mapping[str, Intervals]
    pieces_ns: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Seen:
    """A rank as it was read: its profile and its steps by name."""

    rank: int
    profile: Profile
    steps: Mapping[str, _SeenStep]


def trace_files(folder: str | os.PathLike[str]) -> list[Path]:
    """The traces in a directory, by name; raises `InvalidInput` where there are none."""
    paths = sorted(path for path in Path(folder).iterdir() if path.name.endswith((".json", ".json.gz")))
    if not paths:
        rule = "has no traces (*.json, *.json.gz); name a file, or the directory that profilers of all ranks wrote to"
        raise InvalidInput([Problem("--trace", str(folder), rule)])
    return paths


def ranks_of(
    folder: str | os.PathLike[str],
    advance: Advance = lambda nbytes: None,
    say: Callable[[str], None] = lambda name: None,
) -> Ranks:
    """What the traces in a directory say, read one after the other; raises `InvalidInput` as `read_profile` does.

    ``say`` hears the name of each file as it is read.
    """
    seen = []
    for at, file in enumerate(trace_files(folder)):
        say(file.name)
        seen.append(_seen(file, at, advance))
    return _compared(sorted(seen, key=lambda each: each.rank), Path(folder).name)


def _seen(path: Path, at: int, advance: Advance) -> _Seen:
    """What one trace says; its events are gone with this call."""
    recording = read_profile(path, advance)
    profile, times, steps = profile_and_timeline(recording, path.name)
    rank = at if recording.rank is None else recording.rank
    drawn = {step.name for step in steps.steps[-_DRAWN:]}
    return _Seen(rank, profile, {step.name: _of_step(times, step, step.name in drawn) for step in steps.steps})


def _of_step(times: Timeline, step: Step, is_drawn: bool) -> _SeenStep:
    sent, counted, ran = times.sent, Counter[Key](), {}
    for at in sent.between(*step.device_ns):
        kind, message = sent.kinds[at], sent.messages[at]
        if kind not in _ONE_FOR_ALL:
            what: Key = (kind,) if message is None else (kind, message.ranks, message.group, payload_nbytes(message))
            counted[what] += 1
            ran[*what, counted[what]] = int(sent.spans.begins_ns[at]), int(sent.spans.ends_ns[at])
    moments = moments_of(times, step)
    pieces = pieces_of(moments, step, _PIECES) if is_drawn else {}
    return _SeenStep(step, ran, exposed_by_kind(times, step, moments[EXPOSED]), pieces)


def _compared(seen: Sequence[_Seen], path: str) -> Ranks:
    """Who waited for whom, in the steps and the collectives that ranks have in common."""
    steps = [name for name in (seen[0].steps if seen else ()) if all(name in rank.steps for rank in seen)]
    waits: Waits = [{name: [] for name in steps} for _ in seen]
    caused, last, compared, waiting = ([0] * len(seen) for _ in range(4))
    ends: list[dict[object, int]] = [{} for _ in seen]
    for name in steps:
        ran = [rank.steps[name].collectives for rank in seen]
        for key in dict.fromkeys(key for own in ran for key in own):
            spans = {at: own[key] for at, own in enumerate(ran) if key in own}
            if len(spans) < 2 or not _one_group(key, len(spans)):
                continue
            slowest = min(spans, key=lambda at: spans[at][1] - spans[at][0])
            shortest = spans[slowest][1] - spans[slowest][0]
            last[slowest] += 1
            for at, (begin, end) in spans.items():
                ends[at][name, key] = end
                compared[at] += 1
                waits[at][name].append((begin, end - shortest))
                waiting[at] += end - begin - shortest
                caused[slowest] += end - begin - shortest
    ranks = []
    for at, rank in enumerate(seen):
        waited = {name: _exposed(waits[at][name], rank.steps[name].exposed) for name in steps}
        ranks.append(RankProfile(rank.rank, rank.profile, waited, caused[at], last[at], compared[at], waiting[at]))
    drawn = _timeline(seen, steps, waits, clocks_ahead_ns(ends))
    return Ranks(path, tuple(ranks), tuple(steps), tuple(_doubts(seen, steps, compared)), drawn)


def _timeline(
    seen: Sequence[_Seen], steps: Sequence[str], waits: Waits, ahead: Sequence[int | None]
) -> RankTimeline | None:
    """The median of the steps that all ranks have in pieces, by its longest rank."""
    drawn = [name for name in steps if all(rank.steps[name].pieces_ns for rank in seen)]
    if not drawn:
        return None
    drawn.sort(key=lambda name: max(rank.steps[name].step.nanoseconds for rank in seen))
    name = drawn[(len(drawn) - 1) // 2]
    rows = []
    for rank, waiting in zip(seen, waits, strict=True):
        own = rank.steps[name]
        of_others = common(_moments(waiting[name]), merged(*own.exposed.values()))
        pieces = dict(own.pieces_ns) | pieces_of({WAITS: of_others}, own.step, _PIECES)
        pieces[EXPOSED] = tuple(max(a - b, 0) for a, b in zip(pieces[EXPOSED], pieces[WAITS], strict=True))
        rows.append((rank.rank, own.step.device_ns, pieces))
    return rank_timeline(name, rows, ahead)


def _one_group(key: Key, count: int) -> bool:
    """Whether ranks that ran a collective of this kind ran the same one: known by its group, or as all ran it."""
    if len(key) == 2:  # nothing is said of it
        return True
    _, ranks, group, *_ = key
    return bool(group) or ranks in (0, count)


def _exposed(waits: list[tuple[int, int]], exposed: Mapping[str, Intervals]) -> dict[str, int]:
    """How much of some waiting lies in the exposed communication of each kind."""
    waiting = _moments(waits)
    return {kind: nanoseconds for kind, own in exposed.items() if (nanoseconds := length(common(waiting, own)))}


def _moments(waits: list[tuple[int, int]]) -> Intervals:
    return merged(np.array(waits, dtype=np.int64).reshape(-1, 2))


def _doubts(seen: Sequence[_Seen], steps: Sequence[str], compared: Sequence[int]) -> Iterator[str]:
    if not steps:
        yield "The ranks have no step of the same number: who waited for whom cannot be said."
    elif not any(compared):
        yield (
            "No collective is known to be the same on several ranks (their groups are not recorded): who waited for "
            "whom cannot be said."
        )
    if len({rank.rank for rank in seen}) < len(seen):
        yield "Several traces are of the same rank, or do not say which one they are of: they are told apart by name."
    most = max((rank.profile.ranks or 0 for rank in seen), default=0)
    if most > len(seen):
        yield f"{len(seen)} of {most:,} ranks have traces here: one without a trace may be the slowest."
