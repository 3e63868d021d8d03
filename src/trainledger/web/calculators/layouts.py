"""Layouts: the quickest ways to spread a run over a cluster, and the step and the memory of the one that is chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import trainledger as tl
from trainledger.answers.defaults import SEARCH
from trainledger.answers.load import resolve
from trainledger.answers.pages.heading import layout_name, recomputation
from trainledger.answers.recent import Recent
from trainledger.forecast.plan.layouts.grid import FIELDS, KNOWN
from trainledger.forecast.plan.layouts.result import Layouts, ScoredLayout
from trainledger.forecast.plan.plan import Plan
from trainledger.report.document import Document, Section, Table, Text
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.reading import value_of
from trainledger.spec.units import format_nbytes, format_seconds
from trainledger.web.calculator import BAD, GOOD, Drawing, Headline, Progress, Remedy, Reply, calculator, headline
from trainledger.web.field import Query
from trainledger.web.run import of_pasted, python_of, run_file_of, settings_of, source_of, words_of

MOST_DEVICES = 16_384  # a search over more takes a minute
SECONDS = 5  # for full accounts of the best
_KEPT = 10  # layouts of a search
_OF_RECIPE = ("micro_batch", "activation_checkpointing")
_FIXABLE = {f"{'recipe' if field in _OF_RECIPE else 'layout'}.{field}": field for field in FIELDS}
_FOUND: Recent[frozenset[tuple[str, str]], Layouts] = Recent(10)  # to choose another layout asks for no other search


def _reply(query: Query, progress: Progress) -> Reply:
    fixed = {_FIXABLE[path]: text for path, text in query.overrides.items() if path in _FIXABLE}
    free = replace(query, given={name: text for name, text in query.given.items() if name not in _FIXABLE})
    flags = [word for name, text in fixed.items() for word in ("--fix", f"{name}={text}")]
    more: dict[str, Any] = {"fixed": _values(fixed)} if fixed else {}
    made = Reply(
        document=Document("", ()),
        values={},
        unused=of_pasted(query),
        remedies=(),
        words=words_of("layouts", free, *flags),
        python=python_of("layouts", free, **more),
    )
    if find_spec("numpy") is None:
        return replace(
            made, verdict="The search of layouts needs numpy, which is not here: copy the command and run it."
        )
    layouts = _found(query, free, fixed, progress)
    made = replace(made, document=layouts.document(), notes=layouts.notes)
    if layouts.best is None:
        none = f"No layout of {layouts.run.model.name} fits {layouts.devices:,} x {layouts.run.cluster.device}."
        return replace(made, verdict=none, tone=BAD, remedies=tuple(_remedies(layouts, free, flags)))
    chosen = _chosen(layouts, query["choose"])
    plan = tl.plan(chosen.run)
    table = layouts.document().tables["ranked"]
    drawn = [Drawing(chart=figure, table=table) for figure in layouts.document().figures()]
    return replace(
        made,
        document=_with_chosen(layouts, chosen, plan),
        headlines=tuple(_headlines(layouts, chosen, plan)),
        verdict=f"{layout_name(chosen.run.layout)}, micro-batches of {chosen.run.recipe.micro_batch}, "
        f"{recomputation(chosen.run.recipe)}: {format_seconds(chosen.seconds)} a step",
        tone=GOOD,
        drawings=(*drawn, *_of_chosen(plan)),
        run_file=run_file_of(chosen.run),
    )


def _remedies(layouts: Layouts, free: Query, flags: Sequence[str]) -> Iterator[Remedy]:
    """Nothing fixed, and more devices."""
    if flags:
        fields = dict.fromkeys(_FIXABLE, "")
        yield Remedy(title="Fix nothing of the layout", fields=fields, command=words_of("layouts", free))
    for more in (2, 4, 8):
        if (count := more * layouts.devices) <= MOST_DEVICES:
            fields = {"cluster.count": str(count)}
            command = words_of("layouts", replace(free, given={**free.given, **fields}), *flags)
            yield Remedy(title=f"Take {count:,} devices", fields=fields, command=command)


def _found(query: Query, free: Query, fixed: dict[str, str], progress: Progress) -> Layouts:
    """The search of a query, whichever of its layouts is chosen."""
    key = frozenset((name, query[name]) for name in query.fields if name != "choose") | {*query.overrides.items()}
    if known := _FOUND.get(key):
        return known
    source, settings = source_of(query), settings_of(free)
    count = resolve(source, (*settings, "layout.auto=true"), purpose=SEARCH, search=False).cluster.count
    if count > MOST_DEVICES:
        rule = f"must be at most {MOST_DEVICES:,} here; trainledger layouts searches more"
        raise InvalidInput([Problem("cluster.count", count, rule, MOST_DEVICES)])
    layouts = tl.layouts(source, settings, fixed=_values(fixed), keep=_KEPT, limit_seconds=SECONDS, progress=progress)
    if not layouts.interrupted:
        _FOUND.keep(key, layouts)
    return layouts


def _values(fixed: dict[str, str]) -> dict[str, Any]:
    return {name: value_of(KNOWN[name], text) for name, text in fixed.items()}


def _chosen(layouts: Layouts, text: str) -> ScoredLayout:
    """The ranked layout of a number, counted from 1; the simplest of the quick ones where none is given."""
    if not text:
        return layouts.simplest or layouts.ranked[0]
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= len(layouts.ranked)):
        near = len(layouts.ranked) if text.isascii() and text.isdigit() and int(text) else 1
        raise InvalidInput([Problem("choose", text, f"must be a number of 1 to {len(layouts.ranked)}", near)])
    return layouts.ranked[int(text) - 1]


def _headlines(layouts: Layouts, chosen: ScoredLayout, plan: Plan) -> Iterator[Headline]:
    forecast = plan.forecast
    causes = " + ".join(f"{format_seconds(bar.seconds)} {bar.cause}" for bar in forecast.waterfall if bar.nanoseconds)
    formula = causes or "the slowest rank's operations on its streams"
    yield headline("layouts.seconds", chosen.seconds, formula, basis=layouts.basis)
    parts = " + ".join(f"{format_nbytes(each)} {name}" for name, each in forecast.peak_by_category.items() if each)
    outside = format_nbytes(chosen.device_nbytes - chosen.peak_nbytes)
    formula, basis = f"{parts} + {outside} outside of the tensors", forecast.basis.get("device_nbytes", "exact")
    yield headline("layouts.device_nbytes", chosen.device_nbytes, formula, basis=basis)
    if chosen.mfu is not None and forecast.model_flops and forecast.peak_flops_per_second:
        rate = f"({chosen.seconds:.4g} s x {layouts.devices:,} x {forecast.peak_flops_per_second:.4g} FLOP/s)"
        formula = f"model FLOPs / (step x devices x peak) = {forecast.model_flops:.4g} / {rate}"
        yield headline("plan.mfu", chosen.mfu, formula, basis=layouts.basis)
    fitting = f"{layouts.fitting:,} may fit, {layouts.accounted:,} accounted for in full"
    formula = f"{layouts.searched:,} in the grid, {layouts.allowed:,} obey the rules, {fitting}"
    yield headline("layouts.searched", layouts.searched, formula)


def _with_chosen(layouts: Layouts, chosen: ScoredLayout, plan: Plan) -> Document:
    """The document of the search, with the memory of the chosen layout's ranks and its plan among the data."""
    made, own = layouts.document(), plan.document()
    memory = own.tables["memory"]
    of_ranks = Section(f"Memory of the ranks of {chosen.title}", (memory, Text((", ".join(chosen.settings),))))
    return replace(made, sections=(of_ranks, *made.sections), data=lambda: {**made.data(), "chosen": dict(own.data())})


def _of_chosen(plan: Plan) -> list[Drawing]:
    """Where the time of the chosen layout's step goes, its memory, and its timeline."""
    document = plan.document()
    causes = tuple(
        (bar.cause, bar.seconds, bar.seconds / (plan.forecast.step_seconds or 1))
        for bar in plan.forecast.waterfall
        if bar.nanoseconds
    )
    time = Table("time", ("cause", "seconds", "share"), causes, units=("", "seconds", "share"))
    memory = document.tables["memory"]
    return [
        Drawing(chart=figure, table=memory if figure.title.startswith("Memory") else time)
        for figure in document.figures()
    ]


LAYOUTS = calculator("layouts", _reply)
