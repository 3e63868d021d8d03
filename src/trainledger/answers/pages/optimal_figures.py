"""The figures of a budget's best use: loss against model size, and the frontier over budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import exp, log, log10
from typing import Any, NamedTuple

from trainledger.catalog import trained_models
from trainledger.forecast.plan.optimal import Optimal
from trainledger.forecast.plan.scaling_law import LossLaw
from trainledger.ledger.rules_of_thumb import training_flops
from trainledger.report.document import Figure, Table
from trainledger.report.style import COLOURS, DARK, GREY, arranged, by_turns, points
from trainledger.spec.units import format_count

SHORT = {
    "rule-20": "20 tokens/parameter", "chinchilla-1": "Chinchilla 1: curves", "chinchilla-2": "Chinchilla 2: IsoFLOP",
    "chinchilla-3": "Chinchilla 3: as published", "besiroglu": "Chinchilla 3: refitted", "kaplan": "Kaplan 2020",
    "muennighoff": "Muennighoff 2023",
}  # fmt: skip
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross", "triangle-down")


def figures(answer: Optimal) -> dict[str, Figure]:
    """Loss against model size at this budget, the frontier over budgets, and size against data; bands are errors.

    All have what else was asked: the named model, the one to serve, on repeated data, and the affordable one.
    """
    return {
        "Loss of models of one budget": _iso_flop(answer),
        "The least loss of a budget": _frontier(answer),
        "Model size against data": _plane(answer),
    }


def _markers(answer: Optimal, along: Callable[[Point], float]) -> Iterator[dict[str, object]]:
    """A larger, hollow point for each other requested model, at the place that ``along`` says."""
    for at, (name, each) in enumerate(besides(answer)):
        marker = {"color": DARK, "size": 14, "symbol": f"{_SYMBOLS[at]}-open", "line": {"width": 2}}
        hover = f"{name}: {size_of(each)}, loss %{{y:.3f}}<extra></extra>"
        yield points(name, [along(each)], [each.loss], marker=marker, hovertemplate=hover)


def _iso_flop(answer: Optimal) -> Figure:
    flops, middle = answer.budget.flops, answer.loss_law.parameters(answer.budget.flops).value
    sizes = [middle * exp(each / 20 * log(30)) for each in range(-20, 21)]
    law = answer.loss_law
    data = _band(law, sizes, [flops / (6 * each) for each in sizes], sizes)
    for at, each in enumerate(answer.choices):
        size = each.parameters.value
        if sizes[0] <= size <= sizes[-1]:
            marker = {"color": COLOURS[(at + 1) % len(COLOURS)], "size": 11, "symbol": _SYMBOLS[at]}
            name, loss = SHORT.get(each.law.name, each.law.name), law.loss(size, flops / (6 * size))
            data.append(points(name, [size], [loss], marker=marker))
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
    data.append(points("this budget", [flops], [least], marker={"color": COLOURS[1], "size": 10}))
    data += _markers(answer, lambda each: 6 * each.parameters * each.tokens)
    layout = arranged("What more compute is worth", "training FLOPs (6 N D)", "loss (nats per token)")
    layout["xaxis"] |= {"type": "log", "dtick": 1}
    return {"data": data, "layout": layout}


def trained_table(answer: Optimal) -> Table:
    """Published models: what they cost, and their loss by the loss law above the least of their cost."""
    law, rows = answer.loss_law, []
    for each in trained_models():
        flops, loss = training_flops(each.parameters, each.tokens), law.loss(each.parameters, each.tokens)
        best = law.parameters(flops).value
        above = loss - law.loss(best, law.tokens(flops))
        ratio = each.tokens / each.parameters
        each_tokens = f"{ratio:,.{0 if ratio >= 100 else 1}f}"
        rows.append(
            (each.title, each.parameters, each.tokens, each_tokens, flops, f"{loss:.3f}", f"{above:.3f}", each.source)
        )
    columns = ("model", "N", "D", "D/N", "6 N D", "loss", "above best", "source")
    units = ("", "count", "count", "", "flops")
    return Table("published models", columns, tuple(rows), units=units, align="lrrrrrrl")


def _plane(answer: Optimal) -> Figure:
    """N against D: lines of equal FLOPs and of equal loss around this budget, and published models."""
    flops, law = answer.budget.flops, answer.loss_law
    trained = trained_models()
    sizes = _spread([*(each.parameters for each in trained), *(each.parameters.value for each in answer.choices)])
    tokens = _spread([*(each.tokens for each in trained), *(each.tokens for each in answer.choices)])
    low, high = min(tokens), max(tokens)
    data = []
    for at, times in enumerate((0.01, 1, 100)):
        budget = flops * times
        name = "this budget" if times == 1 else f"{times:g} x this budget"
        width = {"color": COLOURS[1], "width": 2 if times == 1 else 1, "dash": "solid" if times == 1 else "dot"}
        kept = [(each, budget / (6 * each)) for each in sizes]
        data.append(_within(f"{name}: {budget:.2g} FLOP", kept, low, high, width))
        loss = law.loss(law.parameters(budget).value, law.tokens(budget))
        width = {"color": COLOURS[at + 2], "width": 2, "dash": "solid"}
        equal = [(each, law.tokens_at_loss(each, loss)) for each in sizes]
        data.append(_within(f"loss {loss:.3f}", equal, low, high, width))
    hover = "%{text}: %{x:.3g} parameters, %{y:.3g} tokens<extra></extra>"
    published = points(
        "published models", [each.parameters for each in trained], [each.tokens for each in trained],
        "markers+text", text=[each.title for each in trained], textposition=by_turns(range(len(trained))),
        textfont={"size": 10, "color": GREY}, marker={"color": COLOURS[0], "size": 7}, hovertemplate=hover,
    )  # fmt: skip
    chosen = answer.chosen
    marker = {"color": COLOURS[5], "size": 12, "symbol": "star"}
    name = SHORT.get(chosen.law.name, chosen.law.name)
    data += [published, points(f"best by {name}", [chosen.parameters.value], [chosen.tokens], marker=marker)]
    for at, (name, each) in enumerate(besides(answer)):
        hollow = {"color": DARK, "size": 14, "symbol": f"{_SYMBOLS[at]}-open", "line": {"width": 2}}
        data.append(points(name, [each.parameters], [each.tokens], marker=hollow))
    layout = arranged("Size against data", "parameters N", "tokens D", height=460)
    for axis, ends in (("xaxis", sizes), ("yaxis", tokens)):
        layout[axis] |= {"type": "log", "dtick": 1, "range": [log10(min(ends)), log10(max(ends))]}
    return {"data": data, "layout": layout}


def _spread(values: list[float]) -> list[float]:
    """Sixty values from half the least to twice the most, evenly in logarithms."""
    low, high = log(min(values) / 2), log(2 * max(values))
    return [exp(low + (high - low) * each / 60) for each in range(61)]


def _within(
    name: str, line: list[tuple[float, float]], low: float, high: float, style: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    """The part of a line between two heights."""
    kept = [(x, y) for x, y in line if low <= y <= high]
    return points(name, [x for x, _ in kept], [y for _, y in kept], "lines", line=style)


def _band(law: LossLaw, parameters: list[float], tokens: list[float], along: list[float]) -> list[dict[str, object]]:
    """The loss along a line of models, and the band of its error where one is known."""
    found = [law.loss_between(n, d) for n, d in zip(parameters, tokens, strict=True)]
    lines: list[dict[str, object]] = []
    low, high = [each.low for each in found], [each.high for each in found]
    if all(each is not None for each in low):
        filled: dict[str, Any] = {
            "fill": "toself",
            "fillcolor": "rgba(0,114,178,0.18)",
            "line": {"width": 0},
            "hoverinfo": "skip",
        }
        around = ([*along, *reversed(along)], [*high, *reversed(low)])
        lines.append(points(found[0].means, *around, "lines", **filled))
    losses = [each.value for each in found]
    return [*lines, points(law.title, along, losses, "lines", line={"color": COLOURS[0], "width": 2})]


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
    if (found := answer.affordable) is not None and found.tokens is not None:
        yield "affordable", Point(found.parameters, found.tokens, law.loss(found.parameters, found.tokens))


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
