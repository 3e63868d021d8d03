"""What breaks first, second and third when one size of a run grows, and at which value; apart from it, what warns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from trainledger.forecast.plan.edges import first_failing, straight
from trainledger.forecast.plan.limits import (
    LIMITS,
    LOGITS,
    MEMORY,
    POSITIONS,
    Judge,
    Limit,
    Limits,
    Reading,
    comparison,
    remedy,
)
from trainledger.forecast.plan.other_layouts import ContextRanks, Planner, context_ranks, following, longer_model
from trainledger.forecast.plan.sizes import AXES, Sweep, grow
from trainledger.forecast.predict.predict import predict
from trainledger.forecast.predict.roofline import Machine
from trainledger.forecast.predict.run import too_few
from trainledger.report.document import Answer
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run
from trainledger.spec.run_text import found_layout, layout_overrides, overrides

REACH = 64
MOST = 3
RULE = "divisibility"
_NEAR, _SAMPLES = 32, 8  # values just before an edge, and all the way to it, at which a share is computed again


@frozen(kw_only=True)
class Break:
    """Where a limit is passed: the run keeps it at ``holds`` and no longer at ``breaks``, the next possible value.

    ``holds`` is 0 where the planned run does not keep it; then there is no ``axis``. ``planned``, ``before`` and
    ``after`` are what is compared with ``most``: as planned, at ``holds`` and at ``breaks``; None where a rule of the
    run file is broken, named in ``why``. ``changes`` lead from the planned run to the one at ``breaks``, as ``--set``
    takes them. ``cure`` is the context-parallel layout that keeps the limit at ``breaks``, where a sequence grew and
    there is one. Beyond one that only ``warns`` a run works as well as before.
    """

    limit: str = RULE
    axis: str = ""
    field: str = ""
    start: int = 1
    holds: int = 0
    breaks: int = 1
    unit: str = ""
    planned: float | None = None
    before: float | None = None
    after: float | None = None
    most: float | None = None
    why: str
    remedy: str
    basis: str = "exact"
    source: str = "the rules of the run file"
    changes: tuple[str, ...] = ()
    cure: ContextRanks | None = None
    warns: bool = False

    @property
    def factor(self) -> float:
        """How much larger than planned."""
        return self.breaks / self.start


@frozen
class Along:
    """What breaks along one axis, the first first; ``reached`` is the largest value that was looked at.

    ``warnings`` are marks that are passed on the way to the last break, beyond which the run works as well as before.
    ``grid``: not all values between them were looked at, as the layout follows the size.
    ``layout`` is what the run has of another layout, as ``--set`` takes it, where the layout follows the size: at
    ``laid_out``, the largest value that was looked at and fits in memory.
    """

    axis: str
    field: str
    start: int
    reached: int
    carries: str
    breaks: tuple[Break, ...]
    warnings: tuple[Break, ...] = ()
    layout: tuple[str, ...] = ()
    laid_out: int = 0
    grid: bool = False


@frozen
class Breaks(Answer, report="breaks"):
    """What breaks along each axis; ``already`` is broken as planned, ``unknown`` cannot be judged.

    ``warnings`` are marks that the planned run is beyond; it runs as well as others.
    """

    run: Run
    along: tuple[Along, ...]
    already: tuple[Break, ...]
    warnings: tuple[Break, ...]
    unknown: tuple[str, ...]

    def __repr__(self) -> str:
        first = [f"{each.limit} as planned" for each in self.already] + [
            f"{along.axis}: {along.breaks[0].limit} at {along.breaks[0].breaks:,}"
            for along in self.along
            if along.breaks
        ]
        return f"Breaks({self.run.model.name}; {'; '.join(first) or 'nothing breaks'})"


def breaks(
    run: Run,
    machine: Machine | None,
    *,
    backend: str,
    axes: Sequence[str] = AXES,
    limits: Limits = Limits(),  # noqa: B008  # frozen
    reach: int = REACH,
    most: int = MOST,
    keep_tokens: bool = True,
    planner: Planner | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Breaks:
    """The first ``most`` limits that are passed along each axis, up to ``reach`` times the planned value.

    Each edge is exact: of the values that the run's layout and batch can be divided by, ``holds`` is the last that
    keeps the limit before one does not. With a ``planner``, which gives a run the layout that it searches for (None:
    none fits), the layout follows the size wherever the one before passes a limit, on a grid of values. Longer
    sequences keep the tokens of a step unless ``keep_tokens`` is off. ``say`` is called with what is being looked at.
    Raises InvalidInput for an axis that is none of `AXES`.
    """
    unknown = [each for each in axes if each not in AXES]
    if unknown:
        rule = f"must be one of {', '.join(AXES)}"
        raise InvalidInput([Problem("along", name, rule, nearest_text(str(name), AXES)) for name in unknown])
    limits = replace(limits, positions=run.model.max_seq_len)
    forecast = cache(partial(predict, machine=machine, backend=backend))
    planned = Judge(LIMITS, limits, forecast).readings(run)
    already = [(limit, found) for limit in LIMITS if (found := planned[limit.name]) is not None and not found.holds]
    kept = [limit for limit in LIMITS if (found := planned[limit.name]) is not None and found.holds]
    along = []
    for axis in axes:
        say(axis)
        # A longer run has the same steps: no forecast is needed.
        of_axis = [limit for limit in kept if axis != "dataset" or not limit.needs_forecast]
        judge = Judge(of_axis, limits, forecast)
        sweep = grow(run, axis, reach, keep_tokens=keep_tokens)
        if planner is not None and axis != "dataset":
            sweep = following(run, axis, reach, keep_tokens, planner, judge)
        along.append(_Walk(run, axis, sweep, judge, planned, cure=planner is None).along(most))
    few = too_few(run) if run.cluster.count > 1 else None
    passed = [_of_limit(limit, reading, comparison(limit, run), remedy(limit, run)) for limit, reading in already]
    broken = [each for each in passed if not each.warns]
    return Breaks(
        run=run,
        along=tuple(along),
        already=tuple(broken if few is None else [_not_spread(few), *broken]),
        warnings=tuple(each for each in passed if each.warns),
        unknown=tuple(limit.name for limit in LIMITS if planned[limit.name] is None),
    )


class _Walk:
    """Goes along one axis: in large steps until enough limits are passed, then finds the edge of each."""

    def __init__(
        self, run: Run, axis: str, sweep: Sweep, judge: Judge, planned: dict[str, Reading | None], *, cure: bool
    ) -> None:
        self.run, self.axis, self.sweep, self.judge, self.planned, self.cure = run, axis, sweep, judge, planned, cure
        self._warnings = {limit.name for limit in judge.of if limit.warns}
        self._at = cache(sweep.at)
        self._problem = cache(lambda index: next(run_problems(self._at(index)), None))

    def along(self, most: int) -> Along:
        values = self.sweep.values
        edges: dict[str, tuple[int, int]] = {}  # limit -> the last index known to hold, one known not to
        before = reached = 0
        ruled_out: int | None = None
        for index in self._ladder():
            if self._problem(index) is not None:
                ruled_out = first_failing(lambda each: self._problem(each) is None, before, index) if index else 0
                if ruled_out - 1 > before:
                    self._look(ruled_out - 1, before, edges)
                reached = ruled_out
                break
            self._look(index, before, edges)
            before = reached = index
            if len(edges.keys() - self._warnings) >= most:
                break
        narrowed = self._narrowed(edges, most)
        found = [self._break(*each) for each in narrowed]
        if ruled_out is not None:
            found.append(self._rule_broken(ruled_out))
        found.sort(key=lambda each: each.breaks)
        limits = [each for each in found if not each.warns][:most]
        last = limits[-1].breaks if len(limits) == most else values[reached]
        warnings = tuple(each for each in found if each.warns and each.breaks <= last)
        sweep = self.sweep
        fits = min([reached, *(index - 1 for limit, index in narrowed if limit.name == MEMORY)])
        laid_out = layout_overrides(self.run, self._at(fits))
        layout = () if self.cure or laid_out == found_layout(self.run) else laid_out
        return Along(
            self.axis, sweep.field, values[0], values[reached], sweep.carries, tuple(limits), warnings, layout,
            values[fits], not self.cure and self.axis != "dataset",
        )  # fmt: skip

    def _ladder(self) -> Iterator[int]:
        """The first index, then one at about every fourfold value, the last one among them."""
        values, last = self.sweep.values, len(self.sweep.values) - 1
        index = 0
        yield index
        while index < last:
            index = min(last, max(index + 1, bisect_right(values, 4 * values[index]) - 1))
            yield index

    def _look(self, index: int, before: int, edges: dict[str, tuple[int, int]]) -> None:
        for limit in self.judge.of:
            if index and limit.name not in edges and not self._holds(limit, index):
                edges[limit.name] = (before, index)

    def _narrowed(self, edges: dict[str, tuple[int, int]], most: int) -> list[tuple[Limit, int]]:
        """The exact index at which each limit is passed, of as many as can be the first ``most``, and of warnings."""
        found: list[tuple[Limit, int]] = []
        by_name = {limit.name: limit for limit in self.judge.of}
        for name, (holds, not_any_more) in sorted(edges.items(), key=lambda edge: edge[1]):
            if len([at for limit, at in found if at <= holds and not limit.warns]) >= most:
                break
            found.append((by_name[name], self._first(by_name[name], holds, not_any_more)))
        return found

    def _first(self, limit: Limit, low: int, high: int) -> int:
        """The first index at which a limit is passed, also where amounts go up and down on the way.

        Along the vocabulary the head's matmul fills its last wave of tiles now more, now less, so that a share of the
        time crosses its limit several times; longer sequences that keep the tokens of a step lose micro-batches.
        """
        edge = self._edge(limit, low, high)
        waves = self.axis == "vocabulary" and limit.unit == "share" and limit.name != LOGITS
        while waves or self.sweep.turns:
            looked = [0, *(turn for turn in self.sweep.turns if turn < edge)]
            if waves:
                some = range(0, edge, max(1, edge // _SAMPLES))
                looked = sorted({*some, *range(max(0, edge - _NEAR), edge)})
            earlier = next((at for at, each in enumerate(looked) if at and not self._holds(limit, each)), None)
            if earlier is None:
                break
            edge = self._edge(limit, looked[earlier - 1], looked[earlier])
        return edge

    def _edge(self, limit: Limit, low: int, high: int) -> int:
        """The first index at which a limit no longer holds, between one that does and one that does not."""

        def over(index: int) -> float | None:
            reading = self._reading(limit, index)
            return None if reading is None else reading.amount - reading.most

        return first_failing(lambda index: self._holds(limit, index), low, high, straight(over))

    def _reading(self, limit: Limit, index: int) -> Reading | None:
        return self.judge.reading(limit, self._at(index))

    def _holds(self, limit: Limit, index: int) -> bool:
        return self.judge.holds(limit, self._at(index))

    def _break(self, limit: Limit, index: int) -> Break:
        planned, before, after = self.planned[limit.name], self._reading(limit, index - 1), self._reading(limit, index)
        assert planned is not None  # what is not known as planned is not judged
        assert after is not None  # what is not known holds
        return replace(
            _of_limit(limit, after, self._why(limit, index), self._remedy(limit, index)),
            planned=planned.amount,
            before=None if before is None else before.amount,
            cure=self._cure(limit, index) if self.cure and self.axis == "sequence" and limit.of_layout else None,
            **self._place(index),
        )

    def _rule_broken(self, index: int) -> Break:
        problem = self._problem(index)
        assert problem is not None
        nearest = "" if problem.nearest is None else f"nearest that works: {problem.field}={problem.nearest}"
        why = f"{problem.field} = {problem.value}: {problem.rule}"
        return Break(why=why, remedy=nearest, **self._place(index))

    def _place(self, index: int) -> dict[str, Any]:
        """The fields of a break at an index that say where it is."""
        values = self.sweep.values
        return {
            "axis": self.axis,
            "field": self.sweep.field,
            "start": values[0],
            "holds": values[index - 1] if index else 0,
            "breaks": values[index],
            "changes": overrides(self.run, self._at(index)),
        }

    def _why(self, limit: Limit, index: int) -> str:
        if limit.name != MEMORY:
            return comparison(limit, self._at(index))
        first, then = (self.judge.forecast(self._at(each)).peak_by_category for each in (0, index))
        most = max(then, key=lambda each: then[each] - first.get(each, 0))
        return f"{limit.what}; {most} grew most"

    def _remedy(self, limit: Limit, index: int) -> str:
        words = remedy(limit, self.run)
        if limit.name == POSITIONS:
            name = longer_model(self.run.model, self.sweep.values[index])
            return words if name is None else f"{name}, which has more positions (model.preset), or {words}"
        return words

    def _cure(self, limit: Limit, index: int) -> ContextRanks | None:
        """More context ranks that keep the limit where it is passed, and memory with it."""
        kept = [each for each in self.judge.of if each.name in (MEMORY, limit.name)]

        def holds(run: Run) -> bool:
            return all(self.judge.holds(each, run) for each in kept)

        return context_ranks(self.run, self._at(index), holds, self.sweep.values[-1])


def _of_limit(limit: Limit, reading: Reading, why: str, remedy: str) -> Break:
    """A limit that is passed with this reading, already as planned."""
    return Break(
        limit=limit.name, unit=limit.unit, planned=reading.amount, after=reading.amount, most=reading.most, why=why,
        remedy=remedy, basis=reading.basis, source=limit.source, warns=limit.warns,
    )  # fmt: skip


def _not_spread(why: str) -> Break:
    """What is broken already where devices without a layout cannot share a step."""
    return Break(why=why, remedy="--set layout=auto looks for a layout")
