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
_IN_WORDS = ("seq_len", "global_batch", "micro_batch", "precision", "activation_checkpointing", "steps", "tokens")


def page(answer: Optimal) -> Document:
    """The answer, from the law to the run that the budget affords."""
    hint = "With --device and --count or --days: what fits there, and what its predicted speed affords."
    affordable = answer.affordable
    formula, by_law, *cost = _headline(answer)
    return Document(
        title="What the budget is best spent on",
        verdict=sentence(_asked(answer) or by_law),
        sections=sections(
            (formula, *cost),
            _laws(answer),
            hint if answer.budget.seconds is None else None,
            None if affordable is None else section("", _affords(answer, affordable)),
            *details("the laws", _law_notes(answer)),
            *details("off the optimum", _off(answer)),
            None if answer.served is None else _served(answer, answer.served),
            None if answer.repeated is None else _repeated(answer.repeated),
            *details("the run that is afforded", None if affordable is None else _affordable(answer, affordable)),
            *details("sources", _sources(answer)),
        ),
        about=tuple(about(answer)),
        data=lambda: _data(answer),
        figures=lambda: figures(answer),
    )


_NEAR = 0.05  # of tokens for each parameter


def _asked(answer: Optimal) -> str:
    """The model at the predicted speed, else the one asked for, or that serves best; empty where it is the law's."""
    affordable = answer.affordable
    if answer.served is None and affordable is not None and affordable.tokens is not None:
        size, tokens = (format_count(short(count)) for count in (affordable.parameters, affordable.tokens))
        asked = "As asked, at" if answer.asked is not None else "At"
        said = f"{asked} the predicted speed: {size} parameters on {tokens} tokens"
        each = affordable.tokens / affordable.parameters
        if answer.asked is None and not affordable.note and abs(each / answer.chosen.ratio - 1) > _NEAR:
            said += f" ({each:.3g} each, {answer.chosen.ratio:.3g} by the law: no size of the family is nearer)"
        return said
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
            SHORT.get(choice.law.name, choice.law.name),
            _count(choice.parameters),
            format_count(short(choice.tokens)),
            f"{choice.ratio:.3g}",
            _loss(choice.loss),
        )
        for choice in answer.choices
    )
    return Table("laws", ("law", "parameters N", "tokens D", "D/N", "loss"), rows, align="lrrrr")


def _law_notes(answer: Optimal) -> list[str]:
    lines = [f"Losses by {answer.loss_law.title}, nats per token of its own data; ranges are {_ranges(answer)}."]
    noted = [choice.law for choice in answer.choices if choice.law.note]
    return [*lines, *(f"{SHORT.get(law.name, law.name)}: {law.note}." for law in noted)]


def _ranges(answer: Optimal) -> str:
    means = dict.fromkeys(choice.parameters.means for choice in answer.choices if choice.parameters.means)
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
    rows = [_off_row(off_optimum) for off_optimum in answer.off]
    if answer.asked is not None:
        rows.append(_off_row(answer.asked, "asked: "))
    columns = ("D/N", "N", "D", "loss", "above best", "more compute")
    table = Table("off the optimum", columns, tuple(rows), align="rrrrrr")
    meaning = "more compute: than the least compute that reaches the same loss."
    return section("Off the optimum with the same budget (losses by the loss law)", table, meaning)


def _off_row(each: OffOptimum, before: str = "") -> tuple[Cell, ...]:
    return (
        f"{before}{each.tokens / each.parameters:,.4g}",
        format_count(short(each.parameters)),
        format_count(short(each.tokens)),
        f"{each.loss:.3f}",
        f"+{each.penalty:.3f}",
        format_percent(each.overhead),
    )


def _served(answer: Optimal, served: Served) -> tuple[str, ...]:
    best = answer.loss_law.parameters(answer.budget.flops).value
    return (
        f"With {format_count(served.inference_tokens)} tokens served (6 N D + 2 N D_inference, same loss): "
        f"{format_count(short(served.parameters))} parameters on {format_count(short(served.tokens))} tokens, "
        f"{served.tokens / served.parameters:.3g} per parameter, instead of {format_count(short(best))}.",
        f"Training {format_flops(served.training_flops)} + serving {format_flops(served.inference_flops)} = "
        f"{format_flops(served.total_flops)}, {format_percent(served.saved)} less in all than the optimum of training "
        "alone. FLOPs only: serving reaches less of the peak (Sardana et al. 2023, arXiv 2401.00448).",
    )


def _repeated(repeated: Repeated) -> str:
    unique = format_count(repeated.unique)
    if repeated.epochs <= 1:
        line = f"{unique} tokens are enough: nothing is repeated"
    else:
        line = (
            f"With {unique} tokens in all: {format_count(short(repeated.parameters))} parameters on "
            f"{format_count(short(repeated.tokens))}, {repeated.epochs:.1f} epochs, loss {repeated.loss:.3f}; the "
            f"{format_count(short(repeated.unconstrained_parameters))} that are best with endless data reach "
            f"{repeated.loss_of_it:.3f}"
        )
    return sentence(f"{line} ({repeated.law.source})")


def _field(value: object) -> str:
    """A field of a layout; layers of stages as how many have how many."""
    if not isinstance(value, tuple):
        return str(value)
    runs = ((each, len(list(alike))) for each, alike in groupby(value))
    return " + ".join(f"{count} x {each}" for each, count in runs)


def _affordable(answer: Optimal, affordable: Affordable) -> Section:
    run = affordable.run
    spec, recipe = run.model, run.recipe
    changed = [
        f"{field.name} {_field(getattr(run.layout, field.name))}"
        for field in fields(run.layout)
        if getattr(run.layout, field.name) != field.default
    ]
    rows = tuple(
        (
            f"{at + 1}",
            format_count(short(iteration.wanted)),
            format_count(short(iteration.parameters)),
            "not known" if iteration.mfu is None else format_percent(iteration.mfu),
            "" if iteration.tokens is None else format_count(short(iteration.tokens)),
        )
        for at, iteration in enumerate(affordable.iterations)
    )
    lines = []
    if affordable.best not in (-1, len(affordable.iterations) - 1):
        lines.append(
            f"The answer is iteration {affordable.best + 1}, whose loss is the lowest: models of nearly one size "
            "differ in how well they can be spread over the devices."
        )
    settings = "".join(f", {setting}" for setting in _settings(recipe))
    memory = f"{format_nbytes(affordable.memory.nbytes)} of {format_nbytes(affordable.memory.usable_nbytes)}"
    alone = f"; {TENSORS_ALONE}" if affordable.memory.tensors_alone else ""
    if affordable.forecast.chance_of_fitting is not None:
        alone += f" (fits: {chance(affordable.forecast.chance_of_fitting)})"
    lines += [
        f"d_model {spec.d_model}, {spec.n_layers} layers, {spec.attention.n_heads} heads ({spec.kv_heads} key-value), "
        f"d_ff {spec.feed_forward.d_ff}, vocabulary {spec.vocab_size:,}: {affordable.family}.",
        f"{', '.join(changed) or 'one device'}; {recipe.precision.kind}, micro-batch {recipe.micro_batch} of "
        f"{recipe.seq_len:,} tokens, {recipe.global_batch:,} sequences a step, recomputation "
        f"{recipe.activation_checkpointing.kind}{settings}. A device needs {memory}{alone}.",
        *(sentence(note) for note in (affordable.note, *affordable.forecast.notes) if note),
    ]
    what = "What fits" if answer.asked is None else "What fits of the requested model"
    columns = ("iteration", "N wanted", "N", "6ND / peak", "tokens of steps alone")
    table = Table("iterations", columns, rows, align="rrrrr")
    return section(f"{what}, and what its predicted speed affords", table, lines)


def _settings(recipe: Recipe) -> list[str]:
    """What a recipe has other than its defaults and what is said in words, as ``--set`` takes it."""
    return [as_override(f"recipe.{path}", value) for path, value in chosen(recipe).items() if path not in _IN_WORDS]


def _affords(answer: Optimal, affordable: Affordable) -> Iterator[str]:
    """The step of the affordable run, and the run; as bounds where the device's efficiency is not known."""
    forecast = affordable.forecast
    basis = forecast.basis.get("step_seconds", "")
    if forecast.mfu is not None and forecast.tokens_per_second is not None and forecast.step_seconds is not None:
        step = format_seconds(forecast.step_seconds) + between(forecast, "step_seconds", format_seconds)
        yield (
            f"Step {step}, {forecast.tokens_per_second:,.0f} tokens/s, MFU "
            f"{format_percent(forecast.mfu)} with attention counted (the rule's 6 N D leaves it out), "
            f"{BASES.get(basis, basis)}."
        )
    if affordable.tokens is not None and affordable.ratio is not None and forecast.total_seconds is not None:
        loss = answer.loss_law.loss_between(affordable.parameters, affordable.tokens)
        of_step, tokens = forecast.intervals.get("step_seconds"), ""
        if of_step is not None and forecast.step_seconds is not None:
            slow, fast = (affordable.tokens * forecast.step_seconds / each for each in (of_step.high, of_step.low))
            tokens = f" ({ends(Interval(slow, fast), format_count)})"
        affords, at_best = ("affords at most", " at best") if basis == "bound" else ("affords", "")
        yield (
            f"So the budget {affords} {format_count(short(affordable.parameters))} parameters on "
            f"{format_count(short(affordable.tokens))} tokens{tokens} ({_each(affordable.ratio)} each) in "
            f"{forecast.total_seconds / SECONDS_PER_DAY:.4g} days, including evaluation, checkpoints and failures: "
            f"loss {_loss(loss)}{at_best}."
        )


def _sources(answer: Optimal) -> Section:
    lines = [
        f"{SHORT.get(choice.law.name, choice.law.name)}: {choice.law.source}, read {choice.law.date}"
        for choice in answer.choices
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
                **plain(choice, less={Choice: ("law",)}),
                "law": choice.law.name,
                "tokens_per_parameter": choice.ratio,
                **{name: getattr(choice.law, name) for name in ("title", "source", "date", "note")},
            }
            for choice in answer.choices
        ],
        "loss_law": answer.loss_law.name,
        "off_optimum": plain(answer.off),
        "asked": plain(answer.asked),
        "served": plain(answer.served, more={Served: ("total_flops", "saved")}),
        "repeated": None if answer.repeated is None else _repeated_data(answer.repeated),
        "affordable": None if answer.affordable is None else _affordable_data(answer.affordable),
    }


def _repeated_data(repeated: Repeated) -> dict[str, Any]:
    return {**plain(repeated, more={Repeated: ("epochs",)}, less={Repeated: ("law",)}), "law": repeated.law.name}


def _affordable_data(affordable: Affordable) -> dict[str, Any]:
    """A run file's sections but for the data, and what is predicted."""
    spec, recipe, layout = affordable.run.model, affordable.run.recipe, affordable.run.layout
    changed = [field.name for field in fields(layout) if getattr(layout, field.name) != getattr(Layout(), field.name)]
    shown = ("seq_len", "global_batch", "micro_batch", "precision", "activation_checkpointing", "compile")
    return {
        "family": affordable.family,
        "parameters": affordable.parameters,
        "tokens": affordable.tokens,
        "tokens_per_parameter": affordable.ratio,
        "mfu_6nd": affordable.mfu,
        **{name: getattr(affordable.forecast, name) for name in ("mfu", "tokens_per_second", "step_seconds")},
        "basis": affordable.forecast.basis.get("step_seconds"),
        "intervals": plain(affordable.forecast.intervals),
        "chance_of_fitting": affordable.forecast.chance_of_fitting,
        "model": table_of(spec),
        "recipe": {name: field_at(recipe, name) for name in shown},
        "layout": {name: plain(getattr(layout, name)) for name in changed},
        "memory_nbytes": affordable.memory.nbytes,
        "usable_nbytes": affordable.memory.usable_nbytes,
        "iterations": [
            {"mfu_6nd": iteration.mfu, **plain(iteration, less={Iteration: ("run", "mfu")})}
            for iteration in affordable.iterations
        ],
        "notes": [*([affordable.note] if affordable.note else []), *affordable.forecast.notes],
    }


def about(answer: Optimal) -> list[str]:
    """What the page of the figures says above them: the budget, the rule's answer, and what else was asked."""
    named = [f"{name}: {size_of(each)}, loss {each.loss:.3f}." for name, each in besides(answer)]
    rule = f"By {answer.chosen.law.title}: {format_count(short(answer.parameters))} parameters on "
    return [f"{answer.budget.formula}.", f"{rule}{format_count(short(answer.tokens))} tokens.", *named]
