"""The document of a budget's best use: what scaling laws say, and the run that it affords."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import groupby
from typing import Any

from trainledger.answers.pages.interval import between, chance, ends
from trainledger.answers.pages.optimal_figures import SHORT, besides, figures, short, size_of
from trainledger.answers.pages.plain_data import plain
from trainledger.answers.plan import BASES
from trainledger.forecast.plan.affordable import Affordable, Iteration
from trainledger.forecast.plan.optimal import Choice, OffOptimum, Optimal, Repeated, Served
from trainledger.forecast.plan.scaling_law import Between
from trainledger.forecast.predict.device_memory import TENSORS_ALONE
from trainledger.forecast.predict.interval import Interval
from trainledger.report.document import Cell, Document, Section, Table, details, notes, section, sections
from trainledger.report.table import sentence
from trainledger.spec.layout import Layout
from trainledger.spec.parts import chosen, field_at, table_of
from trainledger.spec.recipe import Recipe
from trainledger.spec.run_text import as_override
from trainledger.spec.units import (
    KILO,
    SECONDS_PER_DAY,
    format_amount,
    format_count,
    format_flops,
    format_nbytes,
    format_percent,
    format_seconds,
)

# Fields of the recipe that the sentences of the affordable run have words for.
_IN_WORDS = (
    "seq_len", "global_batch", "micro_batch", "precision", "activation_checkpointing", "steps", "tokens",
)  # fmt: skip


def page(answer: Optimal) -> Document:
    """The answer, from the law to the run that the budget affords."""
    hint = "With --device and --count or --days: what fits there, and what its predicted speed affords."
    found = answer.affordable
    formula, by_law, *cost = _headline(answer)
    return Document(
        title="What the budget is best spent on",
        verdict=sentence(_asked(answer) or by_law),
        sections=sections(
            (formula, *cost),
            _laws(answer),
            hint if answer.budget.seconds is None else None,
            None if found is None else section("", _affords(answer, found)),
            *details("the laws", _law_notes(answer)),
            *details("off the optimum", _off(answer)),
            None if answer.served is None else _served(answer, answer.served),
            None if answer.repeated is None else _repeated(answer.repeated),
            *details("the run that is afforded", None if found is None else _affordable(answer, found)),
            *details("sources", _sources(answer)),
        ),
        about=tuple(about(answer)),
        data=lambda: _data(answer),
        figures=lambda: figures(answer),
    )


def _asked(answer: Optimal) -> str:
    """The model at the predicted speed, else the one asked for, or that serves best; empty where it is the law's."""
    found = answer.affordable
    if answer.served is None and found is not None and found.tokens is not None:
        size, tokens = (format_count(short(count)) for count in (found.parameters, found.tokens))
        asked = "As asked, at" if answer.asked is not None else "At"
        return f"{asked} the predicted speed: {size} parameters on {tokens} tokens"
    for what, model in (("As asked", answer.asked), ("Cheapest to train and serve", answer.served)):
        if model is not None:
            size, tokens = (format_count(short(count)) for count in (model.parameters, model.tokens))
            return f"{what}: {size} parameters on {tokens} tokens"
    return ""


def _headline(answer: Optimal) -> Iterator[str]:
    yield answer.budget.formula
    yield (
        f"By {answer.chosen.law.title}: {format_count(short(answer.parameters))} parameters on "
        f"{format_count(short(answer.tokens))} tokens"
    )
    hours, money = answer.budget.device_hours, answer.budget.money
    if money is not None and hours is not None:
        yield f"{format_amount(hours)} device-hours cost {format_amount(money)}"


def _each(ratio: float) -> str:
    """Tokens for each parameter, three digits."""
    return f"{ratio:.3g}" if ratio < KILO else format_count(short(ratio))


def _laws(answer: Optimal) -> Table:
    rows = tuple(
        (
            SHORT.get(each.law.name, each.law.name),
            _count(each.parameters),
            format_count(short(each.tokens)),
            f"{each.ratio:.3g}",
            _loss(each.loss),
        )
        for each in answer.choices
    )
    return Table("laws", ("law", "parameters N", "tokens D", "D/N", "loss"), rows, align="lrrrr")


def _law_notes(answer: Optimal) -> list[str]:
    lines = [f"Losses by {answer.loss_law.title}, nats per token of its own data; ranges are {_ranges(answer)}."]
    noted = [each.law for each in answer.choices if each.law.note]
    return [*lines, *(f"{SHORT.get(law.name, law.name)}: {law.note}." for law in noted)]


def _ranges(answer: Optimal) -> str:
    means = dict.fromkeys(each.parameters.means for each in answer.choices if each.parameters.means)
    return " or ".join(means) + "; without one, none is known" if means else "not known"


def _count(between: Between) -> str:
    value = format_count(short(between.value))
    if between.low is None or between.high is None:
        return value
    return f"{value} ({format_count(_round(between.low))} to {format_count(_round(between.high))})"


def _round(value: float) -> float:
    return float(f"{value:.2g}")


def _loss(between: Between) -> str:
    if between.low is None or between.high is None:
        return f"{between.value:.3f}"
    return f"{between.value:.3f} ±{(between.high - between.low) / 2:.3f}"


def _off(answer: Optimal) -> Section:
    rows = [_off_row(each) for each in answer.off]
    if answer.asked is not None:
        rows.append(_off_row(answer.asked, "asked: "))
    columns = ("D/N", "N", "D", "loss", "above best", "more compute")
    found = Table("off the optimum", columns, tuple(rows), align="rrrrrr")
    meaning = "more compute: than the least compute that reaches the same loss."
    return section("Off the optimum with the same budget (losses by the loss law)", found, meaning)


def _off_row(each: OffOptimum, before: str = "") -> tuple[Cell, ...]:
    return (
        f"{before}{each.tokens / each.parameters:,.4g}",
        format_count(short(each.parameters)),
        format_count(short(each.tokens)),
        f"{each.loss:.3f}",
        f"+{each.penalty:.3f}",
        format_percent(each.overhead),
    )


def _served(answer: Optimal, found: Served) -> tuple[str, ...]:
    best = answer.loss_law.parameters(answer.budget.flops).value
    return (
        f"With {format_count(found.inference_tokens)} tokens served (6 N D + 2 N D_inference, same loss): "
        f"{format_count(short(found.parameters))} parameters on {format_count(short(found.tokens))} tokens, "
        f"{found.tokens / found.parameters:.3g} per parameter, instead of {format_count(short(best))}.",
        f"Training {format_flops(found.training_flops)} + serving {format_flops(found.inference_flops)} = "
        f"{format_flops(found.total_flops)}, {format_percent(found.saved)} less in all than the optimum of training "
        "alone. FLOPs only: serving reaches less of the peak (Sardana et al. 2023, arXiv 2401.00448).",
    )


def _repeated(found: Repeated) -> str:
    unique = format_count(found.unique)
    if found.epochs <= 1:
        line = f"{unique} tokens are enough: nothing is repeated"
    else:
        line = (
            f"With {unique} tokens in all: {format_count(short(found.parameters))} parameters on "
            f"{format_count(short(found.tokens))}, {found.epochs:.1f} epochs, loss {found.loss:.3f}; the "
            f"{format_count(short(found.unconstrained_parameters))} that are best with endless data reach "
            f"{found.loss_of_it:.3f}"
        )
    return sentence(f"{line} ({found.law.source})")


def _field(value: object) -> str:
    """A field of a layout; layers of stages as how many have how many."""
    if not isinstance(value, tuple):
        return str(value)
    runs = ((each, len(list(alike))) for each, alike in groupby(value))
    return " + ".join(f"{count} x {each}" for each, count in runs)


def _affordable(answer: Optimal, found: Affordable) -> Section:
    run = found.run
    spec, recipe = run.model, run.recipe
    changed = [
        f"{each.name} {_field(getattr(run.layout, each.name))}"
        for each in fields(run.layout)
        if getattr(run.layout, each.name) != each.default
    ]
    rows = tuple(
        (
            f"{at + 1}",
            format_count(short(each.wanted)),
            format_count(short(each.parameters)),
            "not known" if each.mfu is None else format_percent(each.mfu),
            "" if each.tokens is None else format_count(short(each.tokens)),
        )
        for at, each in enumerate(found.iterations)
    )
    lines = []
    if found.best not in (-1, len(found.iterations) - 1):
        lines.append(
            f"The answer is iteration {found.best + 1}, whose loss is the lowest: models of nearly one size differ in "
            "how well they can be spread over the devices."
        )
    settings = "".join(f", {each}" for each in _settings(recipe))
    memory = f"{format_nbytes(found.memory.nbytes)} of {format_nbytes(found.memory.usable_nbytes)}"
    alone = f"; {TENSORS_ALONE}" if found.memory.tensors_alone else ""
    if found.forecast.chance_of_fitting is not None:
        alone += f" (fits: {chance(found.forecast.chance_of_fitting)})"
    lines += [
        f"d_model {spec.d_model}, {spec.n_layers} layers, {spec.attention.n_heads} heads ({spec.kv_heads} key-value), "
        f"d_ff {spec.feed_forward.d_ff}, vocabulary {spec.vocab_size:,}: {found.family}.",
        f"{', '.join(changed) or 'one device'}; {recipe.precision.kind}, micro-batch {recipe.micro_batch} of "
        f"{recipe.seq_len:,} tokens, {recipe.global_batch:,} sequences a step, recomputation "
        f"{recipe.activation_checkpointing.kind}{settings}. A device needs {memory}{alone}.",
        *(sentence(each) for each in (found.note, *found.forecast.notes) if each),
    ]
    what = "What fits" if answer.asked is None else "What fits of the requested model"
    columns = ("iteration", "N wanted", "N", "6ND / peak", "tokens of steps alone")
    table = Table("iterations", columns, rows, align="rrrrr")
    return section(f"{what}, and what its predicted speed affords", table, lines)


def _settings(recipe: Recipe) -> list[str]:
    """What a recipe has other than its defaults and what is said in words, as ``--set`` takes it."""
    return [as_override(f"recipe.{path}", value) for path, value in chosen(recipe).items() if path not in _IN_WORDS]


def _affords(answer: Optimal, found: Affordable) -> Iterator[str]:
    """The step of the affordable run, and the run; as bounds where the device's efficiency is not known."""
    forecast = found.forecast
    basis = forecast.basis.get("step_seconds", "")
    if forecast.mfu is not None and forecast.tokens_per_second is not None and forecast.step_seconds is not None:
        step = format_seconds(forecast.step_seconds) + between(forecast, "step_seconds", format_seconds)
        yield (
            f"Step {step}, {forecast.tokens_per_second:,.0f} tokens/s, MFU "
            f"{format_percent(forecast.mfu)} with attention counted (the rule's 6 N D leaves it out), "
            f"{BASES.get(basis, basis)}."
        )
    if found.tokens is not None and found.ratio is not None and forecast.total_seconds is not None:
        loss = answer.loss_law.loss_between(found.parameters, found.tokens)
        of_step, tokens = forecast.intervals.get("step_seconds"), ""
        if of_step is not None and forecast.step_seconds is not None:
            slow, fast = (found.tokens * forecast.step_seconds / each for each in (of_step.high, of_step.low))
            tokens = f" ({ends(Interval(slow, fast), format_count)})"
        affords, at_best = ("affords at most", " at best") if basis == "bound" else ("affords", "")
        yield (
            f"So the budget {affords} {format_count(short(found.parameters))} parameters on "
            f"{format_count(short(found.tokens))} tokens{tokens} ({_each(found.ratio)} each) in "
            f"{forecast.total_seconds / SECONDS_PER_DAY:.4g} days, including evaluation, checkpoints and failures: "
            f"loss {_loss(loss)}{at_best}."
        )


def _sources(answer: Optimal) -> Section:
    lines = [
        f"{SHORT.get(each.law.name, each.law.name)}: {each.law.source}, read {each.law.date}" for each in answer.choices
    ]
    if answer.loss_law.covariance_source:
        lines.append(f"Ranges of the refit: covariance {answer.loss_law.covariance_source}")
    return section("Sources", notes(lines))


def _data(answer: Optimal) -> dict[str, Any]:
    budget = answer.budget
    return {
        "budget": {
            **plain(budget, less={type(budget): ("device",)}),
            "device": None if budget.device is None else budget.device.name,
            "formula": budget.formula,
        },
        "law": answer.law,
        "parameters": answer.parameters,
        "tokens": answer.tokens,
        "choices": [
            {
                **plain(each, less={Choice: ("law",)}),
                "law": each.law.name,
                "tokens_per_parameter": each.ratio,
                **{name: getattr(each.law, name) for name in ("title", "source", "date", "note")},
            }
            for each in answer.choices
        ],
        "loss_law": answer.loss_law.name,
        "off_optimum": plain(answer.off),
        "asked": plain(answer.asked),
        "served": plain(answer.served, more={Served: ("total_flops", "saved")}),
        "repeated": None if answer.repeated is None else _repeated_data(answer.repeated),
        "affordable": None if answer.affordable is None else _affordable_data(answer.affordable),
    }


def _repeated_data(found: Repeated) -> dict[str, Any]:
    return {**plain(found, more={Repeated: ("epochs",)}, less={Repeated: ("law",)}), "law": found.law.name}


def _affordable_data(found: Affordable) -> dict[str, Any]:
    """A run file's sections but for the data, and what is predicted."""
    spec, recipe, layout = found.run.model, found.run.recipe, found.run.layout
    changed = [each.name for each in fields(layout) if getattr(layout, each.name) != getattr(Layout(), each.name)]
    shown = ("seq_len", "global_batch", "micro_batch", "precision", "activation_checkpointing", "compile")
    return {
        "family": found.family,
        "parameters": found.parameters,
        "tokens": found.tokens,
        "tokens_per_parameter": found.ratio,
        "mfu_6nd": found.mfu,
        **{name: getattr(found.forecast, name) for name in ("mfu", "tokens_per_second", "step_seconds")},
        "basis": found.forecast.basis.get("step_seconds"),
        "intervals": plain(found.forecast.intervals),
        "chance_of_fitting": found.forecast.chance_of_fitting,
        "model": table_of(spec),
        "recipe": {name: field_at(recipe, name) for name in shown},
        "layout": {name: plain(getattr(layout, name)) for name in changed},
        "memory_nbytes": found.memory.nbytes,
        "usable_nbytes": found.memory.usable_nbytes,
        "iterations": [
            {"mfu_6nd": each.mfu, **plain(each, less={Iteration: ("run", "mfu")})} for each in found.iterations
        ],
        "notes": [*([found.note] if found.note else []), *found.forecast.notes],
    }


def about(answer: Optimal) -> list[str]:
    """What the page of the figures says above them: the budget, the rule's answer, and what else was asked."""
    named = [f"{name}: {size_of(each)}, loss {each.loss:.3f}." for name, each in besides(answer)]
    rule = f"By {answer.chosen.law.title}: {format_count(short(answer.parameters))} parameters on "
    return [f"{answer.budget.formula}.", f"{rule}{format_count(short(answer.tokens))} tokens.", *named]
