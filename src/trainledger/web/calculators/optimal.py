"""Compute-optimal: what a budget is best spent on, by every published law."""

from __future__ import annotations

from typing import Any

import trainledger as tl
from trainledger import catalog
from trainledger.answers.pages.optimal_figures import SHORT, trained_table
from trainledger.forecast.plan.optimal import LOSS_LAW, Choice, Optimal
from trainledger.forecast.plan.scaling_law import LossLaw, laws
from trainledger.spec.units import format_count, format_flops
from trainledger.web.calculator import PLAIN, Calculator, Drawing, Headline, Progress, Reply
from trainledger.web.field import Field, Query, one_of, powers, rising
from trainledger.web.headlines import SIX_ND_MFU
from trainledger.web.run import CLUSTER

_BUDGETS = {
    "flops": ("flops",),
    "device_hours": ("device_hours",),
    "days": ("count", "days"),
    "money": ("money", "price"),
}
_IN = {"days": "days of devices", "device_hours": "device-hours", "money": "money", "flops": "FLOPs"}
_COMMON = ("law", "loss_law", "params", "ratio", "inference", "unique")
_OF_DEVICES = ("device", "mfu")
_DAYS = tuple(map(str, (1, 2, 3, 5, 7, 10, 14, 21, 30, 45, 60, 90, 120, 180, 365)))
_FLOPS = tuple(f"{step}e{power}" for power in range(17, 28) for step in (1, 2, 3, 5))


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


def _headlines(answer: Optimal) -> list[Headline]:
    chosen, budget, by = answer.chosen, answer.budget, answer.loss_law
    n, d = chosen.parameters.value, chosen.tokens
    headlines = [
        Headline(
            name="parameters", title="parameters N", value=answer.parameters, unit="count", basis="assumed",
            formula=f"{chosen.law.title}, at C = {budget.flops:.3g} FLOP{_range(chosen)}", source=chosen.law.source,
        ),
        Headline(
            name="tokens", title="tokens D", value=answer.tokens, unit="count", basis="assumed",
            formula=f"C / 6 N = {budget.flops:.3g} / (6 x {n:.3g})", source=chosen.law.source,
        ),
        Headline(
            name="loss", title="loss (nats per token)", value=chosen.loss.value, unit="ratio", basis="assumed",
            formula=f"E + A / N^alpha + B / D^beta = {by.E:.4g} + {by.A:.4g} / {n:.3g}^{by.alpha:.4g} + "
                    f"{by.B:.4g} / {d:.3g}^{by.beta:.4g}",
            source=by.source,
        ),
        Headline(
            name="flops", title="budget C", value=budget.flops, unit="flops", basis="assumed", formula=budget.formula,
            source="6 N D: Kaplan et al. 2020 (arXiv 2001.08361), section 2.1",
        ),
    ]  # fmt: skip
    if (asked := answer.asked) is not None:
        headlines.append(
            Headline(
                name="penalty",
                title="loss above the best",
                value=asked.penalty,
                unit="ratio",
                basis="assumed",
                formula=f"{asked.loss:.4f} with N = {asked.parameters:.3g} and D = {asked.tokens:.3g}; the same loss "
                f"could cost {format_flops(asked.same_loss_flops)}",
                source=by.source,
            )
        )
    if (served := answer.served) is not None:
        headlines.append(
            Headline(
                name="saved",
                title="saved by a smaller model",
                value=served.saved,
                unit="share",
                basis="assumed",
                formula=f"6 N D + 2 N D_inference = {format_flops(served.total_flops)} with N = "
                f"{served.parameters:.3g}, not {format_flops(served.optimal_total_flops)}",
                source="Sardana et al. 2023 (arXiv 2401.00448), equation 3",
            )
        )
    return headlines


def _range(chosen: Choice) -> str:
    between = chosen.parameters
    if between.low is None or between.high is None:
        return ""
    return f"; {format_count(_three(between.low))} to {format_count(_three(between.high))} ({between.means})"


_TITLES = {law.name: SHORT.get(law.name, law.title) for law in laws().values()}
_OF_LOSS = [law.name for law in laws().values() if isinstance(law, LossLaw)]

OPTIMAL = Calculator(
    name="optimal",
    title="Compute-optimal",
    question="What should a budget train: how large a model, on how much data?",
    fields=(
        Field(name="budget", title="the budget is in", default="days", group="Budget", strict=True,
              choices=tuple(_IN.items())),
        Field(name="device", title="device", default="h100-sxm", group="Budget", choices=CLUSTER[0].choices),
        Field(name="count", title="devices", default="32", group="Budget", stops=powers(1, 16384)),
        Field(name="days", title="days", default="14", group="Budget", stops=_DAYS),
        Field(name="device_hours", title="device-hours", default="10k", group="Budget", stops=rising("100", "100M")),
        Field(name="money", title="money", default="100k", group="Budget", stops=rising("100", "1B")),
        Field(name="price", title="price per device-hour", default="2.5", group="Budget",
              stops=tuple(f"{index / 4:g}" for index in range(1, 41))),
        Field(name="flops", title="FLOPs", default="1e22", group="Budget", stops=_FLOPS),
        Field(name="mfu", title=SIX_ND_MFU, default="40%", group="Budget",
              stops=tuple(f"{index}%" for index in range(5, 76)),
              about="the share of the peak that the run's 6 N D FLOPs reach; attention is not counted"),
        Field(name="law", title="law to follow", default="rule-20", group="Law", choices=one_of(_TITLES, **_TITLES)),
        Field(name="loss_law", title="law of the loss", default=LOSS_LAW, group="Law",
              choices=one_of(_OF_LOSS, **_TITLES)),
        Field(name="params", title="a model of N parameters instead", group="What if", stops=rising("10M", "1T")),
        Field(name="ratio", title="or of D / N tokens per parameter", group="What if",
              stops=tuple(map(str, (1, 2, 5, 10, 20, 40, 80, 160, 320, 640, 1000, 2000)))),
        Field(name="inference", title="tokens that will be served", group="What if", stops=rising("1B", "100T")),
        Field(name="unique", title="tokens that exist", group="What if", stops=rising("1B", "100T")),
        Field(name="follow", title="what the devices really afford", default="no", group="What if", strict=True,
              about="a shape, a layout and a predicted speed for it: takes seconds; of a budget in days",
              choices=(("no", "the rules alone"), ("yes", "a run of that shape, predicted"))),
        Field(name="family", title="shape of", default="llama-3-8b", group="What if",
              choices=one_of(catalog.model_names())),
    ),
    reply=_reply,
    presets={
        "32 H100 for two weeks at 40 % MFU": {},
        "100,000 dollars": {"budget": "money"},
        "Llama 3 8B's own budget": {"budget": "flops", "flops": "7.2e23", "params": "8B"},
        "Small, to be served": {"count": "256", "days": "30", "inference": "10T"},
        "Only 200B tokens exist": {"count": "256", "days": "30", "unique": "200B"},
    },
    patient=True,
)  # fmt: skip
