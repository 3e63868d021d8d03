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
from trainledger.forecast.plan.napkin import UNKNOWNS, Napkin, headline, napkin, short, why_impossible
from trainledger.forecast.plan.plan import Plan, counted_by
from trainledger.forecast.predict.forecast import Bar
from trainledger.forecast.predict.roofline import SHEET_NAMES
from trainledger.ledger.rules_of_thumb import RULES, training_flops
from trainledger.spec.device import Device
from trainledger.spec.problem import InvalidInput, Problem
from trainledger.spec.units import KILO, format_count, format_percent, format_seconds
from trainledger.web.calculator import BAD, PLAIN, Calculator, Drawing, Headline, Progress, Reply
from trainledger.web.field import Field, Query, of_run, one_of, powers, rising
from trainledger.web.headlines import ATTENTION_MFU, OF_ATTENTION_MFU, SIX_ND_MFU
from trainledger.web.remedies import that_fit_devices, too_large
from trainledger.web.run import MODEL, RUN, refuse_paths, refuse_search, spread_of

GIVEN, PREDICTED = "given", "predicted"
_OF_PREDICTED = ("days", "tokens")  # the numbers that a prediction can be solved for
_TITLES = {"params": "parameters", "tokens": "tokens", "count": "devices", "days": "days", "mfu": SIX_ND_MFU}
_SOLVED = tuple((each, _TITLES[each]) for each in ("days", "count", "tokens", "params", "mfu"))
_SHOWN = {
    "flops": ("FLOPs of the run", "flops"), "params": ("parameters", "count"), "tokens": ("tokens", "count"),
    "count": ("devices", "integer"), "days": ("days", "amount"), "mfu": (SIX_ND_MFU, "share"),
    "device_hours": ("device-hours", "amount"), "money": ("money", "amount"), "kwh": ("energy (kWh)", "amount"),
    "tokens_per_parameter": ("tokens per parameter", "amount"),
}  # fmt: skip
_DAYS = tuple(f"{each:g}" for each in (0.1, 0.25, 0.5, 1, 2, 3, 5, 7, 10, 14, 21, 30, 45, 60, 90, 120, 180, 270, 365))
_SIX_ND = "6nd"  # the convention of a given MFU, which goes with the napkin's FLOPs
_LAYOUT = "Layout of a predicted MFU"
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
        verdict=headline(answer) if problem is None else str(problem),
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
    yield Headline(
        name="days", title="days", value=forecast.days, unit="amount", basis=basis,
        formula=f"steps x seconds of a step + the rest = ({run_seconds} + {more}) / 86400 s = {short(forecast.days)}",
        source="closed-form ledger of a step, timed by the device's rates",
    )  # fmt: skip
    yield _of_mfu("mfu", SIX_ND_MFU, "6 N D FLOPs", made, RULES["training_seconds"].source)
    yield _of_mfu("mfu_with_attention", ATTENTION_MFU, "model FLOPs", with_attention, OF_ATTENTION_MFU)
    hours = forecast.device_hours
    yield Headline(
        name="device_hours", title="device-hours", value=hours, unit="amount", basis=basis,
        formula=f"devices x days x 24 = {count} x {short(forecast.days)} x 24 = {short(hours)}", source="arithmetic",
    )  # fmt: skip
    price = made.run.cluster.price_per_device_hour
    if forecast.money is not None and price is not None:
        yield Headline(
            name="money", title="money", value=forecast.money, unit="amount", basis=basis, source="arithmetic",
            formula=f"device-hours x price = {short(hours)} x {short(price)} = {short(forecast.money)}",
        )  # fmt: skip
    if forecast.kwh is not None and isinstance(made.machine, Device) and made.machine.power_watts is not None:
        cluster = made.run.cluster
        factors = [("power_share", cluster.power_share), ("PUE", cluster.power_usage_effectiveness)]
        names = "".join(f" x {name}" for name, share in factors if share is not None)
        shares = "".join(f" x {share:g}" for _, share in factors if share is not None)
        numbers = f"{short(hours)} x {short(made.machine.power_watts)} W{shares} / {KILO} = {short(forecast.kwh)} kWh"
        yield Headline(
            name="kwh", title="energy (kWh)", value=forecast.kwh, unit="amount", basis="assumed", source="arithmetic",
            formula=f"device-hours x rated power{names} = {numbers}",
        )  # fmt: skip
    yield _of_flops(made)


def _of_flops(made: Plan) -> Headline:
    params, tokens = _active(made), made.run.recipe.total_steps * made.run.recipe.tokens_per_step
    flops, rule = training_flops(params, tokens), RULES["training_flops"]
    numbers = f"6 x {short(params)} x {short(tokens)} = {short(flops)} FLOP"
    return Headline(
        name="flops", title=_SHOWN["flops"][0], value=flops, unit="flops", basis="assumed",
        formula=f"{rule.formula} = {numbers}", source=rule.source,
    )  # fmt: skip


def _active(made: Plan) -> int:
    """Parameters of the model that work for each token."""
    return tl.parameters(made.run.model).active if made.napkin is None else made.napkin.parameters


def _of_mfu(name: str, title: str, counted: str, made: Plan, source: str) -> Headline:
    """MFU as one convention counts it, with its numbers put in."""
    forecast = made.forecast
    flops, seconds = short(forecast.model_flops or 0), short(forecast.step_seconds or 0)
    peak, devices = short(forecast.peak_flops_per_second or 0), made.run.layout.devices
    return Headline(
        name=name, title=title, value=forecast.mfu, unit="share", basis=forecast.basis["total_seconds"],
        formula=f"{counted} of a step / (seconds x devices x peak) = "
                f"{flops} / ({seconds} s x {devices} x {peak}) = {format_percent(forecast.mfu or 0)}",
        source=source,
    )  # fmt: skip


def _of_napkin(answer: Napkin) -> list[Headline]:
    found = []
    for formula in answer.formulas:
        title, unit = _SHOWN[formula.name]
        value = getattr(answer, formula.name, answer.tokens / answer.params)
        found.append(
            Headline(
                name=formula.name, title=title, value=value, unit=unit,
                formula=f"{formula.formula} = {formula.numbers}",
                basis="exact" if formula.name == "tokens_per_parameter" else "assumed",
                source=formula.source,
            )
        )  # fmt: skip
    order = [answer.solved, "device_hours", "money", "kwh", "flops"]
    return sorted(found, key=lambda each: order.index(each.name) if each.name in order else len(order))


def _drawing(bars: tuple[Bar, ...]) -> Drawing:
    return Drawing(chart=waterfall(bars, _WHERE), table=waterfall_table(bars))


TIME = Calculator(
    name="time",
    title="Training time",
    question="How long does a run take, on how many devices, for how much money?",
    fields=(
        Field(name="solve", title="solve for", default="days", choices=_SOLVED, strict=True,
              about="the one of five numbers that follows from the other four"),
        Field(name="mfu_from", title="MFU is", default=GIVEN, strict=True,
              choices=one_of((GIVEN, PREDICTED), predicted="predicted for a model of the catalog"),
              about="given below, or predicted: how well a model of the catalog uses these devices"),
        Field(name="params", title="parameters N", default="8B", stops=rising("1M", "10T"),
              about="active parameters; of a predicted MFU those of the model"),
        Field(name="tokens", title="tokens D", default="15T", stops=rising("1M", "100T"),
              about='tokens trained on; "20x" is 20 for each parameter'),
        Field(name="device", title="device", default="h100-sxm", choices=one_of(catalog.device_names())),
        Field(name="count", title="devices", default="1024", stops=powers(1, 131072)),
        Field(name="days", title="days", default="30", stops=_DAYS, about='days, or a time such as "2w"'),
        Field(name="mfu", title=SIX_ND_MFU, default="40%", stops=tuple(f"{index}%" for index in range(1, 73)),
              about="model FLOPs utilization: the share of the peak that 6 N D FLOPs reach; attention is not counted"),
        Field(name="price", title="price per device-hour", stops=tuple(f"{index / 10:g}" for index in range(5, 101))),
        Field(name="dtype", title="dtype", about="whose peak counts; empty: bf16 where the device has it",
              choices=one_of(("", "bf16", "fp16", "fp8", "fp32"))),
        replace(MODEL, group=_LAYOUT, about="the model whose MFU is predicted"),
        of_run("layout.tensor", "tensor ranks", stops=powers(1, 64), group=_LAYOUT),
        of_run("layout.pipeline", "pipeline stages", stops=powers(1, 64), group=_LAYOUT),
        of_run("layout.replicate", "replicas", stops=powers(1, 1024), group=_LAYOUT),
        of_run("recipe.micro_batch", "micro-batch", stops=powers(1, 64), group=_LAYOUT),
        of_run("recipe.global_batch", "global batch", stops=powers(1, 65536), group=_LAYOUT),
        of_run("recipe.seq_len", "sequence length", stops=powers(128, 131072), group=_LAYOUT),
        of_run("recipe.activation_checkpointing", "activation checkpointing", group=_LAYOUT,
               choices=one_of(("", "none", "selective", "full"))),
    ),
    reply=_reply,
    presets={
        "Llama 3 8B": {"params": "8.03B", "tokens": "15T", "device": "h100-sxm", "count": "1024", "mfu": "40%"},
        "Llama 3 8B, its MFU predicted": {
            "mfu_from": PREDICTED, "run": "llama-3-8b", "tokens": "15T", "device": "h100-sxm", "count": "1024",
        },
        "What can 64 devices train of it in a month?": {
            "mfu_from": PREDICTED, "solve": "tokens", "run": "llama-3-8b", "count": "64", "days": "30",
        },
        "Llama 3 70B on 512 H200, predicted": {
            "mfu_from": PREDICTED, "run": "llama-3-70b", "tokens": "15T", "device": "h200", "count": "512",
            "recipe.activation_checkpointing": "full",
        },
        "Llama 3.1 405B": {"params": "405B", "tokens": "15.6T", "count": "16384", "mfu": "40%"},
        "GPT-2 XL on 8 A100": {"params": "1.5B", "tokens": "30B", "device": "a100-sxm-80gb", "count": "8"},
        "70B on 15T tokens, 1,024 H100": {"params": "70B", "tokens": "15T", "count": "1024", "mfu": "50%"},
        "What can 8 devices train in 2 weeks?": {"solve": "params", "tokens": "20x", "count": "8", "days": "14"},
        "What can 32 devices train in 2 weeks?": {"solve": "params", "tokens": "20x", "count": "32", "days": "14"},
    },
    any_of_run=True,
)  # fmt: skip
