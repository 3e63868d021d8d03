"""Whether a run fits its devices: yes or no, in how many bytes, how likely, why, and the nearest change that does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from time import process_time
from typing import Annotated, Any

from trainledger.answers import defaults
from trainledger.answers.layout import with_layout
from trainledger.answers.load import Source, resolve
from trainledger.answers.machine import kernels_of, machine_of
from trainledger.answers.pages.heading import run_line
from trainledger.answers.pages.interval import chance as written
from trainledger.answers.pages.interval import fits as worded
from trainledger.answers.pages.plain_data import plain
from trainledger.answers.plan import planned
from trainledger.answers.question import Progress, question, share, silent
from trainledger.answers.source import METHOD, also, by_field, listed, with_cluster
from trainledger.answers.write_back import Words, in_words, words_data, words_section
from trainledger.forecast.plan.advise import Advice, Nearest, Trials, advise
from trainledger.forecast.plan.changes import EFFECTS, RESULT
from trainledger.forecast.plan.fit import what_fits
from trainledger.forecast.plan.plan import Plan
from trainledger.forecast.predict.interval import EVEN, LIKELY
from trainledger.report.document import Answer, Document, Item, Items, sections
from trainledger.report.table import commands, sentence
from trainledger.spec.convert.patch import Rewritten
from trainledger.spec.device import Device
from trainledger.spec.frozen import frozen
from trainledger.spec.layers import checkpointed
from trainledger.spec.layout import Layout
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.reading import Overrides
from trainledger.spec.rules.run import run_problems
from trainledger.spec.run import Run
from trainledger.spec.run_text import pasted_overrides
from trainledger.spec.units import counted, format_nbytes, format_seconds

LIMIT = 20.0  # seconds of CPU for the trials of changes


@frozen
class Fits(Answer, report="fits"):
    """Whether a run fits, which is its truth value: ``verdict`` is None, and the truth value false, where that is not
    known.

    ``nbytes`` are those of the peak rank, of ``usable_nbytes``; ``chance`` is that of fitting; each is None where it is
    not known. ``reason`` is a sentence. ``nearest`` is the nearest change that fits, as ``--set`` takes it, and
    ``change`` what it is; both are empty where the run fits, or where none was found. ``words`` are that change in the
    words of the trainer's file that the run is of.
    """

    run: Run
    verdict: bool | None
    nbytes: int | None
    usable_nbytes: int | None
    chance: float | None
    reason: str
    nearest: tuple[str, ...] = ()
    change: str = ""
    words: Rewritten | None = None

    def __bool__(self) -> bool:
        return self.verdict is True

    @property
    def said(self) -> str:
        """The verdict in the words of a plan."""
        if self.verdict is None:
            return "whether it fits is not known"
        by_count = self.chance is not None and (self.nbytes or 0) <= (self.usable_nbytes or 0)
        return worded(self.verdict or by_count, self.chance)


def why_not(fits: Fits) -> Problem | None:
    """Why a run does not fit, with the change that would; None where it fits, or where that is not known."""
    if fits.verdict is not False:
        return None
    return Problem(
        "memory", None, f"{fits.said}: {fits.reason}", " ".join(f"--set {change}" for change in fits.nearest) or None
    )


@question(impossible=why_not, plots=False)
def fits(
    run: Source,
    device: str | Device | None = None,
    count: int | str | None = None,
    overrides: Overrides = (),
    *,
    chance: Annotated[float, share("the least chance to fit that is called fitting", most=0.99)] = EVEN,
    method: str | None = None,
    progress: Progress = silent,
) -> Fits:
    """Whether a run fits its devices: yes or no, the bytes, the chance, the reason, and the nearest change that fits.

    RUN is a run file, a model of the catalog, a Hugging Face config.json, or a file of another trainer. Exit code 2
    where it does not fit.

    ``device`` and ``count`` are the devices; where they are not given, those of the run, or one. Raises
    `InvalidInput`.

    >>> answer = fits("gpt2", "t4")
    >>> bool(answer), answer.reason
    (True, '3.14 GB of 15.63 GB usable, of which optimizer state 995.5 MB')
    >>> larger = fits("gpt2", "t4", overrides={"recipe.global_batch": 16})
    >>> bool(larger), larger.nearest
    (False, ('recipe.loss=compiled', 'recipe.compile=true'))
    """
    began, given = process_time(), with_cluster(overrides, device=device, count=count, method=method)
    asked = resolve(run, given, search=False)
    try:
        laid = with_layout(asked, written=asked.origin.explicit, progress=progress) if asked.layout.auto else asked
    except InvalidInput as error:
        problem = error.problems[0]
        if (problem.field, problem.value) != ("layout", "auto"):
            raise
        answer = _without_layout(asked, problem, chance)
        adapters = None if answer.nearest else _adapters(run, given, max(chance, LIKELY))
        return answer if adapters is None else replace(answer, nearest=adapters.sets, change=adapters.change)
    answer = _answer(planned(laid), chance)
    if answer.verdict is not False:
        return answer
    least = max(chance, LIKELY)
    trials = trials_of(laid, began + LIMIT, progress)
    nearest = nearest_of(laid, advices(laid, trials, goal="memory", enough=least), least, run, given)
    if nearest is None:
        return replace(answer, words=in_words(laid, []))
    target = nearest.run or resolve(laid, nearest.sets, search=False)
    return replace(answer, nearest=nearest.sets, change=nearest.change, words=in_words(laid, [target]))


def _answer(plan: Plan, chance: float) -> Fits:
    forecast = plan.forecast
    verdict, likely = forecast.fits, forecast.chance_of_fitting
    if forecast.impossible:
        verdict, likely = False, None
    elif verdict and likely is not None:
        verdict = likely >= chance
    reason = _reason(plan)
    if likely is not None and forecast.fits and not verdict:
        reason = f"below {written(chance)} (--chance), {reason}"
    return Fits(plan.run, verdict, forecast.device_nbytes, forecast.usable_nbytes, likely, reason)


def _without_layout(run: Run, problem: Problem, chance: float) -> Fits:
    """The answer where a search found no layout, with the bytes of states in as many parts as there are devices."""
    recipe = replace(checkpointed(run.recipe, "full"), micro_batch=1)
    sharded = replace(run, layout=Layout(shard=run.cluster.count), recipe=recipe)
    if run.recipe.global_batch % run.cluster.count or next(run_problems(sharded), None) is not None:
        return Fits(run, False, None, None, None, problem.rule, (str(problem.nearest),) if problem.nearest else ())
    plan = planned(sharded)
    reason = f"{_reason(plan)}, with states in {run.cluster.count:,} parts; a search of layouts found none that fits"
    more = _more_devices(sharded, max(chance, LIKELY))
    sets, change = ((str(problem.nearest),), "") if problem.nearest else (more.sets, more.change) if more else ((), "")
    forecast = plan.forecast
    return Fits(sharded, False, forecast.device_nbytes, forecast.usable_nbytes, None, reason, sets, change)


def _adapters(named: Source, given: Overrides, chance: float) -> Nearest | None:
    """The first way of training adapters of a model named alone that fits; none of a run or of another method."""
    for method in ("lora", "qlora") if isinstance(named, str) and METHOD not in by_field(listed(given)) else ():
        try:
            tuned = planned(resolve(named, also(given, {METHOD: method})))
        except InvalidInput:
            continue
        if tuned.forecast.fits and tuned.forecast.as_likely_as(chance):
            return Nearest((f"{METHOD}={method}",), "adapters, which CHANGES what is trained", tuned.run)
    return None


def trials_of(run: Run, until: float, progress: Progress) -> Trials:
    """Trials of changes of a run until a CPU time, of which ``progress`` hears."""
    began, names = process_time(), list[str]()

    def say(what: str) -> None:
        names.append(what)
        progress(f"{len(names):,} changes tried in {format_seconds(process_time() - began)}: {what}", 0, 0)

    backend = kernels_of(run)
    return Trials(machine_of(run), backend=backend, one_step=defaults.is_one_step(run), until=until, say=say)


def advices(run: Run, trials: Trials, **asked: Any) -> Iterator[Advice]:
    """Advice on a run: of a trainer's file first of what it has words for, in half of the time, then of all."""
    ask = partial(advise, run, machine_of(run), backend=kernels_of(run), trials=trials, **asked)
    if words := Words.of(run):
        until = trials.until
        trials.until -= max(0.0, until - process_time()) / 2
        yield ask(only=words.says)
        trials.until = until
    yield ask()


def nearest_of(
    run: Run, advices: Iterable[Advice], chance: float, source: Source, given: Overrides = ()
) -> Nearest | None:
    """The nearest change that fits: one that keeps the result, several, more devices, then one of what is trained.

    What fits with the ``chance`` and costs the least time; of a model that is named alone, adapters come last.
    """
    advice = None
    for advice in advices:
        if steps := advice.fitting(chance):
            what = "; ".join(step.what for step in steps)
            return Nearest(pasted_overrides(run, steps[-1].run), what, steps[-1].run)
    if more := _more_devices(run, chance):
        return more
    for advised in () if advice is None else advice.alone:
        if advised.likely(chance):
            what = advised.what if advised.effect != RESULT else f"{advised.what}, which {EFFECTS[advised.effect]}"
            return Nearest(advised.sets, what, advised.run)
    return _adapters(source, given, chance)


def _reason(plan: Plan) -> str:
    """What is needed and what there is, with the largest part of the tensors."""
    forecast = plan.forecast
    if forecast.impossible:
        return "; ".join(forecast.impossible)
    heaviest = max(forecast.peak_by_category, key=lambda name: forecast.peak_by_category[name])
    part = f"of which {heaviest} {format_nbytes(forecast.peak_by_category[heaviest])}"
    if forecast.device_nbytes is None or forecast.usable_nbytes is None:
        needs = format_nbytes(forecast.peak_nbytes or 0)
        return f"{needs} of tensors, {part}; the memory of {plan.run.cluster.device} is not known (give a device)"
    return f"{format_nbytes(forecast.device_nbytes)} of {format_nbytes(forecast.usable_nbytes)} usable, {part}"


def _more_devices(run: Run, chance: float) -> Nearest | None:
    """The fewest devices over which states are sharded, unchanged or with the fewest changes that save memory."""
    machine = machine_of(run)
    if not isinstance(machine, Device):
        return None
    for row in what_fits(run, machine, backend=kernels_of(run), of=("devices",), chance=chance).rows:
        found = row.answers["devices"]
        if found.size is not None and found.run is not None:
            what = f"{counted(found.size, 'device')}, states sharded over them"
            return Nearest(pasted_overrides(run, found.run), what, found.run)
    return None


def nearest_items(change: str, sets: tuple[str, ...]) -> Items | None:
    """The nearest change that fits, to paste."""
    item = Item(f"Fits with {change}:" if change else "Nearest that works:", commands(sets))
    return Items((item,), numbered=False) if sets else None


def page(fits: Fits) -> Document:
    """The verdict with its bytes, and the nearest change that fits."""
    none = "No change that was tried fits." if fits.verdict is False else None
    return Document(
        title=f"Whether {fits.run.model.name} fits",
        verdict=sentence(f"{fits.said}: {fits.reason}"),
        sections=sections(
            run_line(fits.run), nearest_items(fits.change, fits.nearest) or none, words_section(fits.words)
        ),
        data=lambda: _data(fits),
        more=("plan RUN", "advise RUN", "fit RUN"),
    )


def _data(fits: Fits) -> dict[str, Any]:
    return {**plain(fits, less={Fits: ("words",)}), "fits": fits.verdict, **words_data(fits.words)}
