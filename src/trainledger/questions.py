"""The questions that a run is asked before it starts: what it costs, what fits, what breaks, what should change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainledger.loaded import checked, checked_model, kernels_of, load, machine_of, model, why_no_layout
from trainledger.spec.cluster import Device
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.run import Run
from trainledger.units import parse_count, parse_number, parse_seconds

if TYPE_CHECKING:
    from trainledger.ledger.ledger import Ledger
    from trainledger.ledger.model.parameters import ParameterCount
    from trainledger.plan.advise import Advice
    from trainledger.plan.breaks import Breaks
    from trainledger.plan.compare import Comparison
    from trainledger.plan.fit import Fit
    from trainledger.plan.layouts.result import Layouts
    from trainledger.plan.optimal import Optimal
    from trainledger.plan.plan import Plan
    from trainledger.predict.forecast import Forecast
    from trainledger.predict.serving import Inference
    from trainledger.predict.step import OnDevice
    from trainledger.spec.model import ModelSpec


def account(run: Run, *, backend: str | None = None) -> Ledger:
    """The closed-form ledger of one optimizer step of a rank: of a layout, of its first stage.

    ``backend`` (of `spec.kernels.KERNELS`) says whose kernels run; absent, those of the run's device. Raises
    `InvalidInput` where the run's fields contradict each other; runs whose sizes are arrays or symbols are not checked
    (`ledger.step.account`).
    """
    from trainledger.ledger import step

    if not (isinstance(run, Run) and any(_has_open_sizes(each) for each in (run.model, run.recipe, run.layout))):
        run = _counted(run)
    return step.account(run, backend=kernels_of(run) if backend is None else backend)


def _has_open_sizes(part: object) -> bool:
    """Whether a size is an array or a symbol."""
    sizes = getattr(part, "__dict__", {}).values()
    return any(hasattr(each, "shape") or hasattr(each, "free_symbols") for each in sizes)


def _counted(run: Run) -> Run:
    """The run, checked; who writes a layout by hand need not count its devices."""
    try:
        return checked(run)
    except InvalidInput as error:
        first, *others = error.problems
        if others or first.field != "cluster.count" or not isinstance(first.nearest, int):
            raise
        return checked(replace(run, cluster=replace(run.cluster, count=first.nearest)))


def parameters(spec: ModelSpec) -> ParameterCount:
    """The parameters of a model by component (`ledger.model.parameters`), whose fields agree with each other.

    Raises `InvalidInput` where they do not; a model whose sizes are arrays or symbols is not checked.

    >>> parameters(model("gpt2")).total
    124439808
    """
    from trainledger.ledger.model.parameters import parameters as counted
    from trainledger.spec.model import ModelSpec

    if not isinstance(spec, ModelSpec):
        rule = f"a ModelSpec belongs here, not {type(spec).__name__}; trainledger.model makes one of a model's name"
        raise InvalidInput([Problem("model", None, f"{rule}, and a Run has its own as run.model")])
    return counted(spec if _has_open_sizes(spec) else checked_model(spec))


def plan(run: Run, *, mfu: float | str = 0.5) -> Plan:
    """All that can be said of a run before it starts; ``mfu`` is for the napkin's days. Raises `InvalidInput`."""
    from trainledger.plan.plan import make_plan

    run = checked(run)
    return make_plan(run, machine_of(run), backend=kernels_of(run), mfu=mfu)


def predict(run: Run) -> Forecast:
    """What a run will cost, from its closed-form ledger and its machine: steps, times, memory, MFU, where time goes.

    Raises `InvalidInput` where a field breaks a rule of the run file, as `trainledger.load` does.
    """
    return _predicted(checked(run))


def _predicted(run: Run) -> Forecast:
    from trainledger.predict.predict import predict as predicted

    return predicted(run, machine_of(run), backend=kernels_of(run))


def on_device(ledger: Ledger, device: Device | str) -> OnDevice:
    """What a traced step would hold and take on a device of the catalog (`predict.step`).

    Collectives of a rank are named in the notes and not timed. Raises `InvalidInput`.
    """
    from trainledger import catalog
    from trainledger.ledger.ledger import Ledger
    from trainledger.predict.step import on_device as timed

    if not isinstance(ledger, Ledger):
        rule = f"a Ledger belongs here, such as of trainledger.trace, not {type(ledger).__name__}"
        raise InvalidInput([Problem("ledger", None, rule)])
    return timed(ledger, device if isinstance(device, Device) else catalog.device(str(device), "device"))


def layouts(
    run: Run,
    *,
    devices: int | str | None = None,
    device: str | None = None,
    fixed: Mapping[str, Any] | None = None,
    keep: int | str = 10,
    limit_seconds: float | str = 30.0,
    progress: Callable[[str, int, int], None] | None = None,
) -> Layouts:
    """The quickest layouts of a run on its cluster, or on so many ``devices`` of a kind (`trainledger.plan.layouts`).

    The layout, micro-batch and activation checkpointing of the run are searched for; ``fixed`` gives some of them a
    value (``{"tensor": 8}``). ``keep`` are ranked, accounted for at most ``limit_seconds`` long; ``progress`` hears
    what is done, how much of it and of how much. Where the rules allow none, the notes say why and what else would do.
    Raises `InvalidInput`.
    """
    from trainledger.plan.layouts.grid import read_fixed
    from trainledger.plan.quantity import read

    asked = {"cluster.count": devices, "cluster.device": device, "layout.auto": True}
    given = {name: each for name, each in asked.items() if each is not None}
    run = load(run, given, search=False) if isinstance(run, Run) else checked(run)
    problems: list[Problem] = []
    most = read("keep", keep, parse_count, problems, least=1, most=1000)
    limit = read("limit_seconds", limit_seconds, parse_seconds, problems, least=0, most=10**6)
    axes = read_fixed(fixed or {}, problems)
    if problems:
        raise InvalidInput(problems)
    found = spread(run, fixed=axes, keep=most, limit_seconds=limit, progress=progress)
    if found.allowed or found.interrupted:
        return found
    return replace(found, notes=(*found.notes, str(why_no_layout(found, axes, progress=progress))))


def spread(
    run: Run,
    *,
    fixed: Mapping[str, Any] | None = None,
    keep: int = 10,
    limit_seconds: float = 30.0,
    progress: Callable[[str, int, int], None] | None = None,
) -> Layouts:
    """As `layouts`, of a run that was checked before, and without its notes on what else would do."""
    from trainledger.plan.layouts.grid import whole
    from trainledger.plan.layouts.search import search
    from trainledger.predict.roofline import NoRate

    run, count, name = whole(run), run.cluster.count, run.cluster.device
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
    along: str | Iterable[str] | None = None,
    reach: int | str = 64,
    most: int | str = 3,
    exposed: float | str = 0.2,
    lost: float | str = 0.1,
    unique_tokens: int | str | None = None,
    keep_tokens: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Breaks:
    """What breaks first, second and third when one size of a run grows (`trainledger.plan.breaks`).

    ``along`` are axes of `trainledger.plan.sizes.AXES` (None: all). ``exposed`` is the share of a step that
    communication, or a pipeline's bubble, may take; ``lost`` that of a run that checkpoints and failures may take;
    ``unique_tokens`` how many tokens there are. Numbers may be text (``"20%"``, ``"15T"``). Longer sequences keep the
    tokens of a step; with ``keep_tokens`` off, their number. The layout of a run whose layout is to be searched for
    (``layout.auto``, of `load` with search=False) follows the size. ``say`` is called with what is being looked at.
    Raises `InvalidInput`.
    """
    from trainledger.plan.breaks import breaks as found
    from trainledger.plan.limits import Limits
    from trainledger.plan.quantity import read
    from trainledger.plan.sizes import AXES

    asked, run = run, checked(run)
    problems: list[Problem] = []
    shares = {"exposed": exposed, "lost": lost}
    bearable = {name: read(name, each, parse_number, problems, least=0, most=1) for name, each in shares.items()}
    unique = read("unique_tokens", unique_tokens, parse_count, problems, least=1)
    far = read("reach", reach, parse_count, problems, least=2, most=10**6)
    few = read("most", most, parse_count, problems, least=1, most=20)
    if problems:
        raise InvalidInput(problems)
    return found(
        run, machine_of(run), backend=kernels_of(run), axes=_several(along, AXES),
        limits=Limits(unique_tokens=unique, **bearable), reach=far, most=few, keep_tokens=keep_tokens,
        planner=_planner(asked) if asked.layout.auto else None, say=say,
    )  # fmt: skip


def _planner(asked: Run) -> Callable[[Run], Run | None]:
    """Searches for the layout of other runs as of the one that was asked for: what that one gives is kept."""
    from trainledger.plan.layouts.grid import fixed_by

    def planned(run: Run) -> Run | None:
        free = replace(
            run.recipe,
            micro_batch=asked.recipe.micro_batch,
            activation_checkpointing=asked.recipe.activation_checkpointing,
        )
        wanted = replace(run, layout=asked.layout, recipe=free)
        try:
            found = spread(wanted, fixed=fixed_by(wanted), keep=1, limit_seconds=3)
        except InvalidInput:  # such as more devices than a known network joins
            return None
        if found.interrupted:
            raise KeyboardInterrupt
        return None if found.simplest is None else found.simplest.run

    return planned


def advise(
    run: Run,
    *,
    goal: str | None = None,
    together: int | str = 3,
    any_result: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Advice:
    """What to change, ranked by predicted gain in time, or in memory where the run does not fit (`plan.advise`).

    ``goal`` (time or memory) asks for one of the two; ``together`` is how many changes are combined at most, with
    ``any_result`` also those that change what is trained. ``say`` hears what is being predicted. Raises `InvalidInput`.
    """
    from trainledger.plan.advise import advise as found
    from trainledger.plan.quantity import read

    run = checked(run)
    problems: list[Problem] = []
    most = read("together", together, parse_count, problems, least=0, most=10)
    if problems:
        raise InvalidInput(problems)
    return found(
        run, machine_of(run), backend=kernels_of(run), goal=goal, together=most, any_result=any_result, say=say
    )


def compare(a: Run, b: Run) -> Comparison:
    """Two runs beside each other: what they say differently, what they cost, and which causes make the difference.

    Raises `InvalidInput`.
    """
    from trainledger.plan.compare import compare as found

    a, b = checked(a), checked(b)
    return found(a, _predicted(a), b, _predicted(b))


def inference(
    run: Run,
    *,
    phase: str = "decode",
    batch: int | str = 1,
    context: int | str | None = None,
    weights: str | None = None,
    cache: str | None = None,
    compute: str | None = None,
    quantized: str = "linear",
) -> Inference:
    """One forward of the run's model, served on its device: ``prefill`` of a prompt or ``decode`` of one more token.

    ``context`` is recipe.seq_len where it is not given, ``compute`` bf16 (fp16 where the device has no bf16), and
    ``weights`` and ``cache`` (`spec.serving`) are as ``compute``. With ``layout.auto`` (of `load` with search=False) it
    takes the fewest tensor ranks that hold them. Raises `InvalidInput`.
    """
    from trainledger.plan.quantity import read
    from trainledger.predict.serving import served
    from trainledger.spec.serving import Serving

    # A search would be one of layouts to train with.
    run = load(run, search=False) if isinstance(run, Run) else checked(run)
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


def fit(run: Run, *, of: str | Iterable[str] | None = None, changes: bool = True, progress: Any = None) -> Fit:
    """The largest model, longest sequence, largest micro-batch, fewest devices and least memory that fit.

    ``of`` names some of these questions: model, sequence, micro-batch, devices, memory. Each is asked of the run as it
    is and, unless ``changes`` is off, with changes that need less memory. Raises `InvalidInput`.
    """
    from trainledger.plan.fit import QUESTIONS, what_fits

    run = checked(run)
    return what_fits(
        run, machine_of(run), backend=kernels_of(run), of=_several(of, QUESTIONS), changes=changes, progress=progress
    )


def _several(named: str | Iterable[str] | None, every: Iterable[str]) -> tuple[str, ...]:
    """One name, or several, or none for all."""
    return (named,) if isinstance(named, str) else tuple(every if named is None else named)


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
    """The compute-optimal N and D for a budget, and the run that it affords (`trainledger.plan.optimal`).

    The budget is exactly one of ``flops``, ``device_hours``, ``days`` with ``count``, ``money`` with ``price``; numbers
    may be text. ``params`` or ``ratio`` (tokens per parameter) asks for one model off the optimum, and that is what is
    afforded; ``inference`` is the tokens that will be served, ``unique`` those that exist. ``family`` is the model of
    the catalog whose shape that run has; None leaves it out, as does a budget without devices and days. ``say`` hears
    what is being looked at. Raises `InvalidInput`.

    >>> best = optimal(device="h100-sxm", count=32, days="2w", family=None)
    >>> best.parameters // 10**8, best.tokens // 10**9
    (126, 252)
    """
    from trainledger.plan import optimal as laws_of
    from trainledger.plan.affordable import SEQ_LEN, affordable
    from trainledger.plan.compute_budget import read_budget
    from trainledger.plan.quantity import read
    from trainledger.plan.scaling_law import FixedSize, Law, RatioLaw

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
    found = affordable(
        budget, follow, base, budget.device, _predicted, seq_len=tokens, tokens_per_step=step,
        loss=answer.loss_law.loss if answer.asked is None else None, say=say,
    )  # fmt: skip
    return replace(answer, affordable=found)
