"""The questions that a run is asked before it starts: what it costs, what fits, what breaks, what should change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from trainledger.loaded import kernels_of, machine_of, model
from trainledger.spec.cluster import Device
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Run
from trainledger.spec.setting import Broken, read_value

if TYPE_CHECKING:
    from trainledger.ledger.entry import Ledger
    from trainledger.plan.advise import Advice
    from trainledger.plan.breaks import Breaks
    from trainledger.plan.compare import Comparison
    from trainledger.plan.fit.answer import Fit
    from trainledger.plan.layouts.found import Layouts
    from trainledger.plan.optimal import Optimal
    from trainledger.plan.plan import Plan
    from trainledger.predict.forecast import Forecast
    from trainledger.predict.inference import Inference


def account(run: Run, *, backend: str | None = None) -> Ledger:
    """The closed-form ledger of one optimizer step of a rank: of a layout, of its first stage.

    ``backend`` (cpu or cuda) says whose kernels run; absent, those of the run's device. Raises `InvalidInput` where the
    run's fields contradict each other; runs whose sizes are arrays or symbols are not checked (`ledger.step.account`).
    """
    from trainledger.ledger import step

    sizes = [*vars(run.model).values(), *vars(run.recipe).values(), *vars(run.layout).values()]
    if not any(hasattr(each, "shape") or hasattr(each, "free_symbols") for each in sizes):
        # Who writes a layout by hand need not count its devices.
        found = list(_broken(run)) or [each for each in run.problems() if each.field != "cluster.count"]
        if found:
            raise InvalidInput(found)
    return step.account(run, backend=kernels_of(run) if backend is None else backend)


def _broken(run: Run) -> Iterator[Problem]:
    """Each field of a run made by hand that breaks a rule of its own."""
    for section in ("model", "recipe", "layout"):
        part = getattr(run, section)
        for each in fields(part):
            try:
                read_value(each, getattr(part, each.name))
            except Broken as broken:
                field = f"{section}.{each.name}"
                yield Problem(field, getattr(part, each.name), broken.rule, broken.nearest)


def plan(run: Run, *, mfu: float = 0.5) -> Plan:
    """Everything that can be said of a run before it starts; ``mfu`` is for the napkin's days."""
    from trainledger.plan.plan import make_plan

    return make_plan(run, machine_of(run), backend=kernels_of(run), mfu=mfu)


def predict(run: Run) -> Forecast:
    """What a run will cost, from its closed-form ledger and its machine: steps, times, memory, MFU, where time goes."""
    from trainledger.predict.predict import predict as predicted

    return predicted(run, machine_of(run), backend=kernels_of(run))


def layouts(
    run: Run,
    *,
    devices: int | None = None,
    device: str | None = None,
    fixed: Mapping[str, Any] | None = None,
    keep: int = 10,
    limit_seconds: float = 30.0,
    progress: Callable[[str, int, int], None] | None = None,
) -> Layouts:
    """The quickest layouts of a run on its cluster, or on so many ``devices`` of a kind (`trainledger.plan.layouts`).

    The layout, micro-batch and activation checkpointing of the run are searched for; ``fixed`` gives some of them a
    value (``{"tensor": 8}``). ``keep`` are ranked, accounted for at most ``limit_seconds`` long; ``progress`` hears
    what is done, how much of it and of how much. Raises `InvalidInput`.
    """
    from trainledger.plan.layouts.grid import whole
    from trainledger.plan.layouts.search import search
    from trainledger.predict.roofline import NoRate

    count, name = devices or run.cluster.count, device or run.cluster.device
    run = replace(whole(run), cluster=replace(run.cluster, count=count, device=name))
    machine = machine_of(run)
    if not isinstance(machine, Device):
        rule = "has no links on record, so layouts on it cannot be timed; name a device of the catalog"
        raise InvalidInput([Problem("cluster.device", name, rule)])
    fabric = machine.fabric
    if fabric is not None and fabric.network is None and count > fabric.devices_per_node:
        rule = (
            f"is not known of {name}, and {count:,} devices are more than the {fabric.devices_per_node} of a node; "
            "name a link (trainledger catalog links) or set cluster.devices_per_node"
        )
        raise InvalidInput([Problem("cluster.network", None, rule)])
    try:
        return search(
            run, machine, backend=kernels_of(run), fixed=fixed, keep=keep, limit_seconds=limit_seconds,
            progress=progress,
        )  # fmt: skip
    except NoRate as reason:
        raise InvalidInput([Problem("cluster.device", name, f"has a rate that is not known: {reason}")]) from None


def breaks(
    run: Run,
    *,
    along: Iterable[str] | None = None,
    reach: int = 64,
    most: int = 3,
    exposed: float = 0.2,
    lost: float = 0.1,
    unique_tokens: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Breaks:
    """What gives way first, second and third when one thing of a run grows (`trainledger.plan.breaks`).

    ``along`` are axes of `trainledger.plan.growth.AXES` (None: all). ``exposed`` is the share of a step that
    communication, or a pipeline's bubble, may take; ``lost`` that of a run that checkpoints and failures may take;
    ``unique_tokens`` how many tokens there are. ``say`` hears what is being looked at. Raises `InvalidInput`.
    """
    from trainledger.plan.breaks import breaks as found
    from trainledger.plan.growth import AXES
    from trainledger.plan.limits import Limits

    axes = tuple(AXES if along is None else along)
    limits = Limits(exposed, lost, unique_tokens)
    return found(
        run, machine_of(run), backend=kernels_of(run), axes=axes, limits=limits, reach=reach, most=most, say=say
    )  # fmt: skip


def advise(
    run: Run,
    *,
    goal: str | None = None,
    together: int = 3,
    any_result: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Advice:
    """What to change, ranked by predicted gain in time, or in memory where the run does not fit (`plan.advise`).

    ``goal`` (time or memory) asks for one of the two; ``together`` is how many changes are combined at most, with
    ``any_result`` also those that change what is trained. ``say`` hears what is being predicted.
    """
    from trainledger.plan.advise import advise as found

    return found(
        run, machine_of(run), backend=kernels_of(run), goal=goal, together=together, any_result=any_result, say=say
    )


def compare(a: Run, b: Run) -> Comparison:
    """Two runs beside each other: what they say differently, what they cost, and which causes make the difference."""
    from trainledger.plan.compare import compare as found

    return found(a, predict(a), b, predict(b))


def inference(
    run: Run,
    *,
    phase: str = "decode",
    batch: int = 1,
    context: int | None = None,
    weights: str | None = None,
    cache: str | None = None,
    compute: str | None = None,
    quantized: str = "linear",
) -> Inference:
    """One forward of the run's model, served on its device: ``prefill`` of a prompt or ``decode`` of one more token.

    ``context`` is recipe.seq_len where it is not given, ``compute`` bf16 (fp16 where the device has no bf16), and
    ``weights`` and ``cache`` (`spec.serving`) are as ``compute``. Raises `InvalidInput`.
    """
    from trainledger.predict.inference import inference as told
    from trainledger.spec.serving import Serving

    machine = machine_of(run)
    if compute is None:
        peaks = {} if machine is None else machine.peak_flops_per_second
        compute = next((each for each in ("bf16", "fp16", "fp32") if each in peaks), "bf16")
    serving = Serving(
        phase=phase, batch=batch, context=run.recipe.seq_len if context is None else context,
        weights=compute if weights is None else weights, cache=compute if cache is None else cache, compute=compute,
        quantized=quantized,
    )  # fmt: skip
    return told(run, serving, machine, backend=kernels_of(run))


def fit(run: Run, *, of: Iterable[str] | None = None, changes: bool = True, told: Any = None) -> Fit:
    """The largest model, longest sequence, largest micro-batch, fewest devices and least memory that fit.

    ``of`` names some of these questions: model, sequence, micro-batch, devices, memory. Each is asked of the run as it
    is and, unless ``changes`` is off, with changes that need less memory. Raises `InvalidInput`.
    """
    from trainledger.plan.fit.answer import what_fits
    from trainledger.plan.fit.questions import QUESTIONS

    asked = tuple(QUESTIONS if of is None else of)
    return what_fits(run, machine_of(run), backend=kernels_of(run), of=asked, changes=changes, told=told)


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
    """The compute-optimal N and D for a budget, and the run that it really pays for (`trainledger.plan.optimal`).

    The budget is exactly one of ``flops``, ``device_hours``, ``days`` with ``count``, ``money`` with ``price``; numbers
    may be text. ``params`` or ``ratio`` (tokens per parameter) asks for one model off the optimum, and that is what is
    paid for; ``inference`` is the tokens that will be served, ``unique`` those that exist. ``family`` is the model of
    the catalog whose shape that run has; None leaves it out, as does a budget without devices and days. ``say`` hears
    what is being looked at. Raises `InvalidInput`.

    >>> best = optimal(device="h100-sxm", count=32, days="2w", family=None)
    >>> best.parameters // 10**8, best.tokens // 10**9
    (126, 252)
    """
    from dataclasses import replace

    from trainledger.plan import optimal as laws_of
    from trainledger.plan.budget import read_budget
    from trainledger.plan.paid import SEQ_LEN, pay
    from trainledger.plan.quantity import read
    from trainledger.plan.scaling_law import FixedSize, Law, RatioLaw
    from trainledger.units import parse_count, parse_number

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
        follow = FixedSize("asked", "the size that is asked for", numbers["params"])
    elif per is not None:
        follow = RatioLaw("asked", "the tokens per parameter that are asked for", per, "", "")
    paid = pay(
        budget, follow, base, budget.device, predict, seq_len=tokens, tokens_per_step=step,
        loss=answer.loss_law.loss if answer.asked is None else None, say=say,
    )  # fmt: skip
    return replace(answer, paid=paid)
