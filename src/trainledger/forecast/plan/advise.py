"""What to change about a run: each change made, predicted and ranked by what it gains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from math import inf
from time import process_time

from trainledger.forecast.plan.changes import EFFECTS, RESULT, ROUNDING, SAME, Change, changes, memory_savings
from trainledger.forecast.predict.forecast import Forecast
from trainledger.forecast.predict.interval import LIKELY
from trainledger.forecast.predict.predict import of_one_step, predict
from trainledger.forecast.predict.roofline import Machine
from trainledger.report.document import Answer
from trainledger.spec.convert.patch import Rewritten
from trainledger.spec.frozen import frozen
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.run import Run
from trainledger.spec.run_text import changed, overrides

GOALS = ("time", "memory")
LEAST = 0.001  # of the time or the memory: a smaller gain is left out
_PARTNERS = 6  # changes that are tried together with others
LEAST_TRIED = 8  # changes, however short the time is
_ALONE = 0.6  # of the time goes to changes alone, the rest to several together


@frozen
class Advised:
    """A changed run and its forecast, compared with the run as it was.

    ``sets`` make it, as ``--set`` takes them. ``effect`` is one of EFFECTS: whether the result stays the same.
    ``seconds`` is the time of the whole run (of a step where that is not known; None where the change costs time that
    is not predicted, and before a change without which the run cannot be), ``nbytes`` the memory of the peak rank;
    the first of each pair is before the change. ``basis`` is that of the time.
    """

    what: str
    sets: tuple[str, ...]
    effect: str
    cost: str
    seconds: tuple[float | None, float | None]
    nbytes: tuple[int | None, int | None]
    fits: bool | None
    basis: str
    run: Run
    forecast: Forecast

    @property
    def faster(self) -> float:
        """How much of the time it saves, as a share; 0 where no time is known."""
        before, after = self.seconds
        return 1 - after / before if before and after is not None else 0.0

    @property
    def works(self) -> bool:
        """Whether the changed run can be, and is not known to need more memory than there is."""
        return self.fits is not False and not self.forecast.impossible

    def likely(self, chance: float) -> bool:
        """Whether the changed run works and fits with a chance."""
        return bool(self.fits) and self.works and self.forecast.as_likely_as(chance)

    @property
    def smaller(self) -> float:
        """How much of the memory it saves, as a share; 0 where none is known."""
        before, after = self.nbytes
        return 1 - after / before if before and after is not None else 0.0

    def __repr__(self) -> str:
        sets = " ".join(f"--set {each}" for each in self.sets)
        time = "" if self.seconds[1] is None else f"time {-100 * self.faster:+.1f} %, "
        return f"Advised({sets}: {time}memory {-100 * self.smaller:+.1f} %, result: {EFFECTS[self.effect]})"


@frozen
class Nearest:
    """The nearest change after which a run fits: as ``--set`` takes it, what it is, and the changed run.

    That is what fits with `LIKELY` and costs the least time; before it comes nothing that changes what is trained.
    """

    sets: tuple[str, ...]
    change: str
    run: Run | None = None


@frozen
class Hypothesis:
    """What may have been otherwise than planned, the override that plans it so, and the seconds of a step with it.

    ``solved``: its value was sought so that the step is the measured one.
    """

    what: str
    override: str
    seconds: float
    solved: bool = False


@frozen
class Advice(Answer, report="advise"):
    """Changes by what they gain towards ``goal`` (time, or memory where a run does not fit), the best first.

    ``together`` are changes to make one after the other, each compared with the one before it. ``tried`` is how many
    changes were predicted, ``refused`` how many broke a rule of the run file, ``left`` are those that no time was left
    for, or that Ctrl-C (``interrupted``) left out; ``nearest`` make it fit (`Nearest`). ``notes`` are sentences on what
    could not be predicted; ``words`` the best changes in the words of the trainer's file that the run is of.
    ``measured_seconds`` are those of a step, where somebody measured them, ``hypotheses`` what may have made it slower
    than planned.
    """

    run: Run
    forecast: Forecast
    goal: str
    alone: tuple[Advised, ...]
    together: tuple[Advised, ...]
    tried: int
    refused: int
    notes: tuple[str, ...] = ()
    words: Rewritten | None = None
    measured_seconds: float | None = None
    hypotheses: tuple[Hypothesis, ...] = ()
    left: tuple[str, ...] = ()
    interrupted: bool = False
    nearest: Nearest | None = None

    @property
    def ranked(self) -> tuple[Advised, ...]:
        """What there is to show of trials that were interrupted."""
        return (*self.alone, *self.together)

    def fitting(self, chance: float) -> tuple[Advised, ...]:
        """The fewest changes together after which the run fits with a chance; none where no such are known."""
        for number, advised in enumerate(self.together, 1):
            if advised.likely(chance):
                return self.together[:number]
        return ()

    def __repr__(self) -> str:
        best = f"; best: {self.alone[0]!r}" if self.alone else ""
        return f"Advice({self.goal}: {len(self.alone)} changes help of {self.tried}{best})"


def advise(
    run: Run,
    machine: Machine | None,
    *,
    backend: str,
    goal: str | None = None,
    together: int = 3,
    any_result: bool = False,
    one_step: bool = False,
    trials: Trials | None = None,
    only: Callable[[Run], bool] = lambda _: True,
    enough: float | None = None,
) -> Advice:
    """Every change of `forecast.plan.changes` that gains something, and the best of them together.

    ``goal`` is ``time`` or ``memory``; None: memory where the run does not fit, else time, for which only changed runs
    that fit count. For an impossible run (`Forecast.impossible`), changes that make it possible come first. At most
    ``together`` changes are combined, with ``any_result`` also those that change what is trained, and no further ones
    once they fit with the chance ``enough``. Of a run of ``one_step`` the time is that of the step. ``trials`` have a
    limit of time and what was predicted before; ``only`` says which changed runs may be. Raises InvalidInput for
    another goal.
    """
    if goal is not None and goal not in GOALS:
        raise InvalidInput(
            [Problem("goal", goal, f"must be one of {', '.join(GOALS)}", nearest_text(str(goal), GOALS))]
        )
    trials = trials or Trials(machine, backend=backend, one_step=one_step)
    trials.only, until, refused = only, trials.until, trials.refused
    forecast = trials.forecast(run)
    asked = goal or ("memory" if forecast.likely_fits is False or forecast.step_seconds is None else "time")
    short = forecast.likely_fits is False
    trials.until -= (1 - _ALONE) * max(0.0, until - process_time()) if together and until < inf else 0.0
    adviseds = trials.all(run, _cheapest_first(run, changes(run, backend=backend, short=short), short=short))
    trials.until = until
    tried, refused = len(adviseds), trials.refused - refused
    best = _ranked(adviseds, asked, forecast)
    # Together go only changes whose time is predicted.
    free = [
        advised
        for advised in adviseds
        if (any_result or advised.effect != RESULT) and trials.change_of[advised.sets].timed
    ]
    path = list[Advised]()
    for advised in _together(trials, run, free, goal or "time", together):
        path.append(advised)
        if enough is not None and advised.likely(enough):
            break
    left = tuple(trials.left)
    return Advice(
        run, forecast, asked, tuple(best), tuple(path), tried, refused, left=left, interrupted=trials.interrupted
    )


def _cheapest_first(run: Run, wanted: Iterable[Change], *, short: bool) -> list[Change]:
    """Changes in the order to try them: of a run ``short`` of memory its `memory_savings`, and last other results.

    Of each field one value comes before a second of any: a short time tries many kinds.
    """
    saving = {change.what for change in memory_savings(run)} if short else set()
    values, keys = Counter[str](), dict[Change, tuple[bool, bool, int]]()
    for change in wanted:
        field = change.fields[0][0] if change.fields else ""
        keys.setdefault(change, (change.effect == RESULT, change.what not in saving, values[field]))
        values[field] += 1
    return sorted(keys, key=lambda change: keys[change])


class Trials:
    """Makes changed runs and compares their forecasts, each predicted once.

    Once the CPU time ``until`` is reached, or Ctrl-C was pressed, further changes are ``left`` out. ``say`` is called
    with what is being predicted.
    """

    def __init__(
        self,
        machine: Machine | None,
        *,
        backend: str,
        one_step: bool = False,
        until: float = inf,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        whole = partial(predict, machine=machine, backend=backend)
        self.forecast = cache(lambda run: of_one_step(run, whole(run)) if one_step else whole(run))
        self.until, self._say = until, say
        self.only: Callable[[Run], bool] = lambda _: True
        self.tried = self.refused = 0
        self.interrupted = False
        self.left: dict[str, None] = {}
        self.change_of: dict[tuple[str, ...], Change] = {}

    @property
    def over(self) -> bool:
        """Whether no further change is tried."""
        return self.interrupted or (self.tried >= LEAST_TRIED and process_time() > self.until)

    def all(self, run: Run, wanted: Iterable[Change]) -> list[Advised]:
        """Those changes that make another run which works."""
        adviseds: dict[tuple[str, ...], Advised] = {}
        for change in wanted:
            if self.over:
                self.left[change.what] = None
                continue
            self.left.pop(change.what, None)
            try:
                self._say(change.what)
                advised = self.one(run, change)
            except InvalidInput:
                self.refused += 1
                continue
            except KeyboardInterrupt:
                self.interrupted, self.left[change.what] = True, None
                continue
            if advised is None:
                continue
            self.tried += 1
            if advised.seconds[1] is None and change.timed and self.forecast(run).step_seconds is not None:
                self.refused += 1  # the device has no rate for it
            elif advised.sets:
                adviseds.setdefault(advised.sets, advised)
                self.change_of.setdefault(advised.sets, change)
        return list(adviseds.values())

    def one(self, run: Run, change: Change) -> Advised | None:
        """A changed run beside the run; None where it is none of `only`."""
        before, other = self.forecast(run), changed(run, dict(change.fields))
        if not self.only(other):
            return None
        after = self.forecast(other)
        seconds, nbytes = before_and_after(before, after)
        if not change.timed:
            seconds = (seconds[0], None)
        return Advised(
            change.what, overrides(run, other), change.effect, change.cost, seconds, nbytes,
            after.fits, after.basis.get("step_seconds", ""), other, after,
        )  # fmt: skip


def before_and_after(
    before: Forecast, after: Forecast
) -> tuple[tuple[float | None, float | None], tuple[int | None, int | None]]:
    """Seconds and bytes of two forecasts: of the whole run where both are known, else of a step; of a device."""
    seconds = before.step_seconds, after.step_seconds
    if before.total_seconds is not None and after.total_seconds is not None:
        seconds = before.total_seconds, after.total_seconds
    elif before.impossible and not after.impossible:  # a step of one device is no measure of one of all
        seconds = None, after.total_seconds
    peak, other = (
        forecast.peak_nbytes if forecast.device_nbytes is None else forecast.device_nbytes
        for forecast in (before, after)
    )
    return seconds, (peak, other)


def _likely(after: Forecast, before: Forecast) -> bool:
    """Whether a changed run fits as surely as is recommended, or as before the change where that fits."""
    chance = before.chance_of_fitting if before.likely_fits else None
    least = LIKELY if chance is None else min(LIKELY, chance)
    return after.fits is not False and after.as_likely_as(least)


def _ranked(adviseds: list[Advised], goal: str, before: Forecast) -> list[Advised]:
    enables = bool(before.impossible)  # what works gains then, however long it takes
    if goal == "time":
        gains = [
            advised
            for advised in adviseds
            if _likely(advised.forecast, before) and (advised.faster > LEAST or (enables and advised.works))
        ]
        if enables:
            return sorted(gains, key=lambda gain: _to_fit(gain, before))
        return sorted(gains, key=lambda gain: (-gain.faster, -gain.smaller))
    gains = [advised for advised in adviseds if advised.smaller > LEAST or (enables and advised.works)]
    if before.likely_fits is False:  # what makes it fit comes first, the fastest of that before the others
        return sorted(gains, key=lambda gain: _to_fit(gain, before))
    return sorted(gains, key=lambda gain: (-gain.smaller, -gain.faster))


def _to_fit(each: Advised, before: Forecast) -> tuple[bool, bool, float, float]:
    seconds, works = each.seconds[1], each.works and _likely(each.forecast, before)
    first = seconds or 0.0 if works else -each.smaller
    return (not works, seconds is None, first, -each.smaller)


def _together(trials: Trials, run: Run, adviseds: list[Advised], goal: str, most: int) -> Iterator[Advised]:
    """Greedily: the best change, then the best after it, at most so many.

    A change that makes a run faster but too large is tried with each that saves memory, as the two may gain together.
    """
    first, start = run, trials.forecast(run)
    at = start
    done: list[Change] = []
    # The changes that gained most in time, the first that fit among them (those too large are many), and in memory.
    fastest = sorted(adviseds, key=lambda advised: -advised.faster)
    fitting = [advised for advised in fastest if _likely(advised.forecast, start)]
    by_time = [*fastest[:_PARTNERS], *fitting[:_PARTNERS]]
    by_memory = sorted(adviseds, key=lambda advised: (-advised.smaller, -advised.faster))[:_PARTNERS]
    # Casts of another precision may cost more than they save until compiled blocks fuse them.
    casts = [advised for advised in adviseds if any(one.startswith("recipe.precision") for one in advised.sets)]
    partners = list({cast.sets: trials.change_of[cast.sets] for cast in (*by_time, *by_memory, *casts)}.values())
    for turn in range(most):
        wanted = [partner for partner in partners if not _overlap(partner, done)]
        options = adviseds if turn == 0 else trials.all(first, wanted)
        pairs = _pairs(trials, first, options) if len(done) + 2 <= most else []
        unfit = at.likely_fits is False or not _likely(at, start)
        now = "memory" if unfit or at.step_seconds is None else goal
        best = next(iter(_ranked([*options, *pairs], now, at)), None)
        if best is None:
            return
        yield best
        done.append(trials.change_of.get(best.sets, Change(best.what, (), best.effect)))
        if len(best.sets) > 1 and best in pairs:
            done.append(done[-1])
        first, at = best.run, best.forecast
        if len(done) >= most:
            return


def _pairs(trials: Trials, run: Run, options: list[Advised]) -> list[Advised]:
    too_large = sorted((option for option in options if option.fits is False), key=lambda advised: -advised.faster)
    enablers = sorted((option for option in options if option.smaller > LEAST), key=lambda advised: -advised.faster)
    found = []
    for large in [advised for advised in too_large if advised.faster > LEAST][:2]:
        for small in enablers[:4]:
            one, other = trials.change_of[large.sets], trials.change_of[small.sets]
            if not _overlap(one, [other]):
                effect = max(one.effect, other.effect, key=(SAME, ROUNDING, RESULT).index)
                cost = "; ".join(each for each in (one.cost, other.cost) if each)
                found.append(Change(f"{one.what}, with {other.what}", (*one.fields, *other.fields), effect, cost))
    return trials.all(run, found)


def _overlap(change: Change, others: Iterable[Change]) -> bool:
    fields = {name for name, _ in change.fields}
    return any(name in fields for other in others for name, _ in other.fields)
