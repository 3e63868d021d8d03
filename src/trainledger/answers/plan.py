"""What a run will cost before it starts: its plan, and the page of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any, Unpack

from trainledger.answers.defaults import is_one_step
from trainledger.answers.load import Source, resolve
from trainledger.answers.machine import kernels_of, machine_of
from trainledger.answers.pages import padded_rows, published
from trainledger.answers.pages.device_memory import (
    host_line,
    memory_data,
    memory_lines,
    memory_section,
    parts_at_peak,
    too_large,
)
from trainledger.answers.pages.heading import found_layout_section, model_line, of_run, run_line, unfused_update
from trainledger.answers.pages.interval import between, fits, rests_on, room
from trainledger.answers.pages.plain_data import plain, rank_data, run_data
from trainledger.answers.pages.plan_figures import large_bars, rules_table
from trainledger.answers.question import Progress, question, silent, text
from trainledger.answers.source import OfCluster, with_cluster
from trainledger.forecast.plan.layouts.result import as_toml
from trainledger.forecast.plan.plan import Plan, RuleOfThumb, by_causal, counted_by, make_plan, of_one_step, with_notes
from trainledger.forecast.plan.published import Resemblance, nearest
from trainledger.forecast.predict.forecast import Bar, Forecast
from trainledger.forecast.predict.predict import ALONE
from trainledger.ledger.model.parameters import parameters
from trainledger.ledger.ranks import account_run
from trainledger.report.chart import Chart
from trainledger.report.document import Bars, Code, Document, Facts, notes, section, sections
from trainledger.report.table import pasted, sentence
from trainledger.spec.problem import Problem
from trainledger.spec.reading import Overrides
from trainledger.spec.run import Run
from trainledger.spec.units import (
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

_FAR = 0.1  # relative: from here on the headline says how attention is counted
_MUCH_ATTENTION = 0.3  # of the FLOPs of matmuls and attention
USUAL_MFU = 0.5  # of the napkin, where nobody says another
UNTIMED = "no step time"  # what a forecast that has none says, with the reason
BASES = {
    "bound": "a bound: no run is faster",
    "assumed": "assumed: rates of a data sheet or a calibration",
    "measured": "measured",
    "exact": "exact",
}


def why_impossible(plan: Plan) -> Problem | None:
    """Why a run cannot be trained as planned, with what would help; None where it can, or where that is not known."""
    forecast = plan.forecast
    if forecast.impossible:
        rule = f"is missing, so {plan.run.cluster.count:,} devices cannot share this run: "
        return Problem("layout", None, rule + "; ".join(forecast.impossible), "layout=auto")
    needs = too_large(plan)
    if not needs and forecast.likely_fits is not False:
        return None
    rule = f"does NOT fit: {needs}" if needs else _fits(plan)
    return Problem("memory", None, f"{rule}; trainledger advise ranks changes that need less")


@question(impossible=why_impossible)
def plan(
    run: Source,
    overrides: Overrides = (),
    *,
    mfu: Annotated[
        float, text("share of the peak for the napkin's days (0.5, or 50%); measured: advise --mfu")
    ] = USUAL_MFU,
    convention: Annotated[
        str, text("how model FLOPs and MFU are counted: 6nd, 6nd+attention, dense, causal or kernels")
    ] = "dense",
    progress: Progress = silent,
    **cluster: Unpack[OfCluster],
) -> Plan:
    """What a run will cost before it starts: time, money, energy, memory by category, and where the time goes.

    RUN is a run file, or a model of the catalog or a Hugging Face config.json under a default recipe: one full-length
    sequence in bf16 autocast, or on several devices up to 4 million tokens (16 of large budgets) in sequences of at
    most 8,192 and the layout that a search finds. Exit code 2 where the run does not fit in memory, or the devices
    cannot share it. With --phase it is one forward of the trained model: trainledger inference.

    ``device`` and ``count`` are short for the overrides cluster.device and cluster.count; ``convention`` is of
    `ledger.conventions`. Raises `InvalidInput`.
    """
    run = resolve(run, with_cluster(overrides, **cluster), progress=progress)
    return planned(run, mfu=mfu, convention=convention)


def planned(run: Run, *, mfu: float | str = USUAL_MFU, convention: str = "dense") -> Plan:
    """As `plan`, of a run that was checked before."""
    made = make_plan(account_run(run, backend=kernels_of(run)), machine_of(run), mfu=mfu)
    if convention != made.convention:
        made = counted_by(made, convention)
    if is_one_step(run):
        made = of_one_step(made)
    return with_notes(made, list(run.origin.notes))


def page(plan: Plan) -> Document:
    """The verdict, the cost, where the time goes and the memory; rules of thumb, sources and notes are details."""
    forecast, resemblances = plan.forecast, nearest(plan.run)
    large = large_bars(forecast.waterfall)
    return Document(
        title=f"The plan of {plan.run.model.name}",
        verdict=verdict(plan),
        sections=sections(
            section("", run_line(plan.run)),
            section("", Facts(tuple(_costs(plan)))),
            section("", unfused_update(plan.run, forecast.step_seconds_by_phase.get("optimizer"))),
            section(_waterfall_title(plan), bars(large)) if forecast.waterfall else None,
            section("", _napkin(plan)) if plan.napkin is not None and plan.napkin.mfu != USUAL_MFU else None,
            section("", _heading(plan), Facts((("work", _work(plan)),)), detail="the run"),
            section(_waterfall_title(plan), bars(forecast.waterfall), detail="the whole waterfall")
            if large != forecast.waterfall
            else None,
            replace(memory_section(plan), detail="memory"),
            section("", memory_lines(plan), detail="memory"),
            section(
                "Rules of thumb against the ledger (whole model, one device)",
                rules_table(plan.rules),
                _napkin(plan),
                detail="rules of thumb",
            ),
            replace(published.nearest_section(resemblances), detail="nearest published runs"),
            section("", notes(_notes(plan)), detail="assumptions"),
            found_layout_section(plan.run),
            section(
                "The layout that was found, to paste into a run file",
                Code(pasted(as_toml(plan.run))) if plan.run.origin.searched else None,
                detail="the layout as TOML",
            ),
        ),
        about=tuple(about(plan)),
        data=lambda: _data(plan, resemblances),
        figures=lambda: _figures(plan),
        more=("explain memory RUN", "advise RUN"),
    )


def verdict(plan: Plan) -> str:
    """Whether the run is possible and fits, and what it takes."""
    forecast = plan.forecast
    if forecast.impossible:
        return f"Impossible {impossible(forecast)}."
    if needs := too_large(plan):
        return f"Does NOT fit: {needs}."
    if forecast.fits is None and forecast.step_seconds is None:
        peak = format_nbytes(forecast.peak_nbytes or 0)
        tells = "--device NAME (here: trainledger measure machine) says whether that fits, and how long a step takes"
        return f"Needs {peak} of tensors at the peak; {tells}."
    says = [] if forecast.fits is None else [fits(forecast.fits, forecast.chance_of_fitting)]
    if forecast.total_seconds is not None:
        says.append(format_seconds(forecast.total_seconds))
    elif forecast.step_seconds is not None:
        says.append(f"a step takes {format_seconds(forecast.step_seconds)}")
    if forecast.money is not None:
        says.append(f"costs {_amount(forecast.money)}")
    return sentence(", ".join(says)) if says else ""


def bars(waterfall: Iterable[Bar]) -> Bars:
    """The causes of a time."""
    return Bars(tuple((bar.cause, bar.nanoseconds) for bar in waterfall))


def _waterfall_title(plan: Plan) -> str:
    whole = plan.forecast.total_seconds is not None
    within = between(plan.forecast, "total_seconds" if whole else "step_seconds", format_seconds)
    return f"Where the time of {'the run' if whole else 'a step'} goes{within}"


def _heading(plan: Plan) -> list[str]:
    trained = None if plan.run.recipe.lora is None else plan.ledger.parameters
    return [model_line(plan.run.model, trained), *of_run(plan.run)]


def about(plan: Plan) -> list[str]:
    """What a page of the figures says above them: the run, and whether it is possible and fits."""
    forecast, fits = plan.forecast, _fits(plan)
    lines = _heading(plan) + ([f"Impossible {impossible(forecast)}."] if forecast.impossible else [])
    return lines + ([f"Memory: {fits}."] if fits else [])


def _notes(plan: Plan) -> Iterator[str]:
    """What the numbers rest on."""
    if basis := plan.forecast.basis.get("step_seconds"):
        yield sentence(f"times are {BASES[basis]}")
    notes = [note for note in plan.forecast.notes if not note.startswith(UNTIMED)]  # which stand in place of the time
    yield from map(sentence, (*notes, *rests_on(plan.run, plan.machine)))


def _costs(plan: Plan) -> Iterator[tuple[str, str]]:
    """Time, speed, money, energy, work and memory; what is not known has no line."""
    forecast, cluster = plan.forecast, plan.run.cluster
    if forecast.step_seconds is not None:
        yield from _times(plan, forecast.step_seconds)
    yield from (("step", note) for note in forecast.notes if note.startswith(UNTIMED))
    if forecast.device_hours is not None:
        hours = f"{_amount(forecast.device_hours)} device-hours"
        if forecast.money is None:
            yield "devices", f"{cluster.count:,}; {hours}"
        else:
            money = _amount(forecast.money) + between(forecast, "money", _amount)
            yield "money", f"{money} for {hours} at {cluster.price_per_device_hour:,g}"
    elif cluster.price_per_device_hour is not None and not forecast.impossible:
        yield "money", "not known without the run's length: give recipe.tokens or recipe.steps"
    if forecast.kwh is not None:
        yield "energy", _energy(plan, forecast.kwh)
    needs = _fits(plan)
    if needs:
        yield "memory", needs
    yield "" if needs else "memory", f"tensors at the peak: {parts_at_peak(plan)}"
    if plan.host is not None:
        yield "host", host_line(plan.host)
    yield from padded_rows.lines_of(plan)
    if forecast.bottleneck is not None:
        yield "bottleneck", f"{forecast.bottleneck.name}: {forecast.bottleneck.sentence}"


def _fits(plan: Plan) -> str:
    """Whether the run fits the peak rank; empty where one of the two is not known."""
    forecast = plan.forecast
    if forecast.device_nbytes is None or forecast.usable_nbytes is None:
        return ""
    device = "on the peak rank" if plan.ranks else "on one device with the whole model"
    if plan.run.layout.alone and plan.run.cluster.count > 1:
        device = f"on {ALONE}"
    tensors = " of tensors alone" if forecast.basis.get("device_nbytes") == "bound" else ""
    usable = f"{format_nbytes(forecast.usable_nbytes)} usable"
    if plan.run.cluster.memory_margin_nbytes:
        usable += f" with {format_nbytes(plan.run.cluster.memory_margin_nbytes)} kept free"
    needs = f"{format_nbytes(forecast.device_nbytes)}{between(forecast, 'device_nbytes', format_nbytes)}{tensors}"
    return f"{fits(forecast.fits, forecast.chance_of_fitting)}: {needs} {device}, of {usable}{room(forecast)}"


def impossible(forecast: Forecast) -> str:
    """Why a run without a layout is not possible as planned, and what to do."""
    return (
        f"without a [layout]: {'; '.join(forecast.impossible)}. --set layout=auto searches for one that is possible; "
        "until then the whole run has no time and no cost, and what follows is for one device"
    )


def on_one(run: Run, forecast: Forecast) -> str:
    """What qualifies a step's time that is of one device, where the run has several and no layout."""
    if not run.layout.alone or run.cluster.count == 1:
        return ""
    return " on one device alone" + ("" if forecast.impossible else f", shared by {run.cluster.count:,} without loss")


def _times(plan: Plan, step_seconds: float) -> Iterator[tuple[str, str]]:
    forecast, run = plan.forecast, plan.run
    step = format_seconds(step_seconds) + on_one(run, forecast)
    if forecast.total_seconds is None:
        step = format_seconds(step_seconds) + between(forecast, "step_seconds", format_seconds) + on_one(run, forecast)
    if forecast.waits and forecast.run_step_seconds is not None:
        step += f", {format_seconds(forecast.run_step_seconds)} with the wait for tokens"
    if forecast.total_seconds is None:
        yield "step", step
    else:
        good = f"; goodput {format_percent(forecast.goodput)}" if forecast.goodput is not None else ""
        steps = counted(run.recipe.total_steps, "step")
        whole = format_seconds(forecast.total_seconds) + between(forecast, "total_seconds", format_seconds)
        if run.recipe.tokens_beyond_steps:
            priced = run.recipe.total_steps * run.recipe.tokens_per_step
            steps += f" ({format_count(priced)} tokens of {format_count(run.recipe.tokens or 0)})"
        yield "time", f"{whole} for {steps} of {step}{good}"
    if forecast.tokens_per_second is not None:
        speed = f"{forecast.tokens_per_second:,.0f} tokens/s" + (" on one device alone" if forecast.impossible else "")
        yield "speed", "; ".join([speed, *_utilization(plan)])
        yield from _kernels(plan)
        if forecast.waits:
            mfu = "" if forecast.run_mfu is None else f"; MFU {format_percent(forecast.run_mfu)}"
            yield "", f"with the wait for tokens {forecast.run_tokens_per_second:,.0f} tokens/s{mfu}"


def _utilization(plan: Plan) -> Iterator[str]:
    """MFU and HFU; how attention is counted is said where it makes more than a tenth of the MFU."""
    forecast = plan.forecast
    if forecast.mfu is None or forecast.hfu is None or forecast.peak_flops_per_second is None:
        return
    causal, counted_so = by_causal(plan), ""
    if plan.convention == "dense" and causal is not None and forecast.mfu - causal.mfu > _FAR * causal.mfu:
        counted_so = f" (attention counted dense; {format_percent(causal.mfu)} causal)"
    peak = f"{format_flops_per_second(forecast.peak_flops_per_second)} {forecast.matmul_dtype}"
    yield f"MFU {format_percent(forecast.mfu)}{counted_so}, HFU {format_percent(forecast.hfu)} of {peak}"


def _kernels(plan: Plan) -> Iterator[tuple[str, str]]:
    """HFU without the pairs that kernels skip, where counting them makes up a large part of it."""
    forecast, causal = plan.forecast, by_causal(plan)
    matmuls = sum(forecast.flops.get(kind, 0) for kind in ("matmul", "attention"))
    if causal is None or forecast.mfu is None or forecast.hfu is None or not matmuls:
        return
    if max(forecast.mfu, forecast.hfu) <= 1 and forecast.flops.get("attention", 0) < _MUCH_ATTENTION * matmuls:
        return
    kernels = format_percent(causal.hfu)
    if kernels == format_percent(forecast.hfu):  # unfused attention computes nearly all masked pairs too
        return
    more = ""
    if any(bar.cause == "kernel efficiency" and bar.nanoseconds < 0 for bar in forecast.waterfall):
        more = ". The masked pairs that they skip make kernel efficiency negative below"
    yield "", f"HFU counts attention dense too; of what the kernels run it is {kernels}{more}"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if KILO <= value < PETA else f"{value:,.4g}"


def _energy(plan: Plan, kwh: float) -> str:
    cluster, co2 = plan.run.cluster, plan.forecast.co2_kg
    share = "" if cluster.power_share is None else f"{format_percent(cluster.power_share)} of "
    pue = cluster.power_usage_effectiveness
    whole = "devices only" if pue is None else f"PUE {pue:g}"
    carbon = "" if co2 is None else f"; {_amount(co2)} kg of CO2"
    power = "the rated power" if cluster.power_limit_watts is None else "the power limit"
    return f"{_amount(kwh)} kWh at {share}{power}, {whole}{carbon}"


def _work(plan: Plan) -> str:
    """The FLOPs of a step: model FLOPs and hardware FLOPs."""
    forecast = plan.forecast
    matmuls = {kind: forecast.flops.get(kind, 0) for kind in ("matmul", "attention")}
    run = sum(matmuls.values())
    convention = "" if plan.convention == "dense" else f" by the convention {plan.convention}"
    text = f"{format_flops(forecast.model_flops or 0)} of model FLOPs per step{convention}"
    if run:
        shares = ", ".join(f"{kind} {format_percent(matmul / run)}" for kind, matmul in matmuls.items() if matmul)
        text += f"; {format_flops(run)} of hardware FLOPs ({shares})"
    return text


def _napkin(plan: Plan) -> tuple[str, ...]:
    napkin = plan.napkin
    if napkin is None:
        return ()
    work = f"6 x {napkin.parameters:.4g} x {napkin.tokens:.4g}"
    speed = f"{napkin.devices:,} x {napkin.peak_flops_per_second:.4g} {napkin.dtype} x {napkin.mfu:g}"
    days = f"{napkin.days:,.1f} days" if napkin.days >= 1 else format_seconds(napkin.days * 86400)
    return (f"On a napkin: 6 N D / (devices x peak x MFU) = {work}", f"  / ({speed}) = {days}")


def _data(plan: Plan, resemblances: tuple[Resemblance, ...]) -> dict[str, Any]:
    forecast = plain(plan.forecast, more={Bar: ("seconds",), Forecast: ("headroom_nbytes",)})
    forecast["device_title"] = forecast.pop("device")
    mfu, flops = plan.forecast.mfu, plan.forecast.model_flops
    forecast["mfu_with_attention"] = mfu and flops and mfu * plan.ledger.model_flops / flops
    napkin = plain(plan.napkin, more={type(plan.napkin): ("flops", "tokens_per_parameter")})
    if napkin is not None:
        napkin["count"] = napkin.pop("devices")
    return {
        "run": run_data(plan.run),
        "parameters": plain(parameters(plan.run.model)),
        "convention": plan.convention,
        "forecast": forecast,
        "causal": plain(by_causal(plan)),
        "rules_of_thumb": plain(plan.rules, more={RuleOfThumb: ("error",)}),
        "napkin": napkin,
        "memory_nbytes": plan.memory_nbytes,
        "device_memory": memory_data(plan.device_memory),
        "nearest_published": published.data(resemblances),
        **({"padding": plain(plan.padding, more={type(plan.padding): ("waste",)})} if plan.padding else {}),
        **(
            {"host_memory": plain(plan.host, more={type(plan.host): ("process", "node", "loading", "fits")})}
            if plan.host
            else {}
        ),
        **({"ranks": [rank_data(rank) for rank in plan.ranks]} if plan.ranks else {}),
    }


def _figures(plan: Plan) -> list[Chart]:
    from trainledger.answers.pages.plan_figures import figures  # a plan that is printed needs none of them

    return figures(plan)
