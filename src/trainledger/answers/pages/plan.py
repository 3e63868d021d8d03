"""The document of a plan: its cost, where its time goes, its memory, the rules of thumb, and its figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from trainledger.answers.pages import published
from trainledger.answers.pages.device_memory import device_lines, memory_data
from trainledger.answers.pages.heading import model_line, of_run
from trainledger.answers.pages.interval import between, fits, rests_on, room
from trainledger.answers.pages.plain_data import plain, run_data
from trainledger.forecast.plan.layouts.result import as_toml
from trainledger.forecast.plan.plan import Plan, RuleOfThumb, by_causal
from trainledger.forecast.plan.published import Resemblance, nearest
from trainledger.forecast.predict.forecast import Bar, Forecast
from trainledger.forecast.predict.predict import ALONE
from trainledger.ledger.memory.timeline import peak_nbytes
from trainledger.ledger.model.parameters import parameters
from trainledger.ledger.ranks import RankAccount
from trainledger.report.chart import Chart
from trainledger.report.document import (
    Amount,
    Bars,
    Code,
    Document,
    Facts,
    Section,
    Table,
    notes,
    section,
    sections,
)
from trainledger.report.table import pasted, sentence
from trainledger.spec.run import Run
from trainledger.spec.savings import ONE_DEVICE
from trainledger.spec.units import (
    KILO,
    PETA,
    counted,
    format_flops,
    format_flops_per_second,
    format_nbytes,
    format_percent,
    format_seconds,
)

_FAR = 0.1  # relative: from here on the headline says how attention is counted
_MUCH_ATTENTION = 0.3  # of the FLOPs of matmuls and attention
_STATES = ("parameters", "gradients", "optimizer state")
BASES = {
    "bound": "a bound: no run is faster", "assumed": "assumed: rates of a data sheet or a calibration",
    "measured": "measured", "exact": "exact",
}  # fmt: skip


def document(plan: Plan) -> Document:
    """The whole plan, and the layout that was searched for, to paste into a run file."""
    forecast, found = plan.forecast, nearest(plan.run)
    return Document(
        title=f"The plan of {plan.run.model.name}",
        sections=sections(
            _heading(plan),
            section(_cost_title(forecast), Facts(tuple(_costs(plan)))),
            section(_waterfall_title(plan), bars(forecast.waterfall)) if forecast.waterfall else None,
            _memory_of_ranks(plan) if plan.ranks else _memory(plan),
            section("Of the whole model on one device:" if plan.ranks else "", rules_table(plan.rules)),
            _napkin(plan),
            published.nearest_section(found),
            notes(map(sentence, (*forecast.notes, *rests_on(plan.run, plan.machine)))),
            _found_layout(plan.run) if plan.run.origin.searched else None,
        ),
        about=tuple(about(plan)),
        data=lambda: _data(plan, found),
        figures=lambda: _figures(plan),
    )


def _found_layout(run: Run) -> Section:
    return section("", ("The layout that was found, to paste into a run file", ""), Code(pasted(as_toml(run))))


def bars(waterfall: Iterable[Bar]) -> Bars:
    """The causes of a time."""
    return Bars(tuple((each.cause, each.nanoseconds) for each in waterfall))


def rules_table(rules: Iterable[RuleOfThumb]) -> Table:
    """Rules of thumb and how far each is off the ledger."""
    rows = tuple(
        (each.quantity, each.rule, Amount(each.by_rule, each.unit), Amount(each.by_ledger, each.unit), each.error)
        for each in rules
    )
    columns = ("", "rule of thumb", "estimate", "ledger", "error")
    return Table("rules of thumb", columns, rows, units=("", "", "", "", "change"), align="llrrr")


def _waterfall_title(plan: Plan) -> str:
    name = "step_seconds" if plan.forecast.total_seconds is None else "total_seconds"
    return f"Where the time {_of(plan)} goes{between(plan.forecast, name, format_seconds)}"


def _of(plan: Plan) -> str:
    return "of a step" if plan.forecast.total_seconds is None else "of the run"


def _heading(plan: Plan) -> list[str]:
    trained = None if plan.run.recipe.lora is None else plan.ledger.parameters
    return [model_line(plan.run.model, trained), *of_run(plan.run)]


def about(plan: Plan) -> list[str]:
    """What a page of the figures says above them: the run, and whether it is possible and fits."""
    forecast, fits = plan.forecast, _fits(plan)
    lines = _heading(plan) + ([f"Impossible {impossible(plan.run, forecast)}."] if forecast.impossible else [])
    return lines + ([f"Memory: {fits}."] if fits else [])


def _memory(plan: Plan) -> Section:
    forecast, peak = plan.forecast, plan.peak
    assert forecast.peak_nbytes is not None
    rows = [
        (name, nbytes, nbytes / forecast.peak_nbytes)
        for name, nbytes in sorted(forecast.peak_by_category.items(), key=lambda each: -each[1])
    ]
    table = Table(
        "memory", ("at the peak", "bytes", "share"), (*rows, ("peak", forecast.peak_nbytes, None)),
        units=("", "nbytes", "share"), align="lrr",
    )  # fmt: skip
    lines = (
        f"The peak is at {peak.entry.name} of {peak.entry.path or 'the update'}, {peak.entry.phase}.",
        f"Each micro-batch saves {format_nbytes(forecast.kept_nbytes or 0)} of activations for its backward.",
        *device_lines(plan.device_memory, forecast.peak_nbytes, plan.memory_nbytes),
    )
    return section("Memory of one device that holds the whole model", table, lines)


def _memory_of_ranks(plan: Plan) -> Section:
    """The first, the heaviest middle and the last stage; ranks with smaller pieces are as their stage's first."""
    stages = [each for each in plan.ranks if each.plan.place == 0]
    # Of stages that are alike the first holds the most.
    firsts = {each.stage if each.alike is None else each.alike: each for each in reversed(stages[1:-1])}
    middle = sorted(firsts.values(), key=lambda each: (-peak_nbytes(each.ledger), each.stage))[:1]
    shown = [stages[0], *middle, *stages[1:][-1:]]
    rows = []
    for each in shown:
        peak = plan.peak if each.ledger is plan.heaviest else each.ledger.peak()
        states = sum(peak.by_category.get(name, 0) for name in _STATES)
        sent = peak.by_category.get("communication", 0)
        ranks = sum(other.count for other in plan.ranks if other.stage == each.stage)
        rest = peak.nbytes - states - sent
        rows.append((each.title, ranks, each.plan.layers, each.in_flight, states, sent, rest, peak.nbytes))
    table = Table(
        "memory", ("at the peak", "ranks", "layers", "in flight", "states", "comm.", "other", "peak"), tuple(rows),
        units=("", *("integer",) * 3, *("nbytes",) * 4), align="lrrrrrrr",
    )  # fmt: skip
    lines = [
        "States: parameters, gradients and optimizer state. Comm.: gathered parameters and buffers of reductions. In "
        "flight: micro-batches whose activations a rank keeps at once."
    ]
    if len(stages) > len(shown):
        lines.append(
            f"Shown are the first, the last and the middle stage of highest peak of {len(stages)}; --json has all."
        )
    lines += device_lines(plan.device_memory, plan.forecast.peak_nbytes or 0, plan.memory_nbytes)
    return section("Memory of the distinct ranks", table, lines)


def _cost_title(forecast: Forecast) -> str:
    basis = forecast.basis.get("step_seconds", "")
    on = f" on {forecast.device}" if forecast.device else ""
    return f"What it costs{on}" + (f" ({BASES[basis]})" if basis else "")


def _costs(plan: Plan) -> Iterator[tuple[str, str]]:
    """Time, speed, money, energy, work and memory; what is not known has no line."""
    forecast, cluster = plan.forecast, plan.run.cluster
    if forecast.impossible:
        yield "impossible", impossible(plan.run, forecast)
    if forecast.step_seconds is not None:
        yield from _times(plan, forecast.step_seconds)
    if forecast.device_hours is not None:
        yield "devices", f"{cluster.count:,}; {_amount(forecast.device_hours)} device-hours"
    if forecast.money is not None:
        money = _amount(forecast.money) + between(forecast, "money", _amount)
        yield "money", f"{money} at {cluster.price_per_device_hour:,g} per device-hour"
    if forecast.kwh is not None:
        yield "energy", _energy(plan, forecast.kwh)
    yield "work", _work(plan)
    if fits := _fits(plan):
        yield "memory", fits
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
    return f"{fits(forecast)} {needs} {device}, of {usable}{room(forecast)}"


def impossible(run: Run, forecast: Forecast) -> str:
    """Why a run without a layout is not possible as planned, and what to do."""
    way = "--set layout=auto searches for one that is possible; until then"
    if run.recipe.lora is not None:
        way = f"No layout is searched for, as {ONE_DEVICE}:"
    return (
        f"without a [layout]: {'; '.join(forecast.impossible)}. {way} the whole run has no time and no cost, and what "
        "follows is for one device"
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
    if any(each.cause == "kernel efficiency" and each.nanoseconds < 0 for each in forecast.waterfall):
        more = ". The masked pairs that they skip make kernel efficiency negative below"
    yield "", f"HFU counts causal attention dense too; with what the kernels run it is {kernels}{more}"


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
        shares = ", ".join(f"{kind} {format_percent(each / run)}" for kind, each in matmuls.items() if each)
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


def _data(plan: Plan, found: tuple[Resemblance, ...]) -> dict[str, Any]:
    forecast = plain(plan.forecast, more={Bar: ("seconds",)})
    forecast["device_title"] = forecast.pop("device")
    napkin = None if plan.napkin is None else plain(plan.napkin)
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
        "nearest_published": published.data(found),
        **({"ranks": [_rank_data(each) for each in plan.ranks]} if plan.ranks else {}),
    }


def _rank_data(rank: RankAccount) -> dict[str, Any]:
    """A rank in figures: its place, its memory, its FLOPs, and the bytes of its collectives by axis and kind."""
    peak = rank.ledger.peak()
    sent: dict[str, int] = {}
    for each in rank.ledger:
        if each.kind == "collective" and each.payload:
            key = f"{each.name} over {each.group}"
            sent[key] = sent.get(key, 0) + each.payload * each.times
    return {
        "title": rank.title, "count": rank.count, "stage": rank.stage, "place": rank.plan.place,
        "layers": rank.plan.layers, "in_flight": rank.in_flight, "parameters": rank.ledger.parameters,
        "model_flops": rank.ledger.model_flops,
        "peak_nbytes": peak.nbytes, "peak_by_category": peak.by_category,
        "peak_at": f"{peak.entry.name} of {peak.entry.path or 'the update'}, {peak.entry.phase}",
        "payload_nbytes": sent,
    }  # fmt: skip


def _figures(plan: Plan) -> list[Chart]:
    from trainledger.answers.pages.plan_figures import figures  # a plan that is printed needs none of them

    return figures(plan)
