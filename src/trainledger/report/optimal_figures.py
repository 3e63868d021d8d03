"""The figures of a budget's best use: loss against model size, and the frontier over budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import exp, log
from typing import Any, NamedTuple

from trainledger.document import Figure
from trainledger.plan.optimal import Optimal
from trainledger.plan.scaling_law import LossLaw
from trainledger.report.style import COLOURS, DARK, arranged, points
from trainledger.units import format_count

SHORT = {
    "rule-20": "20 tokens/parameter", "chinchilla-1": "Chinchilla 1: curves", "chinchilla-2": "Chinchilla 2: IsoFLOP",
    "chinchilla-3": "Chinchilla 3: as published", "besiroglu": "Chinchilla 3: refitted", "kaplan": "Kaplan 2020",
    "muennighoff": "Muennighoff 2023",
}  # fmt: skip
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross", "triangle-down")


def figures(answer: Optimal) -> dict[str, Figure]:
    """Loss against model size at this budget, and the frontier over budgets; bands where an error is known.

    Both have what was asked besides: the named model, the one to serve, on repeated data, and the affordable one.
    """
    return {"Loss of models of one budget": _iso_flop(answer), "The least loss of a budget": _frontier(answer)}


def _markers(answer: Optimal, along: Callable[[Point], float]) -> Iterator[dict[str, object]]:
    """A larger, hollow point for each model that was asked for besides, at the place that ``along`` says."""
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
    """The models that were asked for besides the rule's own, by what they are."""
    law = answer.loss_law
    if answer.asked is not None:
        yield "asked for", Point(answer.asked.parameters, answer.asked.tokens, answer.asked.loss)
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
