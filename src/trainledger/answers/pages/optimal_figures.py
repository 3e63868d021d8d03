"""The figures of a budget's best use: loss against model size, and the frontier over budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import exp, log
from typing import NamedTuple

from trainledger.catalog import trained_models
from trainledger.forecast.plan.optimal import Optimal
from trainledger.forecast.plan.scaling_law import LossLaw
from trainledger.ledger.rules_of_thumb import training_flops
from trainledger.report.chart import COLOURS, DARK, SYMBOLS, Area, Axis, Chart, Line, Mark
from trainledger.report.document import Table
from trainledger.spec.units import format_count

SHORT = {
    "rule-20": "20 tokens/parameter",
    "chinchilla-1": "Chinchilla 1: curves",
    "chinchilla-2": "Chinchilla 2: IsoFLOP",
    "chinchilla-3": "Chinchilla 3: as published",
    "besiroglu": "Chinchilla 3: refitted",
    "kaplan": "Kaplan 2020",
    "muennighoff": "Muennighoff 2023",
}
_LOSS = "loss (nats per token)"


def figures(answer: Optimal) -> list[Chart]:
    """Loss against model size at this budget, the frontier over budgets, and size against data; bands are errors.

    All have what else was asked: the named model, the one to serve, on repeated data, and the affordable one.
    """
    return [_iso_flop(answer), _frontier(answer), _plane(answer)]


def _markers(answer: Optimal, place: Callable[[Point], tuple[float, float]]) -> Iterator[Line]:
    """A larger, hollow point for each other requested model, at its place."""
    for at, (name, each) in enumerate(besides(answer)):
        said = f"{name}: {size_of(each)}, loss {each.loss:.3f}"
        x, y = place(each)
        yield Line([x], [y], name, DARK, width=0, symbol=f"{SYMBOLS[at]}-open", size=14, said=[said])


def _iso_flop(answer: Optimal) -> Chart:
    flops, law = answer.budget.flops, answer.loss_law
    middle = law.parameters(flops).value
    sizes = [middle * exp(index / 20 * log(30)) for index in range(-20, 21)]
    marks = list(_band(law, sizes, [flops / (6 * each) for each in sizes], sizes))
    for at, choice in enumerate(answer.choices):
        size = choice.parameters.value
        if sizes[0] <= size <= sizes[-1]:
            name, loss = SHORT.get(choice.law.name, choice.law.name), law.loss(size, flops / (6 * size))
            colour = COLOURS[(at + 1) % len(COLOURS)]
            marks.append(Line([size], [loss], name, colour, width=0, symbol=SYMBOLS[at], size=11))
    marks += _markers(answer, lambda each: (each.parameters, each.loss))
    x = Axis(f"parameters, each with the tokens of {flops:.3g} FLOP", log=True)
    return Chart("Loss of models of one budget", tuple(marks), x, Axis(_LOSS))


def _frontier(answer: Optimal) -> Chart:
    flops, law = answer.budget.flops, answer.loss_law
    budgets = [flops * 10 ** (index / 10) for index in range(-20, 21)]
    best = [law.parameters(budget).value for budget in budgets]
    marks = list(_band(law, best, [budget / (6 * n) for budget, n in zip(budgets, best, strict=True)], budgets))
    least = law.loss(best[20], flops / (6 * best[20]))
    marks.append(Line([flops], [least], "this budget", COLOURS[1], width=0, symbol="circle", size=10))
    marks += _markers(answer, lambda each: (6 * each.parameters * each.tokens, each.loss))
    x = Axis("training FLOPs (6 N D)", log=True)
    return Chart("The least loss of a budget: what more compute is worth", tuple(marks), x, Axis(_LOSS))


def trained_table(answer: Optimal) -> Table:
    """Published models: what they cost, and their loss by the loss law above the least of their cost."""
    law, rows = answer.loss_law, []
    for model in trained_models():
        flops, loss = training_flops(model.parameters, model.tokens), law.loss(model.parameters, model.tokens)
        best = law.parameters(flops).value
        above = loss - law.loss(best, law.tokens(flops))
        ratio = model.tokens / model.parameters
        each_tokens = f"{ratio:,.{0 if ratio >= 100 else 1}f}"
        known = (model.title, model.parameters, model.tokens, each_tokens)
        rows.append((*known, flops, f"{loss:.3f}", f"{above:.3f}", model.source))
    columns = ("model", "N", "D", "D/N", "6 N D", "loss", "above best", "source")
    units = ("", "count", "count", "", "flops")
    return Table("published models", columns, tuple(rows), units=units, align="lrrrrrrl")


def _plane(answer: Optimal) -> Chart:
    """N against D: lines of equal FLOPs and of equal loss around this budget, and published models."""
    flops, law = answer.budget.flops, answer.loss_law
    trained, chosen = trained_models(), answer.chosen
    sizes = _spread([*(model.parameters for model in trained), *(choice.parameters.value for choice in answer.choices)])
    tokens = _spread([*(model.tokens for model in trained), *(choice.tokens for choice in answer.choices)])
    marks = []
    for at, times in enumerate((0.01, 1, 100)):
        budget = flops * times
        name = f"{'this budget' if times == 1 else f'{times:g} x this budget'}: {budget:.2g} FLOP"
        width, dash = (2, "solid") if times == 1 else (1, "dot")
        marks.append(Line(sizes, [budget / (6 * size) for size in sizes], name, COLOURS[1], width, dash))
        loss = law.loss(law.parameters(budget).value, law.tokens(budget))
        equal = [law.tokens_at_loss(size, loss) for size in sizes]
        marks.append(Line(sizes, equal, f"loss {loss:.3f}", COLOURS[at + 2]))
    marks.append(
        Line([model.parameters for model in trained], [model.tokens for model in trained], "published models", width=0,
             symbol="circle", size=7, texts=[model.title for model in trained],
             said=[f"{model.title}: {model.parameters:.3g} parameters, {model.tokens:.3g} tokens" for model in trained])
    )  # fmt: skip
    name = f"best by {SHORT.get(chosen.law.name, chosen.law.name)}"
    marks.append(Line([chosen.parameters.value], [chosen.tokens], name, COLOURS[5], width=0, symbol="star", size=12))
    marks += _markers(answer, lambda each: (each.parameters, each.tokens))
    x, y = (
        Axis(title, log=True, ends=(min(ends), max(ends)))
        for title, ends in (("parameters N", sizes), ("tokens D", tokens))
    )
    return Chart("Model size against data", tuple(marks), x, y, height=370)


def _spread(values: list[float]) -> list[float]:
    """Sixty values from half the least to twice the most, evenly in logarithms."""
    low, high = log(min(values) / 2), log(2 * max(values))
    return [exp(low + (high - low) * index / 60) for index in range(61)]


def _band(law: LossLaw, parameters: list[float], tokens: list[float], along: list[float]) -> Iterator[Mark]:
    """The loss along a line of models, and the band of its error where one is known."""
    betweens = [law.loss_between(n, d) for n, d in zip(parameters, tokens, strict=True)]
    ends = [(between.low, between.high) for between in betweens if between.low is not None and between.high is not None]
    if len(ends) == len(betweens):
        heights = [high - low for low, high in ends]
        yield Area(along, {betweens[0].means: heights}, floor=[low for low, _ in ends], opacity=0.18)
    yield Line(along, [between.value for between in betweens], law.title)


def besides(answer: Optimal) -> Iterator[tuple[str, Point]]:
    """The requested models other than the rule's, by what they are."""
    law = answer.loss_law
    if answer.asked is not None:
        yield "requested", Point(answer.asked.parameters, answer.asked.tokens, answer.asked.loss)
    if (served := answer.served) is not None:
        loss = law.loss(served.parameters, served.tokens)
        name = f"cheapest with {format_count(served.inference_tokens)} tokens served"
        yield name, Point(served.parameters, served.tokens, loss)
    if (repeated := answer.repeated) is not None and repeated.epochs > 1:
        name = f"{format_count(repeated.unique)} tokens, repeated ({SHORT.get(repeated.law.name, repeated.law.name)})"
        yield name, Point(repeated.parameters, repeated.tokens, repeated.loss)
    if (affordable := answer.affordable) is not None and affordable.tokens is not None:
        yield (
            "affordable",
            Point(affordable.parameters, affordable.tokens, law.loss(affordable.parameters, affordable.tokens)),
        )


class Point(NamedTuple):
    parameters: float
    tokens: float
    loss: float


def size_of(each: Point) -> str:
    return f"{format_count(short(each.parameters))} parameters on {format_count(short(each.tokens))} tokens"


def short(count: float) -> float:
    """Three digits, which is more than any of these laws knows.

    >>> short(252652594155)
    253000000000.0
    """
    return float(f"{count:.3g}")
