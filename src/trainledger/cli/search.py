"""Inverse questions: what breaks first, what to change, how to spread a run, what fits, and what a budget buys."""

from __future__ import annotations

import argparse
from argparse import Namespace
from typing import Any

import trainledger as tl
from trainledger.answers.layout import why_no_layout
from trainledger.answers.pages.advise import document as advice
from trainledger.cli.arguments import (
    DONE,
    INTERRUPTED,
    PLOT,
    RUN,
    WRONG_INPUT,
    Outcome,
    count,
    flag,
    group,
    option,
    options,
    quantity,
    takes,
)
from trainledger.cli.asking import asked, while_searching, while_waiting
from trainledger.forecast.plan.fit import QUESTIONS
from trainledger.forecast.plan.layouts.grid import FIELDS, KNOWN, read_fixed
from trainledger.report.document import Answer, Document
from trainledger.spec.problem import InvalidInput, Problem, nearest_text
from trainledger.spec.reading import value_of
from trainledger.spec.units import parse_number, parse_seconds


@takes(
    *RUN,
    option(
        "--along AXIS",
        "what grows: sequence, batch, width, depth, devices, dataset or vocabulary; may be repeated (all)",
        action="append",
    ),
    count("--reach TIMES", "up to so many times the planned value (64)", least=2, most=10**6),
    count("--most N", "how many limits of each size (3)", most=20),
    quantity(
        "--exposed SHARE",
        "share of a step that communication, or the bubble, may take (20%%)",
        parse_number,
        least=0,
        most=1,
    ),
    quantity(
        "--lost SHARE", "share of a run that checkpoints and failures may take (10%%)", parse_number, least=0, most=1
    ),
    option(
        "--keep-batch",
        "keep the sequences of a step as they grow longer; absent: keep its tokens",
        action="store_false",
        dest="keep_tokens",
    ),
    count("--unique-tokens N", 'tokens that the dataset has, such as "15T"'),
    PLOT,
)
def breaks(args: Namespace) -> Answer:
    """The first, second and third limit of a run as one of its sizes grows.

    Each limit is exact: the last value that works and the next one that does not (a vocabulary grows by 128 rows for
    each tensor rank). With --set layout=auto the layout follows the size, on a grid of values. RUN is a run file, a
    model of the catalog or a Hugging Face config.json.
    """
    found: Answer = asked(tl.breaks, args, say=while_waiting())
    return found


@takes(
    *RUN,
    option("--goal GOAL", "time or memory; absent = memory where the run does not fit"),
    count("--together N", "how many changes to combine at most (3)", least=0, most=10),
    flag("--any-result", "combine also changes of what is trained"),
    count("--most N", "how many of each kind to print (10)", most=1000, default=10),
    PLOT,
)
def advise(args: Namespace) -> Document:
    """What to change about a run, ranked by the gain in time, or in memory where it does not fit.

    Every change is made and predicted. Each comes with its --set line to paste, and says whether it changes what is
    trained. RUN is a run file, a model of the catalog or a Hugging Face config.json.
    """
    most = vars(args).pop("most")
    return advice(asked(tl.advise, args, say=while_waiting()), most=most)


@takes(
    *RUN,
    option(
        "--fix NAME=VALUE",
        "only layouts with this, such as tensor=8 or micro_batch=1; may be repeated",
        action="append",
        default=[],
    ),
    count("--keep N", "how many layouts to rank (10)", most=1000),
    quantity(
        "--limit TIME",
        "the most time for exact accounts of the best layouts (30s)",
        parse_seconds,
        least=0,
        most=10**6,
        dest="limit_seconds",
    ),
    PLOT,
)
def layouts(args: Namespace) -> Answer | Outcome:
    """The fastest ways to spread a run over devices: every layout has a bound, the best are accounted for.

    RUN is a run file, or a model of the catalog or a Hugging Face config.json. The search replaces its own layout,
    micro-batch and activation checkpointing, unless --fix gives them a value. A model without a batch gets one of about
    4 million tokens, in sequences of at most 8,192. Exit code 130 where the search was interrupted: it ranks what was
    accounted for until then. Exit code 2 where no layout fits.
    """
    fixed = _fixed(vars(args).pop("fix"))
    found = asked(tl.layouts, args, fixed=fixed, why=False)
    if found.best is not None:
        return Outcome(found, INTERRUPTED if found.interrupted else DONE)
    if found.interrupted:
        raise KeyboardInterrupt
    return Outcome(found, WRONG_INPUT, why_no_layout(found, fixed, progress=while_searching()))


def _fixed(words: list[str]) -> dict[str, Any]:
    """The values that ``--fix`` gives to axes; raises InvalidInput."""
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for word in words:
        name, equals, text = word.partition("=")
        name = name.strip().rpartition(".")[2]
        if not equals or name not in FIELDS:
            rule = f"is written NAME=VALUE, with a name of {', '.join(FIELDS)}"
            problems.append(Problem("--fix", word, rule, nearest_text(name, FIELDS)))
        else:
            values[name] = value_of(KNOWN[name], text.strip())
    found = read_fixed(values, problems, "--fix ")
    if problems:
        raise InvalidInput(problems)
    return found


@takes(
    *RUN,
    option("--of QUESTION", f"only this question: {', '.join(QUESTIONS)}; may be repeated", action="append"),
    option("--as-is", "the recipe without changes that save memory", action="store_false", dest="changes"),
    PLOT,
)
def fit(args: Namespace) -> Answer:
    """The largest model, longest sequence, largest micro-batch, fewest devices and least memory that fit.

    RUN is a run file, or a model of the catalog or a Hugging Face config.json: then states are sharded over --count
    devices, one sequence of at most 8,192 tokens at a time, unless --set says otherwise; with --set layout=auto it is
    the run of `trainledger plan`.
    """
    show = while_waiting()
    found: Answer = asked(
        tl.fit, args, answered=lambda done, of: show("" if done == of else f"{done} of {of} questions")
    )
    return found


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
        problem = Problem("--set", values, rule, names[near] if near else None)
        namespace.problems = [*getattr(namespace, "problems", []), problem]


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
