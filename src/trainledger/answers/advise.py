"""What to change about a run, ranked by gain; and what to change together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from time import process_time
from typing import Annotated, Any, Unpack

from trainledger.answers import defaults
from trainledger.answers.fast_precision import precision_notes
from trainledger.answers.fits import LIMIT, advices, nearest_items, nearest_of, trials_of
from trainledger.answers.layout import with_layout
from trainledger.answers.load import Source, resolve
from trainledger.answers.pages.heading import found_layout_section, of_run
from trainledger.answers.pages.interval import chance, fits
from trainledger.answers.pages.measured_step import (
    MeasuredStep,
    data,
    explained,
    hypotheses,
    measured_step,
    seconds_of,
    verdict,
)
from trainledger.answers.pages.plain_data import plain, run_data
from trainledger.answers.plan import impossible, on_one
from trainledger.answers.question import Progress, choice, count, question, seconds, share, silent, text
from trainledger.answers.source import OfCluster, with_cluster
from trainledger.answers.write_back import To, in_words, unwritten, words_data, words_section
from trainledger.forecast.plan.advise import GOALS, Advice, Advised, before_and_after
from trainledger.forecast.plan.changes import EFFECTS, RESULT, ROUNDING, SAME
from trainledger.forecast.predict.forecast import Forecast
from trainledger.forecast.predict.interval import LIKELY
from trainledger.report.chart import AXIS, COLOURS, Axis, Chart, Line, Mark, usable_memory
from trainledger.report.document import Document, Item, Items, Section, details, notes, section, sections
from trainledger.report.table import commands, sentence
from trainledger.spec.reading import Overrides
from trainledger.spec.run_text import found_layout, pasted_overrides
from trainledger.spec.units import GIGA, counted, format_nbytes, format_percent, format_seconds

_SHORT = 3  # changes in the short answer
NOT_TRIED = "Not tried"
_COLOUR_OF = {SAME: COLOURS[0], ROUNDING: COLOURS[2], RESULT: COLOURS[5]}


@question(impossible=unwritten)
def advise(
    run: Source,
    overrides: Overrides = (),
    *,
    goal: Annotated[str | None, choice("absent = memory where the run does not fit, else time", GOALS)] = None,
    together: Annotated[int, count("how many changes to combine at most", least=0, most=10)] = 3,
    any_result: Annotated[bool, text("combine also changes of what is trained")] = False,
    limit_seconds: Annotated[
        float,
        seconds(
            "the most CPU time for trying changes, those that keep the result first", flag="--limit", metavar="TIME"
        ),
    ] = LIMIT,
    write: To = None,
    mfu: Annotated[float | None, share("the MFU that was measured, such as 22%")] = None,
    step_seconds: Annotated[float | None, seconds("the time of a step that was measured, such as 12s")] = None,
    progress: Progress = silent,
    **cluster: Unpack[OfCluster],
) -> Advice:
    """What to change about a run, ranked by the gain in time, or in memory where it does not fit.

    Where the length of the run is not given, the time is that of a step.

    Every change is made and predicted within --limit; Ctrl-C ends that early, with exit code 130. Each comes with its
    --set line to paste, and says whether it changes what is trained. With --mfu or --step-seconds the measured step
    stands beside the predicted one: what explains it, and how much nothing does. RUN is a run file, a model of the
    catalog or a Hugging Face config.json; of a file of another trainer the best changes that it has words for are said
    in these, and --write makes a copy with them.

    Raises `InvalidInput`. `trainledger.forecast.plan.advise` has the method.
    """
    began, source, sets = process_time(), run, with_cluster(overrides, **cluster)
    run = resolve(source, sets, search=False)
    if run.layout.auto:
        run = with_layout(run, written=run.origin.explicit, limit_seconds=limit_seconds / 4, progress=progress)
    trials = trials_of(run, began + limit_seconds, progress)
    asked = advices(
        run, trials, goal=goal, together=together, any_result=any_result, one_step=defaults.is_one_step(run)
    )
    *said, advice = asked
    measured = seconds_of(advice.forecast, mfu, step_seconds)
    if advice.forecast.likely_fits is False or advice.forecast.impossible:
        advice = replace(advice, nearest=nearest_of(run, (*said, advice), LIKELY, source, sets))
    best = [] if advice.nearest is None or advice.nearest.run is None else [advice.nearest.run]
    for words in said:
        best += [*(last.run for last in words.together[-1:]), *(one.run for one in words.alone[:1])]
    rewritten = in_words(run, best or [one.run for one in advice.alone[:1]], write)
    notes = (*precision_notes(run), *_left(advice, limit_seconds))
    advice = replace(advice, notes=notes, words=rewritten, measured_seconds=measured)
    if measured is None or measured_step(advice.forecast, measured).row.place != "above":
        return advice
    return replace(advice, hypotheses=hypotheses(run, measured))


def _left(advice: Advice, limit_seconds: float) -> Iterator[str]:
    """What was not tried, and how to try it."""
    if advice.left:
        why = "before Ctrl-C" if advice.interrupted else f"within {format_seconds(limit_seconds)} of CPU time"
        first, more = advice.left[:_SHORT], len(advice.left) - _SHORT
        names = "; ".join(first) + (f"; {more:,} more" if more > 0 else "")
        yield f"{NOT_TRIED} {why} ({counted(advice.tried, 'change')} were): {names}. --limit 10min tries more."


def page(advice: Advice) -> Document:
    """The gain of the best changes together, and the largest gains alone; the others are details."""
    title = f"Changes of {advice.run.model.name}: time against memory"
    same = [change for change in advice.alone if change.effect != RESULT]
    other = [change for change in advice.alone if change.effect == RESULT]
    as_it_is, *bottleneck = _as_it_is(advice)
    measured = measured_step(advice.forecast, advice.measured_seconds) if advice.measured_seconds else None
    slower = partial(_slower, advice, measured) if measured and advice.hypotheses else None
    # What else there is takes the room of one; what makes a run slower that of all.
    short = 0 if advice.hypotheses else _SHORT - (advice.words is not None) - (measured is not None)
    shown = same[:short] or other[:short]
    listed = {change.what for change in shown}
    alone = "Changes that do not affect the result"
    result = "Changes of THE TRAINING RESULT: compare the loss of a short run first"
    return Document(
        title=title,
        verdict=verdict(measured) if measured else as_it_is,
        sections=sections(
            explained(measured, advice.run.origin.source or "RUN") if measured else None,
            slower(_SHORT - bool(found_layout(advice.run))) if slower else None,
            (*bottleneck, f"Ranked by gain in {advice.goal}.") if not measured else None,
            _nearest(advice, shown),
            _ranked(advice, alone if same else result, shown),
            _all_together(advice, listed) if not measured else None,
            words_section(advice.words),
            next((note for note in advice.notes if note.startswith(NOT_TRIED)), None),
            found_layout_section(advice.run),
            replace(slower(len(advice.hypotheses)), detail="all hypotheses") if slower else None,
            *(
                details("the run as planned", (as_it_is, *bottleneck), _all_together(advice, listed))
                if measured
                else ()
            ),
            replace(_ranked(advice, alone, same), detail=f"all {len(same)} changes") if len(same) > short else None,
            replace(_ranked(advice, result, other), detail="changes of the training result") if same else None,
            _together(advice),
            section("", notes(_remarks(advice)), detail="" if not advice.alone else "remarks"),
        ),
        about=(*of_run(advice.run), *_as_it_is(advice)),
        data=lambda: _data(advice),
        figures=lambda: figures(advice, title),
    )


def _slower(advice: Advice, step: MeasuredStep, most: int) -> Section:
    """What may have made a measured step slower than planned: what each makes of a step, and what plans it so."""
    interval, planned = advice.forecast.intervals.get("step_seconds"), advice.forecast.step_seconds or 0.0
    items, matches = [], []
    alone = [one for one in advice.hypotheses if not one.solved][:most]
    for one in (*alone, *(one for one in advice.hypotheses if one.solved)):
        scale = one.seconds / planned
        match = (
            not one.solved and interval is not None and interval.low * scale <= step.seconds <= interval.high * scale
        )
        matches += [one.what] if match else []
        share = "" if step.mfu is None else f", MFU {format_percent(step.mfu * step.seconds / one.seconds)}"
        says = "would explain all of it" if one.solved else f"{format_seconds(one.seconds)}{share}{'; matches' * match}"
        items.append(Item(f"{one.what}: {says}", commands([one.override])))
    verdict = f"Matches: {'; '.join(matches)}." if matches else "None of them alone matches; several may be true."
    return section("What may be otherwise than planned, the nearest first", Items(tuple(items)), (verdict,))


def _ranked(advice: Advice, title: str, changes: Sequence[Advised]) -> Section:
    return section(title, _numbered(changes, [advice.forecast] * len(changes))) if changes else section("")


def _all_together(advice: Advice, listed: Collection[str]) -> Section | None:
    """The changes that were combined, as one command; those that are not ``listed`` above it apart."""
    if not advice.together:
        return None
    last = advice.together[-1]
    gain = _gain(*before_and_after(advice.forecast, last.forecast), advice.forecast, last.forecast)
    named = [change.what for change in advice.together if change.what in listed]
    others = [change.what for change in advice.together if change.what not in listed]
    named += [f"not listed above: {'; '.join(others)}"] if others else []
    command = commands(pasted_overrides(advice.run, last.run))
    return section("", Items((Item(f"Together ({'; '.join(named)}): {gain}", command),), numbered=False))


def _nearest(advice: Advice, shown: Sequence[Advised]) -> Items | None:
    """What makes it fit, where that is neither the first change that is shown nor all of them together."""
    last = [pasted_overrides(advice.run, change.run) for change in advice.together[-1:]]
    if advice.nearest is None or advice.nearest.sets in [*last, *(change.sets for change in shown[:1])]:
        return None
    return nearest_items(advice.nearest.change, advice.nearest.sets)


def _together(advice: Advice) -> Section | None:
    """The changes to make one after the other."""
    if len(advice.together) < 2:
        return None
    title = "Together, in this order; each compared with the one before it"
    befores = [advice.forecast, *(change.forecast for change in advice.together)]
    return section(title, _numbered(advice.together, befores), detail="the changes together, one by one")


def _remarks(advice: Advice) -> list[str]:
    lines = [note for note in advice.notes if not note.startswith(NOT_TRIED)]
    if not advice.alone:
        lines.append(f"None of {advice.tried} changes that were predicted gains in {advice.goal}.")
    changed = (advised.forecast for advised in (*advice.alone, *advice.together))
    if advice.forecast.likely_fits is False and not any(forecast.likely_fits for forecast in changed):
        lines.append(_unfit(advice))
    if advice.run.cluster.count > 1:
        lines.append("These change a layout by a factor of two at a time; `trainledger layouts` searches all of them.")
    tail = f"{advice.tried} changes were predicted one by one; {advice.refused} more break a rule of the run file."
    basis = advice.forecast.basis.get("step_seconds")
    return [*lines, tail + (f" Basis of the times: {basis}." if basis else "")]


def _unfit(advice: Advice) -> str:
    """What is left where no change makes a run fit."""
    left = []
    if any(advised.effect == RESULT for advised in advice.alone) and all(
        advised.effect != RESULT for advised in advice.together
    ):
        left.append("changes of what is trained, together (--any-result)")
    left.append("more devices to shard over (trainledger layouts)")
    if advice.run.recipe.lora is None:
        left.append("adapters in place of all weights (recipe.lora)")
    return f"None of these changes makes it fit: it takes {', '.join(left)}, or a smaller model (trainledger fit)."


def _as_it_is(advice: Advice) -> list[str]:
    forecast = advice.forecast
    parts = []
    if forecast.total_seconds is not None:
        parts.append(f"{format_seconds(forecast.total_seconds)} in all")
    if forecast.step_seconds is not None:
        parts.append(f"{format_seconds(forecast.step_seconds)} a step{on_one(advice.run, forecast)}")
        if forecast.total_seconds is None and forecast.tokens_per_second is not None:
            parts[-1] += f", {forecast.tokens_per_second:,.0f} tokens/s"
    if forecast.device_nbytes is not None:
        needs = f"{format_nbytes(forecast.device_nbytes)} on the peak rank"
        if forecast.usable_nbytes is not None:
            likely = fits(forecast.fits, forecast.chance_of_fitting)
            needs = f"{likely}: {needs}, of {format_nbytes(forecast.usable_nbytes)} usable"
        parts.append(needs)
    if not parts:
        parts.append("time and memory of this machine are not known")
    lines = [f"Impossible {impossible(forecast)}."] if forecast.impossible else []
    lines.append(f"{advice.run.model.name} as planned: {'; '.join(parts)}.")
    if forecast.bottleneck is not None:
        lines.append(sentence(forecast.bottleneck.sentence))
    return lines


def _numbered(adviseds: Sequence[Advised], befores: Sequence[Forecast]) -> Items:
    """Changes with their gains over the forecasts ``befores``."""

    def text(each: Advised, before: Forecast) -> str:
        effect = "" if each.effect == SAME else f"; {EFFECTS[each.effect]}"
        cost = f"; {each.cost}" if each.cost else ""
        return f"{each.what}: {_gain(each.seconds, each.nbytes, before, each.forecast)}{effect}{cost}"

    pairs = zip(adviseds, befores, strict=False)
    return Items(tuple(Item(text(advised, before), commands(advised.sets)) for advised, before in pairs))


def _gain(
    seconds: tuple[float | None, float | None], nbytes: tuple[int | None, int | None], before: Forecast, after: Forecast
) -> str:
    parts = []
    if seconds[0] and seconds[1] is not None:
        share = format_percent(seconds[1] / seconds[0] - 1, signed=True)
        parts.append(f"time {share} ({format_seconds(seconds[0])} to {format_seconds(seconds[1])})")
    elif seconds[1] is not None:
        parts.append(f"{format_seconds(seconds[1])} in all")
    if nbytes[0] and nbytes[1] is not None:
        share = format_percent(nbytes[1] / nbytes[0] - 1, signed=True)
        parts.append(f"memory {share} ({format_nbytes(nbytes[0])} to {format_nbytes(nbytes[1])})")
    was, becomes = before.chance_of_fitting, after.chance_of_fitting
    if was is not None and becomes is not None and chance(was) != chance(becomes):
        parts.append(f"chance to fit {chance(was)} to {chance(becomes)}")
    elif after.fits is False:
        parts.append("does NOT fit")
    return ", ".join(parts)


def _data(advice: Advice) -> dict[str, Any]:
    forecast = advice.forecast
    return {
        "run": run_data(advice.run),
        "layout": list(found_layout(advice.run)),
        "goal": advice.goal,
        **{name: getattr(forecast, name) for name in ("fits", "total_seconds", "step_seconds", "device_nbytes")},
        "impossible": list(forecast.impossible),
        "bottleneck": plain(forecast.bottleneck),
        "alone": [_change_data(advised) for advised in advice.alone],
        "together": [_change_data(advised) for advised in advice.together],
        "tried": advice.tried,
        "refused": advice.refused,
        "nearest": None if advice.nearest is None else list(advice.nearest.sets),
        "left": list(advice.left),
        "notes": list(advice.notes),
        **words_data(advice.words),
        **({"measured": data(measured_step(forecast, took))} if (took := advice.measured_seconds) else {}),
        **({"hypotheses": [plain(one) for one in advice.hypotheses]} if advice.hypotheses else {}),
    }


def _change_data(each: Advised) -> dict[str, Any]:
    data: dict[str, Any] = plain(each, more={Advised: ("faster", "smaller")}, less={Advised: ("run", "forecast")})
    data["set"] = data.pop("sets")
    return {**data, "means": EFFECTS[each.effect], "step_seconds": each.forecast.step_seconds}


def figures(advice: Advice, title: str) -> list[Chart]:
    """Time against memory of every change that helps, numbered, and the path of those together."""
    drawn = [advised for advised in advice.alone if advised.seconds[1] is not None and advised.nbytes[1] is not None]
    listed = sorted(drawn, key=lambda advised: advised.effect == RESULT)  # as the text has them
    if not listed:
        return []
    scale, unit = _unit(max(advised.seconds[0] or 0.0 for advised in listed))

    def marks_of(some: Sequence[Advised], **style: Any) -> Line:
        sets = [" ".join(f"--set {one}" for one in advised.sets) for advised in some]
        nbytes, seconds = [advised.nbytes[1] or 0 for advised in some], [advised.seconds[1] or 0.0 for advised in some]
        said = [
            f"{advised.what}\n{flags}\n{time / scale:.4g} {unit}, {memory / GIGA:.4g} GB".replace("\n\n", "\n")
            for advised, flags, time, memory in zip(some, sets, seconds, nbytes, strict=True)
        ]
        return Line([each / GIGA for each in nbytes], [each / scale for each in seconds], said=said, **style)

    marks: list[Mark] = []
    for effect, meaning in EFFECTS.items():
        numbered = [(number, advised) for number, advised in enumerate(listed, 1) if advised.effect == effect]
        if numbered:
            texts = [f"{number}" for number, _ in numbered]
            own = [advised for _, advised in numbered]
            marks.append(
                marks_of(own, name=meaning, colour=_COLOUR_OF[effect], width=0, symbol="circle", size=11, texts=texts)
            )
    start, first = (listed[0].nbytes[0] or 0) / GIGA, (listed[0].seconds[0] or 0.0) / scale
    way = [advised for advised in advice.together if advised.seconds[1] is not None and advised.nbytes[1] is not None]
    if way:
        path = marks_of(way, name="together, in order", colour=AXIS, dash="dot", symbol="circle", size=6)
        xs, ys, said = (start, *path.xs), (first, *path.ys), ("as planned", *(path.said or ()))
        marks.append(replace(path, xs=xs, ys=ys, said=said))
    star: dict[str, Any] = {"symbol": "star", "size": 15, "colour": "#000000", "said": ["as planned"]}
    marks += [Line([start], [first], "as planned", width=0, **star), *usable_memory(advice.forecast.usable_nbytes)]
    x, key = Axis("memory of the peak rank (GB)"), tuple(advised.what for advised in listed)
    return [Chart(title, tuple(marks), x, Axis(f"time ({unit})"), key, height=360)]


def _unit(seconds: float) -> tuple[float, str]:
    units = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
    return next((unit for unit in units if seconds >= unit[0]), (1e-3, "milliseconds"))
