"""Training time: parameters, tokens, devices, days and MFU, any one of which follows from the other four.

The MFU is given, or predicted for a model of the catalog that is spread over the devices without a search.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import trainledger as tl
from trainledger import catalog
from trainledger.answers.defaults import sharded
from trainledger.answers.load import resolve
from trainledger.answers.pages.plan_figures import waterfall, waterfall_table
from trainledger.answers.plan import why_impossible as why_it_cannot_run
from trainledger.forecast.plan.napkin import UNKNOWNS, Napkin, napkin, short, why_impossible
from trainledger.forecast.plan.napkin import headline as headline_of
from trainledger.forecast.plan.plan import Plan, counted_by
from trainledger.forecast.predict.forecast import Bar
from trainledger.forecast.predict.roofline import SHEET_NAMES
from trainledger.ledger.rules_of_thumb import RULES, training_flops
from trainledger.spec.device import Device
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import KILO, format_count, format_percent, format_seconds
from trainledger.web.calculator import BAD, PLAIN, Drawing, Headline, Progress, Reply, calculator, headline
from trainledger.web.field import RUN, Query
from trainledger.web.headlines import SIX_ND_MFU
from trainledger.web.remedies import that_fit_devices, too_large
from trainledger.web.run import refuse_paths, refuse_search, spread_of

GIVEN, PREDICTED = "given", "predicted"
_OF_PREDICTED = ("days", "tokens")  # the numbers that a prediction can be solved for
_SIX_ND = "6nd"  # the convention of a given MFU, which goes with the napkin's FLOPs
_WHERE = "Where the time goes"


def _reply(query: Query, progress: Progress) -> Reply:
    return _predicted(query) if query["mfu_from"] == PREDICTED else _given(query)


def _given(query: Query) -> Reply:
    """The napkin, solved for the one that is not given."""
    if query.overrides:
        name, text = next(iter(query.overrides.items()))
        rule = f"is a field of a run, which only a predicted MFU has: choose mfu_from = {PREDICTED}"
        raise InvalidInput([Problem(name, text, rule)])
    solved = query["solve"]
    words = query.chosen(*(name for name in (*UNKNOWNS, "price", "dtype") if name != solved))
    answer = napkin(device=query["device"], **words)
    problem = why_impossible(answer)
    flags = [word for name, text in ({"device": query["device"]} | words).items() for word in (f"--{name}", text)]
    arguments = ", ".join(f"{name}={text!r}" for name, text in ({"device": query["device"]} | words).items())
    return Reply(
        document=answer.document(),
        headlines=tuple(_of_napkin(answer)),
        verdict=headline_of(answer) if problem is None else str(problem),
        tone=PLAIN if problem is None else BAD,
        drawings=(_drawing(answer.waterfall),),
        values={solved: f"{getattr(answer, solved):.6g}"},
        solved=(solved,),
        unused={name: "the MFU is given" for name in query.fields if name == RUN or "." in name},
        words=("napkin", *flags),
        python=f"import trainledger as tl\n\nprint(tl.napkin({arguments}))",
        notes=answer.remarks,
    )


def _predicted(query: Query) -> Reply:
    """The MFU of a model of the catalog on the devices, and what follows from it."""
    if query["solve"] not in _OF_PREDICTED:
        rule = "is of a given MFU: a prediction is of a model on a number of devices"
        raise InvalidInput([Problem("solve", query["solve"], rule, "days")])
    if query["dtype"]:
        rule = "is of a given MFU: that of a prediction is against the peak of recipe.precision"
        raise InvalidInput([Problem("dtype", query["dtype"], rule)])
    refuse_paths(query.overrides)
    named = catalog.known_as(query[RUN], catalog.model_names(), RUN)
    own = {"cluster.device": query["device"], "cluster.count": query["count"]}
    if query["solve"] == "days":
        own["recipe.tokens"] = query["tokens"]
    if query["price"]:
        own["cluster.price_per_device_hour"] = query["price"]
    overrides = sharded(named, [f"{path}={text}" for path, text in (own | query.overrides).items()])
    if "layout.auto" in query.overrides:
        refuse_search(resolve(named, overrides, search=False))
    with_attention = tl.plan(named, overrides)
    made = counted_by(with_attention, _SIX_ND)
    if query["solve"] == "tokens" and made.forecast.mfu is not None:
        return _tokens(query, made)
    forecast, problem = made.forecast, why_it_cannot_run(made)
    flags = [word for override in overrides for word in ("--set", override)]
    values = {"params": format_count(_active(made))}
    if forecast.mfu is not None and forecast.days is not None:
        values |= {"days": f"{forecast.days:.6g}", "mfu": format_percent(forecast.mfu)}
    return Reply(
        document=made.document(),
        headlines=tuple(_of_plan(made, with_attention)),
        verdict=too_large(forecast) or (_verdict(made) if problem is None else str(problem)),
        tone=PLAIN if problem is None else BAD,
        remedies=that_fit_devices(made.run, forecast, query, "count"),
        drawings=(_drawing(forecast.waterfall),) if forecast.waterfall else (),
        values=values,
        solved=tuple(values),
        unused=_unused_by_prediction(values),
        words=("plan", named, "--convention", _SIX_ND, *flags),
        python=f"import trainledger as tl\n\nprint(tl.plan({named!r}, {list(overrides)!r}, convention={_SIX_ND!r}))",
        notes=(spread_of(made.run),),
    )


def _tokens(query: Query, made: Plan) -> Reply:
    """The tokens that the days allow, by the napkin at the predicted MFU."""
    mfu, dtype = format_percent(made.forecast.mfu or 0).replace(" ", ""), made.forecast.matmul_dtype
    params = str(_active(made))
    own = {"mfu_from": GIVEN, "params": params, "mfu": mfu, "dtype": SHEET_NAMES.get(dtype, dtype)}
    given = {name: text for name, text in query.given.items() if "." not in name} | own
    reply = _given(replace(query, given=given))
    note = (
        f"{SIX_ND_MFU} is predicted: {mfu} of the peak, attention not counted. Checkpoints and failures are left out."
    )
    return replace(
        reply,
        values={**reply.values, "params": format_count(int(params)), "mfu": mfu},
        solved=(*reply.solved, "params", "mfu"),
        unused=_unused_by_prediction(("days",)),
        notes=(spread_of(made.run), note, *reply.notes),
    )


def _unused_by_prediction(known: Collection[str]) -> dict[str, str]:
    """The fields that a prediction does not take, but for those whose values it gives or asks for."""
    reasons = {
        "dtype": "the peak is that of the precision",
        "params": "the model below has its own",
        "mfu": "it is predicted",
        "days": "they follow from the prediction",
    }
    return {name: reason for name, reason in reasons.items() if name not in known}


def _verdict(made: Plan) -> str:
    forecast, run = made.forecast, made.run
    if forecast.total_seconds is None or forecast.mfu is None:
        return "no time is known"
    devices = f"{run.cluster.count:,} x {run.cluster.device}"
    mfu = f"a predicted {SIX_ND_MFU} of {format_percent(forecast.mfu)}"
    return f"{run.model.name} on {devices} at {mfu}: {format_seconds(forecast.total_seconds)}"


def _of_plan(made: Plan, with_attention: Plan) -> Iterator[Headline]:
    forecast, count = made.forecast, made.run.cluster.count
    if forecast.days is None or forecast.device_hours is None or forecast.mfu is None:
        return
    basis = forecast.basis["total_seconds"]
    run_seconds = f"{made.run.recipe.total_steps:,} steps x {short(forecast.run_step_seconds or 0)} s"
    lost = sum(forecast.seconds_by_phase.get(each, 0.0) for each in ("evaluation", "checkpoint", "failures", "warm-up"))
    more = f"evaluation, checkpoints and failures {short(lost)} s"
    formula = f"steps x seconds of a step + the rest = ({run_seconds} + {more}) / 86400 s = {short(forecast.days)}"
    yield headline("time.days", forecast.days, formula, basis=basis)
    yield _of_mfu("time.mfu", "6 N D FLOPs", made, source=RULES["training_seconds"].source)
    yield _of_mfu("plan.mfu", "model FLOPs", with_attention, name="mfu_with_attention")
    hours = forecast.device_hours
    formula = f"devices x days x 24 = {count} x {short(forecast.days)} x 24 = {short(hours)}"
    yield headline("time.device_hours", hours, formula, basis=basis)
    price = made.run.cluster.price_per_device_hour
    if forecast.money is not None and price is not None:
        formula = f"device-hours x price = {short(hours)} x {short(price)} = {short(forecast.money)}"
        yield headline("time.money", forecast.money, formula, basis=basis)
    if forecast.kwh is not None and isinstance(made.machine, Device) and made.machine.power_watts is not None:
        cluster = made.run.cluster
        factors = [("power_share", cluster.power_share), ("PUE", cluster.power_usage_effectiveness)]
        names = "".join(f" x {name}" for name, share in factors if share is not None)
        shares = "".join(f" x {share:g}" for _, share in factors if share is not None)
        numbers = f"{short(hours)} x {short(made.machine.power_watts)} W{shares} / {KILO} = {short(forecast.kwh)} kWh"
        yield headline("time.kwh", forecast.kwh, f"device-hours x rated power{names} = {numbers}")
    yield _of_flops(made)


def _of_flops(made: Plan) -> Headline:
    params, tokens = _active(made), made.run.recipe.total_steps * made.run.recipe.tokens_per_step
    flops, rule = training_flops(params, tokens), RULES["training_flops"]
    numbers = f"6 x {short(params)} x {short(tokens)} = {short(flops)} FLOP"
    return headline("time.flops", flops, f"{rule.formula} = {numbers}", source=rule.source)


def _active(made: Plan) -> int:
    """Parameters of the model that work for each token."""
    return tl.parameters(made.run.model).active if made.napkin is None else made.napkin.parameters


def _of_mfu(of: str, counted: str, made: Plan, **more: str) -> Headline:
    """MFU as one convention counts it, with its numbers put in."""
    forecast = made.forecast
    flops, seconds = short(forecast.model_flops or 0), short(forecast.step_seconds or 0)
    peak, devices = short(forecast.peak_flops_per_second or 0), made.run.layout.devices
    numbers = f"{flops} / ({seconds} s x {devices} x {peak}) = {format_percent(forecast.mfu or 0)}"
    formula = f"{counted} of a step / (seconds x devices x peak) = {numbers}"
    return headline(of, forecast.mfu, formula, basis=forecast.basis["total_seconds"], **more)


def _of_napkin(answer: Napkin) -> list[Headline]:
    found = []
    for formula in answer.formulas:
        value, said = (
            getattr(answer, formula.name, answer.tokens / answer.params),
            f"{formula.formula} = {formula.numbers}",
        )
        found.append(headline(f"time.{formula.name}", value, said, source=formula.source))
    order = [answer.solved, "device_hours", "money", "kwh", "flops"]
    return sorted(found, key=lambda each: order.index(each.name) if each.name in order else len(order))


def _drawing(bars: tuple[Bar, ...]) -> Drawing:
    return Drawing(chart=waterfall(bars, _WHERE), table=waterfall_table(bars))


TIME = calculator("time", _reply)
