"""Data and loop: tokens, epochs, accumulation, size on disk, learning rate, checkpoints, and the loader's rate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import trainledger as tl
from trainledger.answers.defaults import sharded
from trainledger.answers.load import Source, resolve
from trainledger.answers.loop import headline as headline_of
from trainledger.answers.loop import interval_chart, interval_table, schedule_chart, schedule_table
from trainledger.forecast.plan.limits import PASSES
from trainledger.forecast.plan.training_loop import TrainingLoop
from trainledger.spec.model import ModelSpec
from trainledger.spec.run import Run
from trainledger.spec.schedule import SCHEDULES
from trainledger.web.calculator import BAD, GOOD, WARN, Drawing, Headline, Progress, Reply, calculator, headline
from trainledger.web.field import FILE, Query, one_of
from trainledger.web.remedies import that_fit_devices
from trainledger.web.run import (
    of_pasted,
    python_of,
    refuse_search,
    run_file_of,
    settings_of,
    source_of,
    spread_of,
    texts_of,
    words_of,
)


def _reply(query: Query, progress: Progress) -> Reply:
    asked = _spread(_one_length(query))
    tokens: Any = query.get("corpus")
    answer = tl.loop(_without_search(asked), settings_of(asked), corpus=tokens)
    tone = WARN if answer.epochs > PASSES else GOOD
    corpus = [] if query.get("corpus") is None else ["--corpus", query["corpus"]]
    return Reply(
        document=answer.document(),
        headlines=tuple(_headlines(answer)),
        verdict=_verdict(answer),
        tone=BAD if answer.forecast.waits or answer.forecast.fits is False else tone,
        drawings=tuple(_drawings(answer)),
        values=texts_of(answer.run, query),
        unused=_unused(answer.run, query),
        remedies=() if query[FILE] else that_fit_devices(answer.run, answer.forecast, query, "cluster.count"),
        words=words_of("loop", asked, *corpus),
        python=python_of("loop", asked, **({"corpus": query["corpus"]} if corpus else {})),
        run_file=run_file_of(answer.run),
        notes=(*(() if query[FILE] else (spread_of(answer.run),)), *answer.remarks),
    )


def _one_length(query: Query) -> Query:
    """The query with steps in place of the default tokens, where steps are given."""
    if not query["recipe.steps"] or "recipe.tokens" in query.given:
        return query
    return replace(query, given={**query.given, "recipe.tokens": ""})


def _unused(run: Run, query: Query) -> dict[str, str]:
    """The fields that do not count, with the reason."""
    found, schedule = of_pasted(query), run.recipe.schedule
    if query["recipe.steps"] and "recipe.tokens" not in query.given:
        found["recipe.tokens"] = "steps are given"
    for name in ("final_ratio", "decay_fraction"):
        if not hasattr(schedule, name):
            found[f"recipe.schedule.{name}"] = f"a {schedule.kind} schedule has none"
    return found


def _spread(query: Query) -> Query:
    """The query with a layout and a batch for its devices, as nobody should wait for a search; a run file has its own.

    Parameters, gradients and optimizer state are sharded over all devices that the given axes leave.
    """
    source: Source = source_of(query)
    if query[FILE] or not isinstance(source, str | ModelSpec):
        return query
    settings = [each.partition("=") for each in sharded(source, settings_of(query))]
    return replace(query, given={**query.given, **{name: text for name, _, text in settings}})


def _verdict(answer: TrainingLoop) -> str:
    wrong = ["repeats its text, which is worth less each time"] if answer.epochs > PASSES else []
    wrong += ["does not fit in memory"] if answer.forecast.fits is False else []
    wrong += ["waits for its tokens"] if answer.forecast.waits else []
    return "; it ".join([headline_of(answer), *wrong])


def _without_search(query: Query) -> Source:
    """What the query is about; raises `InvalidInput` where its layout would have to be searched for."""
    source = source_of(query)
    if query[FILE] or "layout.auto" in query.overrides:
        refuse_search(resolve(source, settings_of(query), search=False))
    return source


def _headlines(answer: TrainingLoop) -> Iterator[Headline]:
    for formula in sorted(answer.formulas, key=lambda one: one.name != "steps"):
        value, said = getattr(answer, formula.name), f"{formula.formula} = {formula.numbers}"
        if formula.name == "corpus_nbytes":
            value = value[answer.token_dtype]
        of_it = {"source": formula.source, "said": "" if value is not None else "one at the end"}
        yield headline(f"data.{formula.name}", value, said, dtype=answer.token_dtype, **of_it)


def _drawings(answer: TrainingLoop) -> Iterator[Drawing]:
    yield Drawing(chart=schedule_chart(answer), table=schedule_table(answer))
    saved = answer.checkpointing
    if saved is not None and saved.lost:
        yield Drawing(chart=interval_chart(answer, saved), table=interval_table(saved))


DATA = calculator("data", _reply, {"recipe.schedule": one_of(("", *SCHEDULES))})
