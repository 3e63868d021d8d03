"""The inverse questions: which layout, what fits, the first limit, what to change, what a budget buys; and serving.

``run`` is whatever `load` takes, with ``overrides`` as there; what a model that is named alone is given is in
`answers.defaults`, and in ``run.origin`` of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from trainledger.answers import defaults
from trainledger.answers.cost import predicted
from trainledger.answers.fast_precision import precision_notes
from trainledger.answers.layout import spread, why_no_layout
from trainledger.answers.load import Progress, Source, model, resolve
from trainledger.answers.machine import kernels_of, machine_of
from trainledger.answers.source import also
from trainledger.forecast.plan import optimal as laws_of
from trainledger.forecast.plan.advise import Advice
from trainledger.forecast.plan.advise import advise as advice_on
from trainledger.forecast.plan.affordable import SEQ_LEN, affordable
from trainledger.forecast.plan.breaks import Breaks
from trainledger.forecast.plan.breaks import breaks as breaks_of
from trainledger.forecast.plan.fit import QUESTIONS, Fit, what_fits
from trainledger.forecast.plan.layouts.grid import fixed_by, read_fixed
from trainledger.forecast.plan.layouts.result import Layouts
from trainledger.forecast.plan.limits import Limits
from trainledger.forecast.plan.optimal import Optimal
from trainledger.forecast.plan.quantity import read, read_budget
from trainledger.forecast.plan.scaling_law import FixedSize, Law, RatioLaw
from trainledger.forecast.plan.serving import Inference, served
from trainledger.forecast.plan.sizes import AXES
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.reading import Overrides
from trainledger.spec.run import Run
from trainledger.spec.serving import Serving
from trainledger.spec.units import parse_count, parse_number, parse_seconds


def layouts(
    run: Source,
    overrides: Overrides = (),
    *,
    devices: int | str | None = None,
    device: str | None = None,
    fixed: Mapping[str, Any] | None = None,
    keep: int | str = 10,
    limit_seconds: float | str = 30.0,
    why: bool = True,
    progress: Progress | None = None,
) -> Layouts:
    """The layouts of a run with the shortest steps, on its cluster or on ``devices`` and ``device`` instead.

    The layout, micro-batch and activation checkpointing of the run are searched for; ``fixed`` gives some of them a
    value (``{"tensor": 8}``). ``keep`` are ranked, the full accounts take at most ``limit_seconds``; ``progress`` is
    called with the phase, how much of it is done, and its total. Where no layout is allowed, the notes say why and
    which change allows one, unless ``why`` is off. Raises `InvalidInput`.
    """
    more = {"cluster.count": devices, "cluster.device": device, "layout.auto": True}
    run = resolve(run, also(overrides, more), purpose=defaults.SEARCH, search=False)
    problems: list[Problem] = []
    most = read("keep", keep, parse_count, problems, least=1, most=1000)
    limit = read("limit_seconds", limit_seconds, parse_seconds, problems, least=0, most=10**6)
    axes = read_fixed(fixed or {}, problems)
    if problems:
        raise InvalidInput(problems)
    found = spread(run, fixed=axes, keep=most, limit_seconds=limit, progress=progress)
    if found.allowed or found.interrupted or not why:
        return found
    return replace(found, notes=(*found.notes, str(why_no_layout(found, axes, progress=progress))))


def breaks(
    run: Source,
    overrides: Overrides = (),
    *,
    along: str | Iterable[str] | None = None,
    reach: int | str = 64,
    most: int | str = 3,
    exposed: float | str = 0.2,
    lost: float | str = 0.1,
    unique_tokens: int | str | None = None,
    keep_tokens: bool = True,
    say: Callable[[str], None] = lambda _: None,
    progress: Progress | None = None,
) -> Breaks:
    """The first three limits that a run meets as one of its sizes grows (`trainledger.forecast.plan.breaks`).

    ``along`` are axes of `trainledger.forecast.plan.sizes.AXES` (None: all). ``exposed`` is the share of a step that
    communication, or a pipeline's bubble, may take; ``lost`` that of a run that checkpoints and failures may take;
    ``unique_tokens`` how many tokens there are. Numbers may be text (``"20%"``, ``"15T"``). Longer sequences keep the
    tokens of a step; with ``keep_tokens`` off, their number. A layout that is searched for (``layout.auto``) follows
    the size. ``say`` is called with what is being looked at. Raises `InvalidInput`.
    """
    asked = resolve(run, overrides, search=False)
    run = defaults.with_length(resolve(run, overrides, progress=progress))
    problems: list[Problem] = []
    shares = {"exposed": exposed, "lost": lost}
    bearable = {name: read(name, each, parse_number, problems, least=0, most=1) for name, each in shares.items()}
    unique = read("unique_tokens", unique_tokens, parse_count, problems, least=1)
    far = read("reach", reach, parse_count, problems, least=2, most=10**6)
    few = read("most", most, parse_count, problems, least=1, most=20)
    if problems:
        raise InvalidInput(problems)
    return breaks_of(
        run, machine_of(run), backend=kernels_of(run), axes=_several(along, AXES),
        limits=Limits(unique_tokens=unique, **bearable), reach=far, most=few, keep_tokens=keep_tokens,
        planner=_planner(asked) if asked.layout.auto else None, say=say,
    )  # fmt: skip


def _planner(asked: Run) -> Callable[[Run], Run | None]:
    """Searches for the layout of other runs as of the requested one: the fields that it gives are kept."""

    def planned(run: Run) -> Run | None:
        free = replace(
            run.recipe,
            micro_batch=asked.recipe.micro_batch,
            activation_checkpointing=asked.recipe.activation_checkpointing,
        )
        wanted = replace(run, layout=asked.layout, recipe=free)
        try:
            found = spread(wanted, fixed=fixed_by(wanted), keep=1, front=False, first=True)
        except InvalidInput:  # such as more devices than a known network joins
            return None
        if found.interrupted:
            raise KeyboardInterrupt
        return None if found.simplest is None else found.simplest.run

    return planned


def advise(
    run: Source,
    overrides: Overrides = (),
    *,
    goal: str | None = None,
    together: int | str = 3,
    any_result: bool = False,
    say: Callable[[str], None] = lambda _: None,
    progress: Progress | None = None,
) -> Advice:
    """What to change, ranked by predicted gain in time, or in memory where the run does not fit (`plan.advise`).

    ``goal`` (time or memory) asks for one of the two; ``together`` is how many changes are combined at most, with
    ``any_result`` also those that change what is trained. ``say`` hears what is being predicted. Raises `InvalidInput`.
    """
    run = defaults.with_length(resolve(run, overrides, progress=progress))
    problems: list[Problem] = []
    most = read("together", together, parse_count, problems, least=0, most=10)
    if problems:
        raise InvalidInput(problems)
    advice = advice_on(
        run, machine_of(run), backend=kernels_of(run), goal=goal, together=most, any_result=any_result, say=say
    )
    return replace(advice, notes=precision_notes(run))


def fit(
    run: Source,
    overrides: Overrides = (),
    *,
    of: str | Iterable[str] | None = None,
    changes: bool = True,
    answered: Callable[[int, int], None] | None = None,
    progress: Progress | None = None,
) -> Fit:
    """The largest model, longest sequence, largest micro-batch, fewest devices and least memory that fit.

    ``of`` names some of these questions: model, sequence, micro-batch, devices, memory. Each is asked of the run as it
    is and, unless ``changes`` is off, with changes that need less memory; ``answered`` hears how many of how many are
    answered. Raises `InvalidInput`.
    """
    run = resolve(run, overrides, purpose=defaults.FIT, progress=progress)
    return what_fits(
        run, machine_of(run), backend=kernels_of(run), of=_several(of, QUESTIONS), changes=changes, progress=answered
    )


def inference(
    run: Source,
    overrides: Overrides = (),
    *,
    phase: str = "decode",
    batch: int | str = 1,
    context: int | str | None = None,
    weights: str | None = None,
    cache: str | None = None,
    compute: str | None = None,
    quantized: str = "linear",
) -> Inference:
    """Memory and time of one forward in serving: ``prefill`` of a prompt or ``decode`` of one more token.

    ``context`` is recipe.seq_len where it is not given, ``compute`` bf16 (fp16 where the device has no bf16), and
    ``weights`` and ``cache`` (`spec.serving`) are as ``compute``. With ``layout.auto`` it takes the fewest tensor ranks
    that hold them, unless ``layout.tensor`` is given. Raises `InvalidInput`.
    """
    # A search would be one of layouts to train with.
    # What predicts further tokens is not served.
    run = resolve(run, also(overrides, {"model.n_mtp_layers": 0}), purpose=defaults.SERVE, search=False)
    if run.layout.auto and "layout.tensor" in run.origin.explicit:
        run = replace(run, layout=replace(run.layout, auto=False))
    problems: list[Problem] = []
    sequences = read("batch", batch, parse_count, problems, least=1, most=10**9)
    tokens = read("context", context, parse_count, problems, least=1, most=10**9)
    machine = machine_of(run)
    if compute is None:
        peaks = {} if machine is None else machine.peak_flops_per_second
        compute = next((each for each in ("bf16", "fp16", "fp32") if each in peaks), "bf16")
    serving = Serving(
        phase=phase, batch=sequences or 1, context=tokens or run.recipe.seq_len,
        weights=compute if weights is None else weights, cache=compute if cache is None else cache, compute=compute,
        quantized=quantized,
    )  # fmt: skip
    problems += serving.problems()
    if problems:
        raise InvalidInput(problems)
    return served(run, serving, machine, backend=kernels_of(run))


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


def _several(named: str | Iterable[str] | None, every: Iterable[str]) -> tuple[str, ...]:
    """One name, or several, or none for all."""
    return (named,) if isinstance(named, str) else tuple(every if named is None else named)
