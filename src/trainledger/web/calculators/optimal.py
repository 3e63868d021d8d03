"""Compute-optimal: what a budget is best spent on, by every published law."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import trainledger as tl
from trainledger.answers.pages.optimal_figures import SHORT, trained_table
from trainledger.forecast.plan.optimal import Choice, Optimal
from trainledger.forecast.plan.scaling_law import LossLaw, laws
from trainledger.spec.units import format_count, format_flops
from trainledger.web.calculator import PLAIN, Drawing, Headline, Progress, Reply, calculator, headline
from trainledger.web.field import Query, one_of

_BUDGETS = {
    "flops": ("flops",),
    "device_hours": ("device_hours",),
    "days": ("count", "days"),
    "money": ("money", "price"),
}
_IN = {"days": "days of devices", "device_hours": "device-hours", "money": "money", "flops": "FLOPs"}
_COMMON = ("law", "loss_law", "params", "ratio", "inference", "unique")
_OF_DEVICES = ("device", "mfu")


def _reply(query: Query, progress: Progress) -> Reply:
    own = _BUDGETS[query["budget"]]
    devices = () if query["budget"] == "flops" else _OF_DEVICES
    given = query.chosen(*own, *devices, *_COMMON)
    follow = query["follow"] == "yes" and query["budget"] == "days"
    options: dict[str, Any] = {**given, "family": query["family"] if follow else None}
    answer = tl.optimal(**options, progress=lambda what, done, of: progress(what, 0, 1))
    document = answer.document()
    tables = document.tables
    named = given | {"family": query["family"] if follow else "none"}
    flags = [word for name, text in named.items() for word in (f"--{name.replace('_', '-')}", text)]
    arguments = ", ".join(f"{name}={text!r}" for name, text in options.items())
    beside = {"Model size against data": trained_table(answer)}
    return Reply(
        document=document,
        headlines=tuple(_headlines(answer)),
        verdict=_verdict(answer),
        tone=PLAIN,
        drawings=tuple(
            Drawing(chart=figure, table=beside.get(figure.title, tables["laws"])) for figure in document.figures()
        ),
        values={},
        unused=_unused(query),
        words=("optimal", *flags),
        python=f"import trainledger as tl\n\nprint(tl.optimal({arguments}))",
    )


def _unused(query: Query) -> dict[str, str]:
    """The fields that do not count in this question, with the reason."""
    budget = query["budget"]
    counts = {*_BUDGETS[budget], *(() if budget == "flops" else _OF_DEVICES)}
    every = {name for names in _BUDGETS.values() for name in names} | {*_OF_DEVICES}
    found = dict.fromkeys(every - counts, f"the budget is in {_IN[budget]}")
    if budget != "days":
        found["follow"] = "the budget is not in days of devices"
    if budget != "days" or query["follow"] != "yes":
        found["family"] = "only the rules are asked"
    return found


def _verdict(answer: Optimal) -> str:
    law, n, d = answer.chosen.law.name, format_count(_three(answer.parameters)), format_count(_three(answer.tokens))
    return f"{format_flops(answer.budget.flops)}: best spent on {n} parameters and {d} tokens, by {SHORT.get(law, law)}"


def _three(count: float) -> float:
    """Three digits, which is more than any of these laws knows."""
    return float(f"{count:.3g}")


def _headlines(answer: Optimal) -> Iterator[Headline]:
    chosen, budget, by = answer.chosen, answer.budget, answer.loss_law
    n, d = chosen.parameters.value, chosen.tokens
    formula, source = f"{chosen.law.title}, at C = {budget.flops:.3g} FLOP{_range(chosen)}", chosen.law.source
    yield headline("optimal.parameters", answer.parameters, formula, source=source)
    yield headline("optimal.tokens", answer.tokens, f"C / 6 N = {budget.flops:.3g} / (6 x {n:.3g})", source=source)
    formula = (
        f"E + A / N^alpha + B / D^beta = {by.E:.4g} + {by.A:.4g} / {n:.3g}^{by.alpha:.4g} + "
        f"{by.B:.4g} / {d:.3g}^{by.beta:.4g}"
    )
    yield headline("optimal.loss", chosen.loss.value, formula, source=by.source)
    yield headline("optimal.flops", budget.flops, budget.formula)
    if (asked := answer.asked) is not None:
        cost = f"the same loss could cost {format_flops(asked.same_loss_flops)}"
        formula = f"{asked.loss:.4f} with N = {asked.parameters:.3g} and D = {asked.tokens:.3g}; {cost}"
        yield headline("optimal.penalty", asked.penalty, formula, source=by.source)
    if (served := answer.served) is not None:
        instead = f"with N = {served.parameters:.3g}, not {format_flops(served.optimal_total_flops)}"
        formula = f"6 N D + 2 N D_inference = {format_flops(served.total_flops)} {instead}"
        yield headline("optimal.saved", served.saved, formula)


def _range(chosen: Choice) -> str:
    between = chosen.parameters
    if between.low is None or between.high is None:
        return ""
    return f"; {format_count(_three(between.low))} to {format_count(_three(between.high))} ({between.means})"


_TITLES = {law.name: SHORT.get(law.name, law.title) for law in laws().values()}
_OF_LOSS = [law.name for law in laws().values() if isinstance(law, LossLaw)]

OPTIMAL = calculator("optimal", _reply, {"law": one_of(_TITLES, **_TITLES), "loss_law": one_of(_OF_LOSS, **_TITLES)})
