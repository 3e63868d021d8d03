"""What a budget buys: the compute-optimal model and data, and the run that it affords."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from trainledger.answers.cost import predicted
from trainledger.answers.load import model
from trainledger.answers.question import Progress, length, number, question, silent, text
from trainledger.answers.question import count as whole
from trainledger.forecast.plan import optimal as laws_of
from trainledger.forecast.plan.affordable import SEQ_LEN, affordable
from trainledger.forecast.plan.optimal import Optimal
from trainledger.forecast.plan.quantity import read_budget
from trainledger.forecast.plan.scaling_law import FixedSize, Law, RatioLaw
from trainledger.spec.problem import InvalidInput, Problem


@question()
def optimal(
    *,
    flops: Annotated[Any, text('training FLOPs, such as "6e23"')] = None,
    device: Annotated[Any, text("a device of the catalog")] = None,
    count: Annotated[Any, text("how many devices")] = None,
    days: Annotated[Any, text('days, or a time such as "2w"')] = None,
    device_hours: Annotated[Any, text("hours of one device, summed over all")] = None,
    money: Annotated[Any, text("money, in the currency of the price")] = None,
    price: Annotated[Any, text("money for an hour of one device")] = None,
    mfu: Annotated[Any, text("share of the peak that the rule assumes")] = 0.5,
    dtype: Annotated[str | None, text("whose peak counts; bf16 where the device has it, else fp16")] = None,
    law: Annotated[str, text("the law to follow; --json lists them all")] = laws_of.FOLLOWED_LAW,
    loss_law: Annotated[str, text("the law that predicts losses")] = laws_of.LOSS_LAW,
    params: Annotated[int | None, whole('the loss and cost of a model of this size instead, such as "8B"')] = None,
    ratio: Annotated[
        float | None, number("those of so many tokens per parameter instead", least=1e-3, most=1e6)
    ] = None,
    inference: Annotated[int | None, whole('tokens that will be served, such as "2T"')] = None,
    unique: Annotated[int | None, whole("tokens that exist; more are repetitions")] = None,
    family: Annotated[str | None, text("model whose shape is scaled; none = the rules alone")] = "llama-3-8b",
    seq_len: Annotated[int, length("tokens of a sequence")] = SEQ_LEN,
    tokens_per_step: Annotated[
        int | None,
        whole("about so many tokens in a step", most=10**12, default_text="4M; 16M from 1e24 FLOP, fewer below 7e21"),
    ] = None,
    progress: Progress = silent,
) -> Optimal:
    """The compute-optimal model and data for a budget, by every published law; and what the budget really pays for.

    The budget is one of --flops, --device-hours, --days with --count, or --money with --price. With devices and days
    the rule's model gets a shape, a layout that fits and a predicted speed, and the rule is applied again at that
    speed.

    ``params`` or ``ratio`` asks for one model off the optimum, and that is what is afforded. ``family`` None or "none"
    leaves the run out, as does a budget without devices and days. Raises `InvalidInput`.

    >>> best = optimal(device="h100-sxm", count=32, days="2w", family=None)
    >>> best.parameters // 10**8, best.tokens // 10**9
    (126, 252)
    """
    problems: list[Problem] = []
    base = None
    try:
        base = None if family in (None, "none") else model(str(family))
    except InvalidInput as error:
        problems += [replace(problem, field="family") for problem in error.placed()]
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
        budget, law=law, loss_law=loss_law, parameters=params, tokens_per_parameter=ratio, inference_tokens=inference,
        unique_tokens=unique,
    )  # fmt: skip
    if base is None or budget.seconds is None or budget.device is None:
        return answer
    follow: Law = answer.chosen.law
    if params is not None:
        follow = FixedSize(name="asked", title="the requested size", size=params)
    elif ratio is not None:
        title = "the requested tokens per parameter"
        follow = RatioLaw(name="asked", title=title, tokens_per_parameter=ratio)
    found = affordable(
        budget, follow, base, budget.device, predicted, seq_len=seq_len, tokens_per_step=tokens_per_step,
        loss=answer.loss_law.loss if answer.asked is None else None, say=lambda what: progress(what, 0, 0),
    )  # fmt: skip
    return replace(answer, affordable=found)
