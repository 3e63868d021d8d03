"""Memory: what a training step needs of a device, category by category, and whether it fits.

The devices are those of the layout's axes, so that no layout is searched for while a slider moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import trainledger as tl
from trainledger.answers.explain import account_terms
from trainledger.answers.pages import interval
from trainledger.answers.pages.device_memory import device_chart, device_table
from trainledger.answers.pages.memory import memory_chart, phases_table
from trainledger.answers.pages.optimizer import optimizers_table
from trainledger.answers.pages.peak import place
from trainledger.answers.pages.published import NEAREST
from trainledger.answers.plan import planned, why_impossible
from trainledger.forecast.explain import account as explained
from trainledger.forecast.explain.account import Part
from trainledger.forecast.explain.symbols import Symbolic
from trainledger.forecast.plan.fit import Found
from trainledger.forecast.plan.plan import Plan
from trainledger.forecast.plan.quantity import read
from trainledger.ledger.memory.timeline import Moment, timeline
from trainledger.report.document import Document, section
from trainledger.spec.layout import AXES
from trainledger.spec.optimizers import OPTIMIZERS
from trainledger.spec.precision import PRECISIONS
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.recipe import ATTENTIONS
from trainledger.spec.run import Run
from trainledger.spec.runfile import parse_toml
from trainledger.spec.savings import CHECKPOINTING, LOSSES
from trainledger.spec.units import counted, format_nbytes, format_percent, parse_count
from trainledger.web.calculator import BAD, GOOD, UNKNOWN, Drawing, Headline, Progress, Reply, calculator, headline
from trainledger.web.field import FILE, Query, one_of, size_of
from trainledger.web.headlines import of_memory, of_time
from trainledger.web.remedies import likely, that_fit, too_large
from trainledger.web.run import (
    more_positions,
    of_pasted,
    python_of,
    run_file_of,
    sequence_of,
    texts_of,
    without_search,
    words_of,
)

_TO_A_STAGE = 4  # micro-batches: Huang et al. 2019, GPipe (arXiv 1811.06965), section 2.3


def _reply(query: Query, progress: Progress) -> Reply:
    asked = completed(query)
    run = without_search(asked)
    plan = planned(run)
    document, problem, fits = plan.document(), why_impossible(plan), plan.forecast.fits
    account, moments = explained.of_numbers(run, plan.heaviest), timeline(plan.heaviest)
    largest = None
    if query["largest"] == "yes":
        largest = tl.fit(run, of="micro-batch", changes=False)["micro-batch"]
    return Reply(
        document=_document(document, explained.memory(account, moments), largest, run),
        headlines=(*of_memory(plan), *_of_account(account), *of_time(plan), *_of_largest(largest)),
        verdict=too_large(plan.forecast) or (_fits(plan) if problem is None else str(problem)),
        tone=BAD if problem is not None else GOOD if fits and likely(plan.forecast) else UNKNOWN,
        drawings=tuple(_drawings(plan, moments)),
        values=texts_of(run, query)
        | {"recipe.micro_batch": str(run.device_batch), "accumulation": str(run.grad_accum)},
        unused=_unused(run, query),
        remedies=that_fit(run, plan.forecast, query),
        words=words_of("plan", asked),
        python=python_of("plan", asked),
        run_file=run_file_of(run),
        notes=(_laid_out(run), *_precision(asked, query, run), *more_positions(asked, query), _at_the_peak(plan)),
    )


def completed(query: Query) -> Query:
    """The query with the fields that follow from others: the devices and the sequences of a step.

    A run file that is pasted has its own; its devices follow the axes that are given beside it.
    """
    given = dict(query.given)
    if text := query[FILE]:
        if "accumulation" in given:
            rule = "is of a model without a run file; of a run file set recipe.global_batch"
            raise InvalidInput([Problem("accumulation", given["accumulation"], rule)])
        if any(f"layout.{axis}" in given for axis in AXES):
            layout = parse_toml(text, "run file").get("layout")
            given = {"cluster.count": _devices(layout if isinstance(layout, Mapping) else {}, given)} | given
        return replace(query, given=given)
    overrides = query.overrides
    given = sequence_of(query) | given
    ranks, stages = size_of(overrides.get("layout.shard")), size_of(overrides.get("layout.pipeline"))
    if ranks > 1 and not any(name.startswith("recipe.lora") for name in overrides):
        given = {"recipe.precision": "bf16-sharded"} | given
    rounds = _rounds(query) or (1 if stages == 1 else _TO_A_STAGE * stages)
    batch = size_of(overrides.get("recipe.micro_batch")) * rounds * ranks * size_of(overrides.get("layout.replicate"))
    given = {"recipe.global_batch": str(batch), "cluster.count": _devices({}, overrides)} | given
    return replace(query, given=given)


def _precision(asked: Query, query: Query, run: Run) -> tuple[str, ...]:
    """The note that the precision follows from the shard ranks; empty where it is given or does not."""
    if "recipe.precision" not in asked.given or "recipe.precision" in query.given:
        return ()
    return (
        f"The precision is {run.recipe.precision.kind} because there are shard ranks: FSDP keeps shards in fp32 and "
        "gathers them in bf16. One rank would have bf16-mixed (autocast). A precision that you choose stays.",
    )


def _unused(run: Run, query: Query) -> dict[str, str]:
    """The fields that do not count, with the reason."""
    found = of_pasted(query)
    if query[FILE]:
        found["accumulation"] = "the run file has recipe.global_batch"
    if run.layout.shard == 1:
        found["layout.zero"] = "there is one shard rank"
    if run.layout.tensor == 1:
        found["layout.sequence_parallel"] = "there is one tensor rank"
    if run.model.experts is None:
        found["layout.expert"] = "the model has no experts"
    return found


def _rounds(query: Query) -> int | None:
    """The micro-batches of a step where they are given."""
    problems: list[Problem] = []
    rounds: int | None = read("accumulation", query.get("accumulation"), parse_count, problems, least=1, most=10**6)
    if problems:
        raise InvalidInput(problems)
    return rounds


def _devices(written: Mapping[str, Any], given: Mapping[str, str]) -> str:
    return str(prod(size_of(given.get(f"layout.{axis}", written.get(axis))) for axis in AXES))


def _fits(plan: Plan) -> str:
    """What is needed of what is usable, and how much of that is left."""
    forecast = plan.forecast
    if forecast.usable_nbytes is None or forecast.device_nbytes is None:
        needed = format_nbytes(forecast.peak_nbytes or 0)
        return f"A step needs {needed}; the memory of {plan.run.cluster.device} is not known."
    left = forecast.usable_nbytes - forecast.device_nbytes
    share = format_percent(left / forecast.usable_nbytes)
    of = f"{format_nbytes(forecast.device_nbytes)} of {format_nbytes(forecast.usable_nbytes)} usable"
    likely = interval.fits(forecast.fits, forecast.chance_of_fitting)
    return f"{likely[0].upper()}{likely[1:]}: {of}, {format_nbytes(left)} ({share}) of headroom."


def _of_account(account: Symbolic) -> list[Headline]:
    """Parameters, gradients, optimizer state and saved activations."""
    lines = (*explained.states(account), explained.saved(account))
    return [
        Headline(
            name=f"{line.what.replace(' ', '_')}_nbytes", title=line.what, value=line.value, unit="nbytes",
            formula=line.formula if line.numbers == line.formula else f"{line.formula} = {line.numbers}",
            basis=line.basis, source=line.source,
        )
        for line in lines
    ]  # fmt: skip


def _of_largest(found: Found | None) -> list[Headline]:
    if found is None:
        return []
    beyond = ""
    if found.beyond is not None:
        beyond = f"; {found.beyond_size:,} needs {format_nbytes(found.beyond.nbytes)}"
    fits = "none fits" if found.memory is None else f"needs {format_nbytes(found.memory.nbytes)}"
    said, formula = "" if found.size else "none fits", f"{found.size or 0:,} {fits}{beyond}"
    return [headline("memory.largest_micro_batch", found.size, formula, said=said, source=found.note)]


def _document(document: Document, memory: tuple[Part, ...], largest: Found | None, run: Run) -> Document:
    """The plan's document: its memory line by line, each optimizer, the rest; the data have the largest micro-batch."""
    lines = section("Memory line by line", *account_terms("memory", memory))
    first = [each for each in document.sections if each.title.startswith(("Memory", NEAREST))]
    rest = [each for each in document.sections if each not in first]
    optimizers = section("Optimizers: bytes per parameter", optimizers_table(run.model, run.recipe))
    sections = (*first[:1], lines, *first[1:], optimizers, *rest)
    more = {} if largest is None else {"largest_micro_batch": largest.size}
    return replace(document, sections=sections, data=lambda: {**document.data(), **more})


def _drawings(plan: Plan, moments: Sequence[Moment]) -> list[Drawing]:
    """What stands in memory at the peak, and the step up to it and after it."""
    forecast = plan.forecast
    usable = plan.memory_nbytes if forecast.usable_nbytes is None else forecast.usable_nbytes
    at_peak, device = forecast.peak_by_category, plan.device_memory
    bar = device_chart(at_peak, device, usable, "Memory of a device at the peak")
    over_time = memory_chart(plan.heaviest, "Memory of the tensors over one step", usable, moments)
    return [
        Drawing(chart=bar, table=device_table(at_peak, device)),
        Drawing(chart=over_time, table=phases_table(moments)),
    ]


def _laid_out(run: Run) -> str:
    """The devices and the batch that follow from the fields."""
    axes = " x ".join(f"{axis} {getattr(run.layout, axis):,}" for axis in AXES if getattr(run.layout, axis) > 1)
    spread = f"{run.cluster.count:,} devices: {axes}" if axes else "One device"
    recipe = run.recipe
    batch = (
        f"{run.grad_accum:,} x {counted(run.device_batch, 'sequence')} of {recipe.seq_len:,} tokens for each replica"
    )
    return f"{spread}; {batch}. No layout is searched for here: the calculator of layouts does that."


def _at_the_peak(plan: Plan) -> str:
    """Which moment the peak is, since what is not alive then is no part of it."""
    entry, present = plan.peak.entry, plan.peak.by_category
    gone = [name for name in ("gradients", "activations") if not present.get(name)]
    without = f", when there are no {' and no '.join(gone)}" if gone else ""
    return f"The peak is at {place(entry)}{without}."


_CHOICES: dict[str, Iterable[str]] = {
    "precision": PRECISIONS, "optimizer": OPTIMIZERS, "activation_checkpointing": CHECKPOINTING,
    "attention": ATTENTIONS, "loss": LOSSES,
}  # fmt: skip
MEMORY = calculator("memory", _reply, {f"recipe.{name}": one_of(names) for name, names in _CHOICES.items()})
