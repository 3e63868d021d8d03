"""Inverse questions: what breaks first, what to change, how to spread a run, what fits, and what a budget buys."""

from __future__ import annotations

import argparse
from argparse import Namespace
from typing import Any

import trainledger as tl
from trainledger.cli.arguments import PLOT, group, option, options, takes
from trainledger.cli.asking import while_waiting
from trainledger.report.document import Answer
from trainledger.spec.problem import Problem, nearest_text
from trainledger.spec.reading import value_of

_BUDGET = {
    "cluster.device": "device",
    "cluster.count": "count",
    "cluster.price_per_device_hour": "price",
    "recipe.seq_len": "seq_len",
}


class _Set(argparse.Action):
    """``--set SECTION.FIELD=VALUE``, as other verbs have it, for the fields that have an option here too."""

    def __call__(self, parser: object, namespace: Namespace, values: Any, flag: str | None = None) -> None:
        field, _, text = values.partition("=")
        if option := _BUDGET.get(field.strip()):
            setattr(namespace, option, value_of(None, text.strip()) if text.strip() else None)
            return
        rule = f"is no field of a budget, which has {', '.join(_BUDGET)}; layout and recipe are found here"
        names = {each.partition(".")[2]: each for each in _BUDGET}
        near = nearest_text(field.strip().rpartition(".")[2], names)
        wrong = getattr(namespace, "problems", [])
        namespace.problems = [*wrong, Problem("--set", values, rule, names[near] if near else None)]


@takes(
    option("--flops C", 'training FLOPs, such as "6e23"'),
    option("--device", "a device of the catalog"),
    option("--count", "how many devices"),
    option("--days", 'days, or a time such as "2w"'),
    option("--device-hours H", "hours of one device, summed over all"),
    option("--money", "money, in the currency of --price"),
    option("--price", "money for an hour of one device"),
    option(
        "--set SECTION.FIELD=VALUE",
        f"an option by its name in a run file: {', '.join(_BUDGET)}",
        action=_Set,
        dest=argparse.SUPPRESS,
    ),
    option("--mfu", "share of the peak that the rule assumes (0.5)"),
    option("--dtype", "whose peak counts; bf16 where the device has it, else fp16"),
    option("--law NAME", "the law to follow (rule-20); --json lists them all"),
    option("--loss-law NAME", "the law that predicts losses (besiroglu)"),
    group(
        "",
        option("--params N", 'the loss and cost of a model of this size instead, such as "8B"'),
        option("--ratio K", "those of so many tokens per parameter instead"),
    ),
    option("--inference TOKENS", 'tokens that will be served, such as "2T"'),
    option("--unique TOKENS", "tokens that exist; more are repetitions"),
    option("--family MODEL", "model of the catalog whose shape is scaled (llama-3-8b); none = the rules alone"),
    option("--seq-len T", "tokens of a sequence (4096)"),
    option("--tokens-per-step N", "about so many tokens in a step (4M; 16M from 1e24 FLOP, fewer below 7e21)"),
    PLOT,
)
def optimal(args: Namespace) -> Answer:
    """The compute-optimal model and data for a budget, by every published law; and what the budget really pays for.

    The budget is one of --flops, --device-hours, --days with --count, or --money with --price. With devices and days
    the rule's model gets a shape, a layout that fits and a predicted speed, and the rule is applied again at that
    speed.
    """
    budget = {name: None if (name, value) == ("family", "none") else value for name, value in options(args).items()}
    return tl.optimal(**budget, say=while_waiting())
