"""What gives way first, second and third when one thing of a run grows, and at which value."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from trainledger.frozen import frozen
from trainledger.plan import in_json
from trainledger.plan.difference import overrides
from trainledger.plan.growth import AXES, Growth, growth
from trainledger.plan.limits import LIMITS, LOGITS, Limit, Limits, Reading, critical_batch_of_tokens, remedy
from trainledger.predict.forecast import Forecast
from trainledger.predict.predict import predict
from trainledger.predict.roofline import Machine
from trainledger.predict.run import too_few
from trainledger.spec.lora import ONE_DEVICE
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run
from trainledger.units import format_count

REACH = 64
MOST = 3
RULE = "divisibility"
_NEAR, _SAMPLES = 32, 8  # values just before an edge, and all the way to it, at which a share is asked for again


@frozen
class Break:
    """Where something gives way: it holds at ``holds`` and no longer at ``breaks``, the next value that is possible.

    ``holds`` is 0 where it does not hold as planned.

    ``planned``, ``before`` and ``after`` are what is compared with ``most``: as planned, at ``holds`` and at
    ``breaks``; None where a rule of the run file is broken, told in ``why``. ``changes`` lead from the run to the one
    that no longer holds, as ``--set`` takes them.
    """

    limit: str
    axis: str
    field: str
    start: int
    holds: int
    breaks: int
    unit: str
    planned: float | None
    before: float | None
    after: float | None
    most: float | None
    why: str
    remedy: str
    basis: str
    source: str
    changes: tuple[str, ...]

    @property
    def factor(self) -> float:
        """How much larger than planned."""
        return self.breaks / self.start


@frozen
class Along:
    """What gives way along one axis, the first first; ``reached`` is the largest value that was looked at."""

    axis: str
    field: str
    start: int
    reached: int
    carries: str
    breaks: tuple[Break, ...]


@frozen
class Breaks:
    """What gives way along each axis; ``already`` does not hold as planned, ``unknown`` cannot be judged."""

    run: Run
    along: tuple[Along, ...]
    already: tuple[Break, ...]
    unknown: tuple[str, ...]

    def __repr__(self) -> str:
        first = [
            f"{each.axis}: {each.breaks[0].limit} at {each.breaks[0].breaks:,}" for each in self.along if each.breaks
        ]
        return f"Breaks({self.run.model.name}; {'; '.join(first) or 'nothing gives way'})"


def breaks(
    run: Run,
    machine: Machine | None,
    *,
    backend: str,
    axes: Sequence[str] = tuple(AXES),
    limits: Limits = Limits(),  # noqa: B008  # frozen
    reach: int = REACH,
    most: int = MOST,
    say: Callable[[str], None] = lambda _: None,
) -> Breaks:
    """The first ``most`` things that give way along each axis, up to ``reach`` times the planned value.

    Each edge is exact: of the values that the run's layout and batch can be divided by, ``holds`` is the last at which
    it holds before it does not. ``say`` hears what is being looked at. Raises InvalidInput for an axis that is none of
    `AXES`.
    """
    unknown = [each for each in axes if each not in AXES]
    if unknown:
        rule = f"must be one of {', '.join(AXES)}"
        raise InvalidInput([Problem("along", each, rule, nearest_text(str(each), AXES)) for each in unknown])

    def told(other: Run) -> Forecast:
        return predict(other, machine, backend=backend)

    limits = replace(limits, positions=run.model.max_seq_len)
    at_start = told(run)
    readings = {each.name: each.read(run, at_start, limits) for each in LIMITS}
    already = [each for each in LIMITS if (found := readings[each.name]) is not None and not found.holds]
    judged = [each for each in LIMITS if readings[each.name] is not None and each not in already]
    along = []
    for axis in axes:
        say(axis)
        way = growth(run, axis, reach)
        # A longer run has the same steps: no forecast is asked.
        of_axis = [each for each in judged if axis != "dataset" or not each.forecasts]
        along.append(_Walk(run, way, of_axis, limits, told, readings).along(most))
    few = too_few(run) if run.cluster.count > 1 else None
    broken = () if few is None else (_not_spread(run, few),)
    return Breaks(
        run, tuple(along), (*broken, *(_as_planned(run, each, readings[each.name]) for each in already)),
        tuple(each.name for each in LIMITS if readings[each.name] is None),
    )  # fmt: skip


class _Walk:
    """Goes along one axis: in large steps until enough gives way, then narrows each edge down."""

    def __init__(
        self,
        run: Run,
        way: Growth,
        judged: list[Limit],
        limits: Limits,
        told: Callable[[Run], Forecast],
        planned: dict[str, Reading | None],
    ) -> None:
        self.run, self.way, self.judged, self.limits, self.told, self.planned = run, way, judged, limits, told, planned
        self._forecasts: dict[int, Forecast] = {}
        self._problems: dict[int, Problem | None] = {}

    def along(self, most: int) -> Along:
        way = self.way
        edges: dict[str, tuple[int, int]] = {}  # limit -> the last index known to hold, one known not to
        before = reached = 0
        ruled_out: int | None = None
        if self._problem(0) is not None:
            return Along(way.axis, way.field, way.start, way.start, way.carries, (self._rule_broken(0),))
        for index in self._ladder():
            if self._problem(index) is not None:
                ruled_out = self._first_not(before, index, self._problem_free)
                if ruled_out - 1 > before:
                    self._look(ruled_out - 1, before, edges)
                reached = ruled_out
                break
            self._look(index, before, edges)
            before = reached = index
            if len(edges) >= most:
                break
        found = [self._break(*each) for each in self._narrowed(edges, most)]
        if ruled_out is not None:
            found.append(self._rule_broken(ruled_out))
        found.sort(key=lambda each: each.breaks)
        return Along(way.axis, way.field, way.start, way.values[reached], way.carries, tuple(found[:most]))

    def _ladder(self) -> Iterator[int]:
        """Indices at about every fourfold value, the last one among them; in between is looked where it gives way."""
        values, last = self.way.values, len(self.way.values) - 1
        index = 0
        while index < last:
            index = min(last, max(index + 1, bisect_right(values, 4 * values[index]) - 1))
            yield index

    def _look(self, index: int, before: int, edges: dict[str, tuple[int, int]]) -> None:
        for each in self.judged:
            if each.name not in edges and not self._holds(each, index):
                edges[each.name] = (before, index)

    def _narrowed(self, edges: dict[str, tuple[int, int]], most: int) -> list[tuple[Limit, int]]:
        """The exact index at which each gives way, of as many as can be among the first ``most``."""
        found: list[tuple[Limit, int]] = []
        by_name = {each.name: each for each in self.judged}
        for name, (holds, not_any_more) in sorted(edges.items(), key=lambda each: each[1]):
            if len([at for _, at in found if at <= holds]) >= most:
                break
            found.append((by_name[name], self._first(by_name[name], holds, not_any_more)))
        return found

    def _first(self, limit: Limit, low: int, high: int) -> int:
        """The edge between an index that holds and one that does not; along the vocabulary the first of several.

        There the head's product fills its last wave of tiles now more, now less, so that a share of the time crosses
        its limit several times; memory grows with every row.
        """
        edge = self._edge(limit, low, high)
        while limit.unit == "share" and limit.name != LOGITS and self.way.axis == "vocabulary":
            some = range(0, edge, max(1, edge // _SAMPLES))
            looked = sorted({*some, *range(max(0, edge - _NEAR), edge)})
            earlier = next((at for at, each in enumerate(looked) if at and not self._holds(limit, each)), None)
            if earlier is None:
                break
            edge = self._edge(limit, looked[earlier - 1], looked[earlier])
        return edge

    def _edge(self, limit: Limit, low: int, high: int) -> int:
        """The first index at which a limit no longer holds, between one that does and one that does not.

        Most amounts are nearly straight lines, so a straight line is tried before the middle is.
        """
        tries = 0
        while high - low > 1:
            middle = (low + high) // 2
            ends = self._reading(limit, low), self._reading(limit, high)
            if tries % 3 != 2 and ends[0] is not None and ends[1] is not None:
                below, above = ends[0].most - ends[0].amount, ends[1].amount - ends[1].most
                if below > 0:
                    guess = low + int((high - low) * below / (below + above)) + (tries % 3 == 1)
                    middle = min(max(guess, low + 1), high - 1)
            low, high = (middle, high) if self._holds(limit, middle) else (low, middle)
            tries += 1
        return high

    def _first_not(self, low: int, high: int, holds: Callable[[int], bool]) -> int:
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(middle) else (low, middle)
        return high

    def _problem(self, index: int) -> Problem | None:
        if index not in self._problems:
            self._problems[index] = next(iter(run_problems(self.way.at(index))), None)
        return self._problems[index]

    def _problem_free(self, index: int) -> bool:
        return self._problem(index) is None

    def _forecast(self, index: int) -> Forecast:
        if index not in self._forecasts:
            self._forecasts[index] = self.told(self.way.at(index))
        return self._forecasts[index]

    def _reading(self, limit: Limit, index: int) -> Reading | None:
        told = self._forecast(index) if limit.forecasts else None
        return limit.read(self.way.at(index), told, self.limits)

    def _holds(self, limit: Limit, index: int) -> bool:
        reading = self._reading(limit, index)
        return reading is None or reading.holds

    def _break(self, limit: Limit, index: int) -> Break:
        planned, before, after = self.planned[limit.name], self._reading(limit, index - 1), self._reading(limit, index)
        assert planned is not None  # what is not known as planned is not judged
        assert after is not None  # what is not known holds
        return self._told(
            index, limit=limit.name, unit=limit.unit, planned=planned.amount, after=after.amount, most=after.most,
            before=None if before is None else before.amount, why=self._why(limit, index),
            remedy=remedy(limit, self.run), basis=after.basis, source=limit.source,
        )  # fmt: skip

    def _why(self, limit: Limit, index: int) -> str:
        if limit.name != "device memory":
            return _compared(limit, self.way.at(index))
        first, then = self._forecast(0).peak_by_category, self._forecast(index).peak_by_category
        most = max(then, key=lambda each: then[each] - first.get(each, 0))
        return f"{limit.what}; {most} grew most"

    def _rule_broken(self, index: int) -> Break:
        problem = self._problem(index)
        assert problem is not None
        nearest = "" if problem.nearest is None else f"nearest that works: {problem.field}={problem.nearest}"
        return self._told(
            index, limit=RULE, unit="", planned=None, before=None, after=None, most=None,
            why=f"{problem.field} = {problem.value}: {problem.rule}", remedy=nearest, basis="exact",
            source="the rules of the run file",
        )  # fmt: skip

    def _told(self, index: int, **more: Any) -> Break:
        way = self.way
        holds = way.values[index - 1] if index else 0
        return Break(
            axis=way.axis, field=way.field, start=way.start, holds=holds, breaks=way.values[index],
            changes=overrides(self.run, way.at(index)), **more,
        )  # fmt: skip


def _compared(limit: Limit, run: Run) -> str:
    """What is compared, in words; beside the critical batch that of another law, as the two are far apart."""
    if limit.name != "critical batch":
        return limit.what
    by_tokens = format_count(critical_batch_of_tokens(run))
    return f"{limit.what}; a law of the tokens alone says {by_tokens} (Bergsma et al. 2025)"


def _as_planned(run: Run, limit: Limit, reading: Reading | None) -> Break:
    assert reading is not None
    return Break(
        limit=limit.name, axis="", field="", start=1, holds=0, breaks=1, unit=limit.unit, planned=reading.amount,
        before=None, after=reading.amount, most=reading.most, why=_compared(limit, run), remedy=remedy(limit, run),
        basis=reading.basis, source=limit.source, changes=(),
    )  # fmt: skip


def _not_spread(run: Run, why: str) -> Break:
    """What gives way already where devices without a layout cannot share a step."""
    alone = run.recipe.lora_rank is not None
    return Break(
        limit=RULE, axis="", field="", start=1, holds=0, breaks=1, unit="", planned=None, before=None, after=None,
        most=None, why=why, basis="exact",
        remedy=f"whole sequences for each, as {ONE_DEVICE}" if alone else "--set layout=auto looks for a layout",
        source="the rules of the run file", changes=(),
    )  # fmt: skip


def to_json(found: Breaks, taken: Sequence[str] = ()) -> dict[str, Any]:
    """The breaks as JSON takes them; ``taken`` are the fields of the run that nobody said."""
    return {
        "run": in_json.run(found.run, taken),
        "already": [_plain(each) for each in found.already],
        "along": [
            {**vars(each), "breaks": [{**_plain(one), "factor": one.factor} for one in each.breaks]}
            for each in found.along
        ],
        "not_judged": list(found.unknown),
    }


def _plain(each: Break) -> dict[str, Any]:
    told = vars(each) | {"set": list(each.changes)}
    del told["changes"]
    return told
