"""What a budget buys: the compute-optimal model and data, and the run that it affords."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trainledger.answers.cost import predicted
from trainledger.answers.load import model
from trainledger.forecast.plan import optimal as laws_of
from trainledger.forecast.plan.affordable import SEQ_LEN, affordable
from trainledger.forecast.plan.optimal import Optimal
from trainledger.forecast.plan.quantity import read, read_budget
from trainledger.forecast.plan.scaling_law import FixedSize, Law, RatioLaw
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import parse_count, parse_number


def optimal(
    *,
    flops: Any = None,
    device: Any = None,
    device_hours: Any = None,
    count: Any = None,
    days: Any = None,
    money: Any = None,
    price: Any = None,
    mfu: Any = 0.5,
    dtype: str | None = None,
    law: str | None = None,
    loss_law: str | None = None,
    params: Any = None,
    ratio: Any = None,
    inference: Any = None,
    unique: Any = None,
    family: str | None = "llama-3-8b",
    seq_len: Any = None,
    tokens_per_step: Any = None,
    say: Callable[[str], None] = lambda _: None,
) -> Optimal:
    """The compute-optimal N and D for a budget, and the run that it affords (`trainledger.forecast.plan.optimal`).

    The budget is exactly one of ``flops``, ``device_hours``, ``days`` with ``count``, ``money`` with ``price``; numbers
    may be text. ``params`` or ``ratio`` (tokens per parameter) asks for one model off the optimum, and that is what is
    afforded; ``inference`` is the tokens that will be served, ``unique`` those that exist. ``family`` is the model of
    the catalog whose shape that run has; None leaves it out, as does a budget without devices and days. ``say`` hears
    what is being looked at. Raises `InvalidInput`.

    >>> best = optimal(device="h100-sxm", count=32, days="2w", family=None)
    >>> best.parameters // 10**8, best.tokens // 10**9
    (126, 252)
    """
    problems: list[Problem] = []
    named = {"params": params, "inference": inference, "unique": unique}
    numbers = {name: read(name, each, parse_count, problems, least=1) for name, each in named.items()}
    per = read("ratio", ratio, parse_number, problems, least=1e-3, most=1e6)
    tokens = read("seq_len", seq_len, parse_count, problems, least=1, most=10**9) or SEQ_LEN
    step = read("tokens_per_step", tokens_per_step, parse_count, problems, least=1, most=10**12)
    base = None
    try:
        base = None if family is None else model(family)
    except InvalidInput as error:
        problems += [replace(each, field="family") for each in error.placed()]
    try:
        budget = read_budget(
            flops=flops, device=device, device_hours=device_hours, count=count, days=days, money=money, price=price,
            mfu=mfu, dtype=dtype,
        )  # fmt: skip
    except InvalidInput as error:
        problems += error.placed()
    if problems:
        raise InvalidInput(problems)
    answer = laws_of.optimal(
        budget, law=law or laws_of.FOLLOWED_LAW, loss_law=loss_law or laws_of.LOSS_LAW, parameters=numbers["params"],
        tokens_per_parameter=per, inference_tokens=numbers["inference"], unique_tokens=numbers["unique"],
    )  # fmt: skip
    if base is None or budget.seconds is None or budget.device is None:
        return answer
    follow: Law = answer.chosen.law
    if numbers["params"] is not None:
        follow = FixedSize(name="asked", title="the requested size", size=numbers["params"])
    elif per is not None:
        title = "the requested tokens per parameter"
        follow = RatioLaw(name="asked", title=title, tokens_per_parameter=per)
    found = affordable(
        budget, follow, base, budget.device, predicted, seq_len=tokens, tokens_per_step=step,
        loss=answer.loss_law.loss if answer.asked is None else None, say=say,
    )  # fmt: skip
    return replace(answer, affordable=found)
