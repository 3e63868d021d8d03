"""A plan for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from trainledger.ledger.model.parameters import parameters
from trainledger.plan.plan import by_causal
from trainledger.predict.device_memory import TENSORS_ALONE, of_a_device
from trainledger.predict.predict import ALONE
from trainledger.report.heading import of_run
from trainledger.report.table import WIDTH, sentence, table, wrapped
from trainledger.report.waterfall import text as waterfall
from trainledger.spec.lora import ONE_DEVICE
from trainledger.units import (
    KILO,
    PETA,
    counted,
    format_count,
    format_flops,
    format_flops_per_second,
    format_nbytes,
    format_percent,
    format_seconds,
)

if TYPE_CHECKING:
    from trainledger.plan.plan import Plan
    from trainledger.predict.forecast import Forecast
    from trainledger.spec.run import Run

_MUCH_ATTENTION = 0.3  # of the FLOPs of products
_SHOW = {"count": format_count, "flops": format_flops, "nbytes": format_nbytes, "seconds": format_seconds}


def text(plan: Plan) -> str:
    """The whole plan."""
    return "\n\n".join(_parts(plan))


def _parts(plan: Plan) -> Iterator[str]:
    told = plan.forecast
    yield _head(plan)
    yield _cost(plan)
    if told.waterfall:
        yield f"Where the time {_of(plan)} goes\n" + waterfall(told.waterfall)
    yield _memory_of_ranks(plan) if plan.ranks else _memory(plan)
    yield _rules(plan)
    if plan.napkin is not None:
        yield _napkin(plan)
    if told.notes:
        yield "\n".join(wrapped(sentence(each)) for each in told.notes)


def _of(plan: Plan) -> str:
    return "of a step" if plan.forecast.total_seconds is None else "of the run"


def _head(plan: Plan) -> str:
    return "\n".join(wrapped(each) for each in _whose(plan))


def _whose(plan: Plan) -> list[str]:
    spec = plan.run.model
    blocks = counted(spec.n_layers, "block")
    return [f"{spec.name}: {_parameters(plan)} in {blocks} of width {spec.d_model}", *of_run(plan.run)]


def about(plan: Plan) -> list[str]:
    """What the page of its figures says above them: the run, and whether it can be and fits."""
    told, fits = plan.forecast, _fits(plan)
    lines = _whose(plan) + ([f"Impossible {impossible(plan.run, told)}."] if told.impossible else [])
    return lines + ([f"Memory: {fits}."] if fits else [])


def _parameters(plan: Plan) -> str:
    """All parameters, and of those the active and the trained where they are fewer."""
    count = parameters(plan.run.model)
    told = f"{count.total:,} parameters"
    if count.active != count.total:
        told += f" ({count.active:,} active)"
    if plan.run.recipe.lora_rank is not None:
        told += f", {plan.ledger.parameters:,} trained beside them"
    return told


def _memory(plan: Plan) -> str:
    told = plan.forecast
    assert told.peak_nbytes is not None
    rows = [
        [name, format_nbytes(nbytes), format_percent(nbytes / told.peak_nbytes)]
        for name, nbytes in sorted(told.peak_by_category.items(), key=lambda each: -each[1])
    ]
    rows.append(["peak", format_nbytes(told.peak_nbytes), ""])
    peak = plan.peak
    lines = [
        f"The peak is at {peak.entry.name} of {peak.entry.path or 'the update'}, {peak.entry.phase}.",
        f"Each micro-batch keeps {format_nbytes(told.kept_nbytes or 0)} for its backward.",
    ]
    lines += _device(plan, told.peak_nbytes)
    title = "Memory of one device that holds the whole model"
    shown = table(["at the peak", "bytes", "share"], rows, align="lrr")
    return "\n".join([title, shown, *(wrapped(each) for each in lines)])


def _device(plan: Plan, peak_nbytes: int) -> Iterator[str]:
    """Whether the device holds it: of a catalog device all that stands around the tensors, each part named."""
    held = plan.device_memory
    if held is None:
        if plan.memory_nbytes:
            fits = "Fits in" if peak_nbytes <= plan.memory_nbytes else "Does NOT fit in"
            yield f"{fits} the device's {format_nbytes(plan.memory_nbytes)}."
        return
    around = [each for each in held.lines if each.name != "tensors" and each.nbytes]
    if around:
        parts = ", ".join(f"{each.name} {format_nbytes(each.nbytes)}" for each in around)
        yield f"Around the tensors ({' and '.join(sorted({each.basis for each in around}))}): {parts}."
    elif held.tensors_alone:
        yield sentence(TENSORS_ALONE)
    if held.usable_nbytes is not None:
        fits = "Fits in" if held.fits else "Does NOT fit in"
        gives = format_nbytes(held.usable_nbytes)
        yield wrapped(f"{format_nbytes(held.nbytes)} in all. {fits} the {gives} {of_a_device(held)}.")


def _memory_of_ranks(plan: Plan) -> str:
    """The first, the heaviest middle and the last stage; ranks with smaller pieces are as their stage's first."""
    stages = [each for each in plan.ranks if each.place == 0]
    middle = sorted(stages[1:-1], key=lambda each: -each.ledger.peak().nbytes)[:1]
    shown = [stages[0], *middle, *stages[1:][-1:]]
    rows = []
    for each in shown:
        peak = each.ledger.peak()
        of = peak.by_category
        held = sum(of.get(name, 0) for name in ("parameters", "gradients", "optimizer state"))
        sent = of.get("communication", 0)
        rows.append(
            [
                each.title, f"{sum(other.count for other in plan.ranks if other.stage == each.stage):,}",
                f"{each.layers}", f"{each.in_flight}", format_nbytes(held), format_nbytes(sent),
                format_nbytes(peak.nbytes - held - sent), format_nbytes(peak.nbytes),
            ]
        )  # fmt: skip
    columns = ["at the peak", "ranks", "layers", "in flight", "states", "comm.", "other", "peak"]
    lines = ["States are parameters, gradients and optimizer state; comm. is what is gathered, reduced and in buckets."]
    if len(stages) > len(shown):
        lines.append(f"Of {len(stages)} stages the first, the heaviest between and the last; --json has all.")
    lines += _device(plan, plan.forecast.peak_nbytes or 0)
    shown_table = table(columns, rows, align="lrrrrrrr")
    return "\n".join(["Memory of the distinct ranks", shown_table, *(wrapped(each) for each in lines)])


def _cost(plan: Plan) -> str:
    """What somebody who pays wants to know, a line each; what is not known has none."""
    basis = plan.forecast.basis.get("step_seconds", "")
    on = f" on {plan.forecast.device}" if plan.forecast.device else ""
    title = wrapped(f"What it costs{on}" + (f" ({BASES[basis]})" if basis else ""))
    return "\n".join([title, *named_lines(_costs(plan))])


def named_lines(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """A name and what is said of it to a line, or to as many as it takes."""
    indent = " " * 12
    for name, said in pairs:
        # A number and its percent sign stay together.
        first, *more = wrapped(said.replace(" %", "\0%"), WIDTH - len(indent)).replace("\0", " ").splitlines()
        yield f"{name:<11} {first}"
        yield from (indent + each for each in more)


BASES = {
    "bound": "a bound: no run is faster", "assumed": "assumed: rates of a data sheet or a calibration",
    "measured": "measured", "exact": "exact",
}  # fmt: skip


def _costs(plan: Plan) -> Iterator[tuple[str, str]]:
    told, cluster = plan.forecast, plan.run.cluster
    if told.impossible:
        yield "impossible", impossible(plan.run, told)
    if told.step_seconds is not None:
        yield from _times(plan, told.step_seconds)
    if told.device_hours is not None:
        yield "devices", f"{cluster.count:,} for {_amount(told.device_hours)} device-hours"
    if told.money is not None:
        yield "money", f"{_amount(told.money)} at {cluster.price_per_device_hour:,g} for a device-hour"
    if told.kwh is not None:
        yield "energy", _energy(plan, told.kwh)
    yield "work", _work(plan)
    if fits := _fits(plan):
        yield "memory", fits
    if told.bottleneck is not None:
        yield "bottleneck", f"{told.bottleneck.name}: {told.bottleneck.sentence}"


def _fits(plan: Plan) -> str:
    """Whether the heaviest device holds the run; empty where one of the two is not known."""
    told = plan.forecast
    if told.device_nbytes is None or told.usable_nbytes is None:
        return ""
    fits = "fits" if told.fits else "does NOT fit"
    device = "the heaviest device" if plan.ranks else "one device with the whole model"
    if plan.run.layout.alone and plan.run.cluster.count > 1:
        device = ALONE
    alone = " of tensors alone" if told.basis.get("device_nbytes") == "bound" else ""
    return f"{fits}: {format_nbytes(told.device_nbytes)}{alone} in {device}, of {format_nbytes(told.usable_nbytes)}"


def impossible(run: Run, told: Forecast) -> str:
    """Why a run without a layout cannot be as it is planned, and what to do."""
    way = "--set layout=auto looks for one that can be; until then"
    if run.recipe.lora_rank is not None:
        way = f"No layout is looked for, as {ONE_DEVICE}:"
    return (
        f"without a [layout]: {'; '.join(told.impossible)}. {way} there is no time and no bill of the whole run, and "
        "what follows is of one device alone"
    )


def on_one(run: Run, told: Forecast) -> str:
    """What is said behind the time of a step that is told of one device, of a run on several without a layout."""
    if not run.layout.alone or run.cluster.count == 1:
        return ""
    return " on one device alone" + ("" if told.impossible else f", shared by {run.cluster.count:,} without loss")


def _times(plan: Plan, step_seconds: float) -> Iterator[tuple[str, str]]:
    told, run = plan.forecast, plan.run
    step = format_seconds(step_seconds) + on_one(run, told)
    if told.waits and told.run_step_seconds is not None:
        step += f", {format_seconds(told.run_step_seconds)} with the wait for tokens"
    if told.total_seconds is None:
        yield "step", step
    else:
        good = f"; goodput {format_percent(told.goodput)}" if told.goodput is not None else ""
        steps = counted(run.recipe.total_steps, "step")
        yield "time", f"{format_seconds(told.total_seconds)} for {steps} of {step}{good}"
    if told.tokens_per_second is not None:
        speed = f"{told.tokens_per_second:,.0f} tokens/s" + (" on one device alone" if told.impossible else "")
        if told.mfu is not None and told.hfu is not None and told.peak_flops_per_second is not None:
            peak = f"{format_flops_per_second(told.peak_flops_per_second)} {told.matmul_dtype}"
            speed += f"; MFU {format_percent(told.mfu)}, HFU {format_percent(told.hfu)} of {peak}"
        yield "speed", speed
        yield from _causal(plan)
        if told.waits:
            mfu = "" if told.run_mfu is None else f"; MFU {format_percent(told.run_mfu)}"
            yield "", f"with the wait for tokens {told.run_tokens_per_second:,.0f} tokens/s{mfu}"


def _causal(plan: Plan) -> Iterator[tuple[str, str]]:
    """MFU and HFU without masked pairs, where counting them makes up a large part of both."""
    told = plan.forecast
    products = sum(told.flops.get(kind, 0) for kind in ("matmul", "attention"))
    if told.mfu is None or told.hfu is None or not products:
        return
    if max(told.mfu, told.hfu) <= 1 and told.flops.get("attention", 0) < _MUCH_ATTENTION * products:
        return
    causal = by_causal(plan)
    if causal is None:
        return
    kernels = format_percent(causal.hfu)
    leaves_out = kernels != format_percent(told.hfu)  # written-out attention computes nearly all masked pairs too
    if plan.convention == "dense":
        said = f"both count causal attention dense; by the convention causal MFU is {format_percent(causal.mfu)}"
        said += f", by kernels HFU is {kernels}" if leaves_out else ""
    elif leaves_out:
        said = f"HFU counts causal attention dense; by the convention kernels it is {kernels}"
    else:
        return
    more = ""
    if any(each.cause == "kernel efficiency" and each.nanoseconds < 0 for each in told.waterfall):
        more = ". What kernels leave out of it makes kernel efficiency negative below"
    yield "", f"{said} (trainledger rules){more}"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if KILO <= value < PETA else f"{value:,.4g}"


def _energy(plan: Plan, kwh: float) -> str:
    cluster, co2 = plan.run.cluster, plan.forecast.co2_kg
    share = "" if cluster.power_share is None else f"{format_percent(cluster.power_share)} of "
    pue = cluster.power_usage_effectiveness
    whole = "the devices alone" if pue is None else f"PUE {pue:g}"
    carbon = "" if co2 is None else f"; {_amount(co2)} kg of CO2"
    power = "the rated power" if cluster.power_limit_watts is None else "the limit of power"
    return f"{_amount(kwh)} kWh at {share}{power}, {whole}{carbon}"


def _work(plan: Plan) -> str:
    """The FLOPs of a step: the model's own, and those that run."""
    told = plan.forecast
    products = {kind: told.flops.get(kind, 0) for kind in ("matmul", "attention")}
    run = sum(products.values())
    convention = "" if plan.convention == "dense" else f" by the convention {plan.convention}"
    said = f"{format_flops(told.model_flops or 0)} a step of the model's own{convention}"
    if run:
        shares = ", ".join(f"{kind} {format_percent(each / run)}" for kind, each in products.items() if each)
        said += f"; {format_flops(run)} run ({shares})"
    return said


def _rules(plan: Plan) -> str:
    rows = [
        [
            each.quantity, each.rule, _SHOW[each.unit](each.by_rule), _SHOW[each.unit](each.by_ledger),
            format_percent(each.error, signed=True),
        ]
        for each in plan.rules
    ]  # fmt: skip
    shown = table(["", "rule of thumb", "says", "ledger", "off by"], rows, align="llrrr")
    return f"Of the whole model on one device:\n{shown}" if plan.ranks else shown


def _napkin(plan: Plan) -> str:
    napkin = plan.napkin
    assert napkin is not None
    work = f"6 x {napkin.parameters:.4g} x {napkin.tokens:.4g}"
    speed = f"{napkin.devices:,} x {napkin.peak_flops_per_second:.4g} {napkin.dtype} x {napkin.mfu:g}"
    days = f"{napkin.days:,.1f} days" if napkin.days >= 1 else format_seconds(napkin.days * 86400)
    lines = [f"On a napkin: 6 N D / (devices x peak x MFU) = {work}", f"  / ({speed}) = {days}"]
    return "\n".join(wrapped(each) for each in lines)
