"""What a budget is best spent on, for a terminal of 80 columns and as figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import groupby
from math import exp, log
from typing import NamedTuple

from trainledger.document import Figure
from trainledger.plan.affordable import Affordable
from trainledger.plan.difference import as_override
from trainledger.plan.optimal import OffOptimum, Optimal
from trainledger.plan.scaling_law import Between, LossLaw
from trainledger.predict.device_memory import TENSORS_ALONE
from trainledger.report.plan import BASES
from trainledger.report.style import COLOURS, DARK, arranged
from trainledger.report.table import sentence, table, wrapped
from trainledger.spec.recipe import Recipe
from trainledger.units import (
    KILO,
    SECONDS_PER_DAY,
    format_amount,
    format_count,
    format_flops,
    format_nbytes,
    format_percent,
    format_seconds,
)

_SHORT = {
    "rule-20": "20 tokens/parameter", "chinchilla-1": "Chinchilla 1: curves", "chinchilla-2": "Chinchilla 2: IsoFLOP",
    "chinchilla-3": "Chinchilla 3: as published", "besiroglu": "Chinchilla 3: refitted", "kaplan": "Kaplan 2020",
    "muennighoff": "Muennighoff 2023",
}  # fmt: skip


# Fields of the recipe that the sentence of what is paid for has words for; its tokens stand in the last one.
_IN_WORDS = (
    "seq_len", "global_batch", "micro_batch", "precision", "activation_checkpointing", "steps", "tokens",
)  # fmt: skip
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross", "triangle-down")


def text(answer: Optimal) -> str:
    """The answer, from the rule to what is really paid for."""
    return "\n\n".join(_parts(answer))


def _parts(answer: Optimal) -> Iterator[str]:
    yield _headline(answer)
    yield _choices(answer)
    yield _off(answer)
    if answer.served is not None:
        yield _served(answer)
    if answer.repeated is not None:
        yield _repeated(answer)
    if answer.affordable is not None:
        yield _paid(answer, answer.affordable)
    elif answer.budget.seconds is None:
        yield wrapped("With --device and --count or --days: what fits there, and what its predicted speed pays for.")
    yield _sources(answer)


def _headline(answer: Optimal) -> str:
    chosen = answer.chosen
    lines = [
        answer.budget.formula,
        f"By {chosen.law.title}: {format_count(_short(answer.parameters))} parameters on "
        f"{format_count(_short(answer.tokens))} tokens",
    ]
    if answer.budget.money is not None and answer.budget.device_hours is not None:
        lines.append(
            f"{format_amount(answer.budget.device_hours)} device-hours cost {format_amount(answer.budget.money)}"
        )
    return "\n".join(wrapped(each) for each in lines)


def _each(ratio: float) -> str:
    """Tokens for each parameter, three digits."""
    return f"{ratio:.3g}" if ratio < KILO else format_count(_short(ratio))


def _short(count: float) -> float:
    """Three digits, which is more than any of these laws knows.

    >>> _short(252652594155)
    253000000000.0
    """
    return float(f"{count:.3g}")


def _choices(answer: Optimal) -> str:
    rows = [
        [
            _SHORT.get(each.law.name, each.law.name), _count(each.parameters), format_count(_short(each.tokens)),
            f"{each.ratio:.3g}", _loss(each.loss),
        ]
        for each in answer.choices
    ]  # fmt: skip
    shown = table(["law", "parameters N", "tokens D", "D/N", "loss"], rows, align="lrrrr")
    lines = [f"Losses by {answer.loss_law.title}, nats per token of its own data; ranges are {_ranges(answer)}."]
    noted = [each.law for each in answer.choices if each.law.note]
    lines += [f"{_SHORT.get(law.name, law.name)}: {law.note}." for law in noted]
    return "\n".join([shown, *(wrapped(each) for each in lines)])


def _ranges(answer: Optimal) -> str:
    means = dict.fromkeys(each.parameters.means for each in answer.choices if each.parameters.means)
    return " or ".join(means) + "; without one, none is known" if means else "not known"


def _count(between: Between) -> str:
    value = format_count(_short(between.value))
    if between.low is None or between.high is None:
        return value
    return f"{value} ({format_count(_round(between.low))} to {format_count(_round(between.high))})"


def _round(value: float) -> float:
    return float(f"{value:.2g}")


def _loss(between: Between) -> str:
    if between.low is None or between.high is None:
        return f"{between.value:.3f}"
    return f"{between.value:.3f} ±{(between.high - between.low) / 2:.3f}"


def _off(answer: Optimal) -> str:
    rows = [_off_row(each) for each in answer.off]
    if answer.asked is not None:
        rows.append(_off_row(answer.asked, "asked: "))
    title = "Off the optimum with the same budget (by the law of the losses)"
    told = "more compute: how much more it took than the least that reaches its loss."
    shown = table(["D/N", "N", "D", "loss", "above best", "more compute"], rows, align="rrrrrr")
    return f"{title}\n{shown}\n{wrapped(told)}"


def _off_row(each: OffOptimum, before: str = "") -> list[str]:
    return [
        f"{before}{each.tokens / each.parameters:,.4g}", format_count(_short(each.parameters)),
        format_count(_short(each.tokens)), f"{each.loss:.3f}", f"+{each.penalty:.3f}", format_percent(each.overhead),
    ]  # fmt: skip


def _served(answer: Optimal) -> str:
    found = answer.served
    assert found is not None
    best = answer.loss_law.parameters(answer.budget.flops).value
    lines = [
        f"With {format_count(found.inference_tokens)} tokens served (6 N D + 2 N D_inference, same loss): "
        f"{format_count(_short(found.parameters))} parameters on {format_count(_short(found.tokens))} tokens, "
        f"{found.tokens / found.parameters:.3g} per parameter, instead of {format_count(_short(best))}.",
        f"Training {format_flops(found.training_flops)} + serving {format_flops(found.inference_flops)} = "
        f"{format_flops(found.total_flops)}, {format_percent(found.saved)} less than the optimum of training alone "
        "takes in all. FLOPs only: serving reaches less of the peak (Sardana et al. 2023, arXiv 2401.00448).",
    ]
    return "\n".join(wrapped(each) for each in lines)


def _repeated(answer: Optimal) -> str:
    found = answer.repeated
    assert found is not None
    if found.epochs <= 1:
        line = f"{format_count(found.unique)} tokens are enough: nothing is repeated"
    else:
        line = (
            f"With {format_count(found.unique)} tokens in all: {format_count(_short(found.parameters))} parameters on "
            f"{format_count(_short(found.tokens))}, {found.epochs:.1f} epochs, loss {found.loss:.3f}; the "
            f"{format_count(_short(found.unconstrained_parameters))} that endless data would ask for reach "
            f"{found.loss_of_it:.3f}"
        )
    return wrapped(sentence(f"{line} ({found.law.source})"))


def _shown(value: object) -> str:
    """A field of a layout; layers of stages as how many have how many."""
    if not isinstance(value, tuple):
        return str(value)
    runs = ((each, len(list(alike))) for each, alike in groupby(value))
    return " + ".join(f"{count} x {each}" for each, count in runs)


def _paid(answer: Optimal, paid: Affordable) -> str:
    run, told = paid.run, paid.forecast
    spec, recipe = run.model, run.recipe
    said = [f"{each.name} {_shown(getattr(run.layout, each.name))}" for each in fields(run.layout)
            if getattr(run.layout, each.name) != each.default]  # fmt: skip
    spread = ", ".join(said) or "one device"
    rows = [
        [
            f"{at + 1}", format_count(_short(each.wanted)), format_count(_short(each.parameters)),
            "not known" if each.mfu is None else format_percent(each.mfu),
            "" if each.tokens is None else format_count(_short(each.tokens)),
        ]
        for at, each in enumerate(paid.iterations)
    ]  # fmt: skip
    lines = []
    if paid.best not in (-1, len(paid.iterations) - 1):
        lines.append(
            f"The answer is iteration {paid.best + 1}, whose loss is the lowest: sizes near each other differ in how "
            "well they can be laid out."
        )
    lines += [
        f"d_model {spec.d_model}, {spec.n_layers} layers, {spec.attention.n_heads} heads ({spec.kv_heads} key-value), "
        f"d_ff {spec.feed_forward.d_ff}, vocabulary {spec.vocab_size:,}: {paid.family}.",
        f"{spread}; {recipe.precision}, micro-batch {recipe.micro_batch} of {recipe.seq_len:,} tokens, "
        f"{recipe.global_batch:,} sequences a step, recomputation {recipe.activation_checkpointing}"
        f"{''.join(f', {each}' for each in _as_set(recipe))}. "
        f"A device holds {format_nbytes(paid.memory.nbytes)} of {format_nbytes(paid.memory.usable_nbytes)}"
        f"{f'; {TENSORS_ALONE}' if paid.memory.tensors_alone else ''}.",
        *_pays(answer, paid),
        *(sentence(each) for each in (paid.note, *told.notes) if each),
    ]
    what = "What fits" if answer.asked is None else "What fits of what is asked for"
    title = f"{what}, and what its predicted speed pays for"
    shown = table(["iteration", "N wanted", "N", "6ND / peak", "tokens of steps alone"], rows, align="rrrrr")
    return "\n".join([title, shown, *(wrapped(each) for each in lines)])


def _as_set(recipe: Recipe) -> list[str]:
    """What a recipe says beside its own defaults and what is told in words, as ``--set`` takes it."""
    return [
        as_override(f"recipe.{each.name}", getattr(recipe, each.name))
        for each in fields(recipe)
        if each.name not in _IN_WORDS and getattr(recipe, each.name) != each.default
    ]


def _pays(answer: Optimal, paid: Affordable) -> Iterator[str]:
    """The step of what is paid for, and the run; of a device whose efficiency nobody knows as the bounds they are."""
    told = paid.forecast
    basis = told.basis.get("step_seconds", "")
    if told.mfu is not None and told.tokens_per_second is not None and told.step_seconds is not None:
        yield (
            f"Step {format_seconds(told.step_seconds)}, {told.tokens_per_second:,.0f} tokens/s, MFU "
            f"{format_percent(told.mfu)} with attention counted (the rule's 6 N D leaves it out), "
            f"{BASES.get(basis, basis)}."
        )
    if paid.tokens is not None and paid.ratio is not None and told.total_seconds is not None:
        loss = answer.loss_law.loss_between(paid.parameters, paid.tokens)
        pays, at_best = ("pays for at most", " at best") if basis == "bound" else ("pays for", "")
        yield (
            f"So the budget {pays} {format_count(_short(paid.parameters))} parameters on "
            f"{format_count(_short(paid.tokens))} tokens ({_each(paid.ratio)} each) in "
            f"{told.total_seconds / SECONDS_PER_DAY:.4g} days with all that belongs to the run: loss {_loss(loss)}"
            f"{at_best}."
        )


def _sources(answer: Optimal) -> str:
    lines = [f"{_SHORT.get(each.law.name, each.law.name)}: {each.law.source}, read {each.law.date}"
             for each in answer.choices]  # fmt: skip
    if answer.loss_law.covariance_source:
        lines.append(f"Ranges of the refit: covariance {answer.loss_law.covariance_source}")
    return "\n".join(["Sources", *(wrapped(each) for each in lines)])


def figures(answer: Optimal) -> dict[str, Figure]:
    """Loss against model size at this budget, and the frontier over budgets; bands where an error is known.

    Both have what was asked besides: the named model, the one to serve, the one on repeated data, and the one paid for.
    """
    return {"Loss of models of one budget": _iso_flop(answer), "The least loss of a budget": _frontier(answer)}


def about(answer: Optimal) -> list[str]:
    """What the page of the figures says above them: the budget, the rule's answer, and what was asked besides."""
    named = [f"{name}: {_size(each)}, loss {each.loss:.3f}." for name, each in _besides(answer)]
    rule = f"By {answer.chosen.law.title}: {format_count(_short(answer.parameters))} parameters on "
    return [f"{answer.budget.formula}.", f"{rule}{format_count(_short(answer.tokens))} tokens.", *named]


def _besides(answer: Optimal) -> Iterator[tuple[str, _Point]]:
    """The models that were asked for besides the rule's own, by what they are."""
    law = answer.loss_law
    if answer.asked is not None:
        yield "asked for", _Point(answer.asked.parameters, answer.asked.tokens, answer.asked.loss)
    if (served := answer.served) is not None:
        loss = law.loss(served.parameters, served.tokens)
        name = f"cheapest with {format_count(served.inference_tokens)} tokens served"
        yield name, _Point(served.parameters, served.tokens, loss)
    if (repeated := answer.repeated) is not None and repeated.epochs > 1:
        name = f"{format_count(repeated.unique)} tokens, repeated ({_SHORT.get(repeated.law.name, repeated.law.name)})"
        yield name, _Point(repeated.parameters, repeated.tokens, repeated.loss)
    if (paid := answer.affordable) is not None and paid.tokens is not None:
        yield "what is paid for", _Point(paid.parameters, paid.tokens, law.loss(paid.parameters, paid.tokens))


class _Point(NamedTuple):
    parameters: float
    tokens: float
    loss: float


def _size(each: _Point) -> str:
    return f"{format_count(_short(each.parameters))} parameters on {format_count(_short(each.tokens))} tokens"


def _markers(answer: Optimal, along: Callable[[_Point], float]) -> Iterator[dict[str, object]]:
    """A larger, hollow point for each model that was asked for besides, at the place that ``along`` says."""
    for at, (name, each) in enumerate(_besides(answer)):
        yield {
            "type": "scatter", "mode": "markers", "name": name, "x": [along(each)], "y": [each.loss],
            "marker": {"color": DARK, "size": 14, "symbol": f"{_SYMBOLS[at]}-open", "line": {"width": 2}},
            "hovertemplate": f"{name}: {_size(each)}, loss %{{y:.3f}}<extra></extra>",
        }  # fmt: skip


def _iso_flop(answer: Optimal) -> Figure:
    flops, middle = answer.budget.flops, answer.loss_law.parameters(answer.budget.flops).value
    sizes = [middle * exp(each / 20 * log(30)) for each in range(-20, 21)]
    law = answer.loss_law
    data = _band(law, sizes, [flops / (6 * each) for each in sizes], sizes)
    for at, each in enumerate(answer.choices):
        size = each.parameters.value
        if sizes[0] <= size <= sizes[-1]:
            data.append(
                {
                    "type": "scatter", "mode": "markers", "name": _SHORT.get(each.law.name, each.law.name), "x": [size],
                    "y": [law.loss(size, flops / (6 * size))],
                    "marker": {"color": COLOURS[(at + 1) % len(COLOURS)], "size": 11, "symbol": _SYMBOLS[at]},
                }
            )  # fmt: skip
    data += _markers(answer, lambda each: each.parameters)
    layout = arranged(f"One budget: {flops:.3g} FLOP", "parameters", "loss (nats per token)")
    layout["xaxis"] |= {"type": "log", "dtick": 1}
    return {"data": data, "layout": layout}


def _frontier(answer: Optimal) -> Figure:
    flops, law = answer.budget.flops, answer.loss_law
    budgets = [flops * 10 ** (each / 10) for each in range(-20, 21)]
    best = [law.parameters(each).value for each in budgets]
    data = _band(law, best, [each / (6 * n) for each, n in zip(budgets, best, strict=True)], budgets)
    least = law.loss(best[20], flops / (6 * best[20]))
    data.append(
        {
            "type": "scatter", "mode": "markers", "name": "this budget", "x": [flops], "y": [least],
            "marker": {"color": COLOURS[1], "size": 10},
        }
    )  # fmt: skip
    data += _markers(answer, lambda each: 6 * each.parameters * each.tokens)
    layout = arranged("What more compute is worth", "training FLOPs (6 N D)", "loss (nats per token)")
    layout["xaxis"] |= {"type": "log", "dtick": 1}
    return {"data": data, "layout": layout}


def _band(law: LossLaw, parameters: list[float], tokens: list[float], along: list[float]) -> list[dict[str, object]]:
    """The loss along a line of models, and the band of its error where one is known."""
    found = [law.loss_between(n, d) for n, d in zip(parameters, tokens, strict=True)]
    lines: list[dict[str, object]] = []
    low, high = [each.low for each in found], [each.high for each in found]
    if all(each is not None for each in low):
        lines.append(
            {
                "type": "scatter", "mode": "lines", "name": found[0].means, "x": [*along, *reversed(along)],
                "y": [*high, *reversed(low)], "fill": "toself", "fillcolor": "rgba(0,114,178,0.18)",
                "line": {"width": 0}, "hoverinfo": "skip",
            }
        )  # fmt: skip
    lines.append(
        {
            "type": "scatter", "mode": "lines", "name": law.title, "x": along, "y": [each.value for each in found],
            "line": {"color": COLOURS[0], "width": 2},
        }
    )  # fmt: skip
    return lines
