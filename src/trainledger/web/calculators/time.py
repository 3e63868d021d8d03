"""Training time: parameters, tokens, devices, days and MFU, any one of which follows from the other four."""

from __future__ import annotations

import trainledger as tl
from trainledger import catalog
from trainledger.document import Table
from trainledger.plan.napkin import UNKNOWNS, Napkin, headline, why_impossible
from trainledger.report.style import COLOURS, bar_figure, bars
from trainledger.web.calculator import BAD, GOOD, Calculator, Drawing, Headline, Progress, Reply
from trainledger.web.field import Field, Query, one_of, powers, rising

_TITLES = {"params": "parameters", "tokens": "tokens", "count": "devices", "days": "days", "mfu": "MFU"}
_SOLVED = tuple((each, _TITLES[each]) for each in ("days", "count", "tokens", "params", "mfu"))
_SHOWN = {
    "flops": ("FLOPs of the run", "flops"), "params": ("parameters", "count"), "tokens": ("tokens", "count"),
    "count": ("devices", "integer"), "days": ("days", "amount"), "mfu": ("MFU", "share"),
    "device_hours": ("device-hours", "amount"), "money": ("money", "amount"),
    "tokens_per_parameter": ("tokens per parameter", "ratio"),
}  # fmt: skip
_DAYS = tuple(f"{each:g}" for each in (0.1, 0.25, 0.5, 1, 2, 3, 5, 7, 10, 14, 21, 30, 45, 60, 90, 120, 180, 270, 365))


def _reply(query: Query, progress: Progress) -> Reply:
    solved = query["solve"]
    words = query.chosen(*(name for name in (*UNKNOWNS, "price", "dtype") if name != solved))
    answer = tl.napkin(device=query["device"], **words)
    problem = why_impossible(answer)
    flags = [word for name, text in ({"device": query["device"]} | words).items() for word in (f"--{name}", text)]
    arguments = ", ".join(f"{name}={text!r}" for name, text in ({"device": query["device"]} | words).items())
    table = _where_time_goes(answer)
    return Reply(
        document=answer.document(),
        headlines=tuple(_headlines(answer)),
        verdict=headline(answer) if problem is None else str(problem),
        tone=GOOD if problem is None else BAD,
        drawings=(Drawing(title="Where the days go", figure=_figure(table), table=table),),
        values={solved: f"{getattr(answer, solved):.6g}"},
        words=("napkin", *flags),
        python=f"import trainledger as tl\n\nprint(tl.napkin({arguments}))",
        notes=answer.remarks,
    )


def _headlines(answer: Napkin) -> list[Headline]:
    found = []
    for each in answer.formulas:
        title, unit = _SHOWN[each.name]
        value = getattr(answer, each.name, answer.tokens / answer.params)
        found.append(
            Headline(
                name=each.name, title=title, value=value, unit=unit, formula=f"{each.formula} = {each.numbers}",
                basis="assumed" if each.name not in ("flops", "tokens_per_parameter") else "exact",
                source=each.source, asked=each.name in ("flops", answer.solved),
            )
        )  # fmt: skip
    order = [answer.solved, "device_hours", "money", "flops"]
    return sorted(found, key=lambda each: order.index(each.name) if each.name in order else len(order))


def _where_time_goes(answer: Napkin) -> Table:
    """The days at the peak, and those beyond it."""
    ideal = answer.days * answer.mfu
    rows = (("6 N D at the peak", ideal, answer.mfu), ("beyond the peak", answer.days - ideal, 1 - answer.mfu))
    return Table("days", ("", "days", "share"), rows, units=("", "amount", "share"))


def _figure(table: Table) -> dict[str, object]:
    names = [str(name) for name, _, _ in table.rows]
    data = bars("days", names, [days for _, days, _ in table.rows], COLOURS[0], "%{y}: %{x:.4g} days<extra></extra>")
    return bar_figure("", "days", names, [data | {"showlegend": False}])


TIME = Calculator(
    name="time",
    title="Training time",
    question="How long does a run take, on how many devices, for how much money?",
    fields=(
        Field(name="solve", title="solve for", default="days", choices=_SOLVED, strict=True,
              about="the one of five numbers that follows from the other four"),
        Field(name="params", title="parameters N", default="8B", stops=rising("1M", "10T"), about="active parameters"),
        Field(name="tokens", title="tokens D", default="15T", stops=rising("1M", "100T"),
              about='tokens trained on; "20x" is 20 for each parameter'),
        Field(name="device", title="device", default="h100-sxm", choices=one_of(catalog.device_names())),
        Field(name="count", title="devices", default="1024", stops=powers(1, 131072)),
        Field(name="days", title="days", default="30", stops=_DAYS, about='days, or a time such as "2w"'),
        Field(name="mfu", title="MFU", default="40%", stops=tuple(f"{each}%" for each in range(1, 73)),
              about="model FLOPs utilization: the share of the peak that is reached"),
        Field(name="price", title="price per device-hour", stops=tuple(f"{each / 10:g}" for each in range(5, 101))),
        Field(name="dtype", title="dtype", about="whose peak counts; empty: bf16 where the device has it",
              choices=one_of(("", "bf16", "fp16", "fp8", "fp32"))),
    ),
    reply=_reply,
    presets={
        "Llama 3 8B": {"params": "8.03B", "tokens": "15T", "device": "h100-sxm", "count": "1024", "mfu": "40%"},
        "Llama 3.1 405B": {"params": "405B", "tokens": "15.6T", "count": "16384", "mfu": "40%"},
        "GPT-2 XL on 8 A100": {"params": "1.5B", "tokens": "30B", "device": "a100-sxm-80gb", "count": "8"},
        "What can 32 devices train in 2 weeks?": {"solve": "params", "tokens": "20x", "count": "32", "days": "14"},
    },
)  # fmt: skip
